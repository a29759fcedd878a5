"""MaskGR: masked diffusion over semantic IDs for recommendation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from maskgr.data.dataset import Dataset as Dataset
    from maskgr.recommender import Recommender as Recommender

from maskgr.version import __version__

_PUBLIC = {"Dataset": "maskgr.data.dataset", "Recommender": "maskgr.recommender"}
__all__ = ["Dataset", "Recommender", "__version__"]


def __getattr__(name: str) -> Any:
    # Imported on first use, so that `maskgr --help` does not wait for data frames and tensors.
    if name in _PUBLIC:
        from importlib import import_module

        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'maskgr' has no attribute {name!r}")
