"""The weights of a network as a safetensors file."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from maskgr.errors import ArtefactError


def save_weights(network: nn.Module, file: Path) -> None:
    save_file({n: v.cpu().contiguous() for n, v in network.state_dict().items()}, file)


def load_weights(network: nn.Module, file: Path) -> None:
    try:
        network.load_state_dict(load_file(file))
    except (OSError, SafetensorError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise ArtefactError(f"{file} cannot be used ({reason}); train again") from error
