"""Where tensors live: cuda, mps or cpu."""

from __future__ import annotations

from typing import TYPE_CHECKING

from maskgr.errors import RequestError

if TYPE_CHECKING:
    import torch


def pick_device(name: str) -> torch.device:
    """`auto` is the fastest at hand; anything else is torch's own word."""
    import torch

    has = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if name == "auto":
        name = next((kind for kind, there in has.items() if there), "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise RequestError(
            f"there is no device {name!r}; give auto, cpu, cuda, cuda:NUMBER or mps"
        ) from None
    if not has.get(device.type, True):
        raise RequestError(f"torch finds no {device.type} device here; give device auto or cpu")
    return device


def keep_freed_memory() -> None:
    """Lets glibc keep what is freed, instead of asking the kernel for fresh pages every step.

    Training frees and takes the same large blocks again and again; clearing new pages for them
    was the largest loss of time beside the arithmetic itself.
    """
    import ctypes
    import sys

    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other libcs do not have it
        if mallopt is not None:
            never_map, never_trim = (-4, 0), (-1, -1)
            mallopt(*never_map)
            mallopt(*never_trim)
