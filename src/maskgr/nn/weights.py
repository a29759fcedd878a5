"""The files that models are saved in: weights as safetensors, item counts as a NumPy array."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

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


def load_counts(folder: Path) -> npt.NDArray[np.int64]:
    """(items,) training events of each item."""
    try:
        return np.asarray(np.load(folder / COUNTS, allow_pickle=False), dtype=np.int64)
    except (OSError, ValueError, EOFError) as error:
        raise ArtefactError(f"{folder / COUNTS} is damaged ({error}); train again") from error
