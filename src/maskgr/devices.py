"""Choice of the torch device, and a memory setting of the C library."""

from __future__ import annotations

import ctypes
import sys
from typing import TYPE_CHECKING

from maskgr.errors import RequestError

if TYPE_CHECKING:
    import torch


def pick_device(name: str) -> torch.device:
    """The device of this name; `auto` is cuda if available, else mps, else cpu."""
    import torch

    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if name == "auto":
        name = next((kind for kind, found in available.items() if found), "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise RequestError(
            f"there is no device {name!r}; give auto, cpu, cuda, cuda:NUMBER or mps"
        ) from None
    if not available.get(device.type, True):
        raise RequestError(f"torch finds no {device.type} device here; give device auto or cpu")
    return device


def keep_freed_memory() -> None:
    """Makes glibc keep freed memory instead of returning it to the kernel.

    Every training step frees and allocates the same large blocks; without this, zeroing fresh
    pages for them is the largest cost after the arithmetic itself.
    """
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl does not have it
        if mallopt is not None:
            mallopt(-4, 0)  # M_MMAP_MAX: allocate large blocks from the heap, not by mmap
            mallopt(-1, -1)  # M_TRIM_THRESHOLD: never shrink the heap
