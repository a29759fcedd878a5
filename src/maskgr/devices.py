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
