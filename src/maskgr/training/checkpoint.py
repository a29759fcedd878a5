"""Checkpoints: whole or not there, the last two kept, so that one damaged folder costs minutes."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from maskgr.artefact import read_manifest, recover_all, remove_folder, write_folder
from maskgr.errors import ArtefactError
from maskgr.training.batches import Place

KIND, SCHEMA = "checkpoint", 1
KEPT = 2
TENSORS = "state.safetensors"


@dataclass(frozen=True)
class State:
    """A checkpoint's numbers; its tensors are beside them."""

    step: int = 0
    place: Place = field(default_factory=Place)
    total: int = 0  # steps that the schedule is made for
    seconds: float = 0.0
    tokens: int = 0
    best: float | None = None  # recall@10
    best_step: int = 0
    waited: int = 0  # validations since the best
    validated: int = 0  # of the schedule's validations, those passed
    validated_step: int = 0
    validation_seconds: float = 0.0

    @classmethod
    def of(cls, values: dict[str, Any]) -> State:
        return cls(**{**values, "place": Place(**values["place"])})


@dataclass(frozen=True)
class Checkpoint:
    """Everything that resuming needs."""

    folder: Path  # with the files that were saved beside the tensors
    state: dict[str, Any]  # numbers and texts
    tensors: dict[str, Tensor]

    @property
    def step(self) -> int:
        return int(self.state["step"])


def save_checkpoint(
    run: Path,
    step: int,
    state: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    files: Iterable[Path] = (),
) -> None:
    """Writes `checkpoints/STEP` below `run`, with copies of `files`, and removes all but the
    newest, and what is of a later step: it was damaged, or this one would not have been reached."""
    folder = run / "checkpoints"
    with write_folder(folder / f"{step:010}", KIND, SCHEMA, {"step": step, **state}) as draft:
        save_file({name: t.contiguous() for name, t in tensors.items()}, draft / TENSORS)
        for file in files:
            shutil.copyfile(file, draft / file.name)
    found = _newest_first(folder)
    now = [int(own.name) for own in found].index(step)
    for other in (*found[:now], *found[now + KEPT :]):
        remove_folder(other)


def load_checkpoint(run: Path) -> Checkpoint | None:
    """The newest checkpoint that is whole; a damaged one is named, and the one before it used."""
    for folder in _newest_first(run / "checkpoints"):
        try:
            state = read_manifest(folder, KIND, SCHEMA).config
            return Checkpoint(folder, state, load_file(folder / TENSORS))
        except (ArtefactError, SafetensorError, OSError) as error:
            print(f"warning: {error}; going on from the checkpoint before it", file=sys.stderr)
    return None


def _newest_first(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    recover_all(folder)
    return sorted((p for p in folder.iterdir() if p.name.isdigit()), reverse=True)
