"""The files that models are saved in: weights as safetensors, item counts as a NumPy array."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from maskgr.data.sequences import Counts
from maskgr.errors import ArtefactError

COUNTS = "counts.npy"
HUB_WEIGHTS = "model.safetensors"  # as the Hugging Face hub expects


def save_weights(network: nn.Module, file: Path) -> None:
    save_file({n: v.cpu().contiguous() for n, v in network.state_dict().items()}, file)


def saved_file(file: Path) -> Path:
    """The file, or what it is called in a folder for the hub."""
    return file if file.exists() else file.with_name(HUB_WEIGHTS)


def load_weights(network: nn.Module, file: Path) -> None:
    file = saved_file(file)
    try:
        network.load_state_dict(load_file(file))
    except (OSError, SafetensorError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise ArtefactError(f"{file} cannot be used ({reason}); train again") from error


def load_counts(folder: Path) -> Counts:
    """(items,) training events of each item, by weight."""
    try:
        counts: Counts = np.load(folder / COUNTS, allow_pickle=False)
        if counts.ndim != 1 or counts.dtype not in (np.int64, np.float64):
            raise ValueError(f"it holds {counts.dtype} of shape {counts.shape}")
        return counts
    except (OSError, ValueError, EOFError) as error:
        raise ArtefactError(f"{folder / COUNTS} is damaged ({error}); train again") from error
