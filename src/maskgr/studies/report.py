"""What an experiment is asked, and what it answers."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from maskgr.artefact import is_artefact
from maskgr.data.open import open_dataset
from maskgr.errors import RequestError
from maskgr.recommender import RECOMMENDER, Recommender
from maskgr.run import TRAINING, require_same
from maskgr.settings import train_config

Row = tuple[str | float, ...]


@dataclass(frozen=True)
class Asked:
    """The same for every experiment."""

    data: str  # a folder or a built-in source
    out: Path  # where it trains; what is trained already is not trained again
    preset: str = "cpu"
    minutes: float | None = None  # of each training; None: the preset's
    users: int | None = None  # asked in evaluations; None: all
    seed: int = 0
    only: tuple[str, ...] = ()  # of an experiment with many trainings, these


@dataclass(frozen=True)
class Report:
    title: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Rows by column, as JSON wants them."""
        rows = [dict(zip(self.columns, row, strict=True)) for row in self.rows]
        return {**asdict(self), "rows": rows}


def require_dense(asked: Asked) -> None:
    """Before anything is trained for it."""
    if train_config(asked.preset).dense.table == "off":
        raise RequestError(
            f"the preset {asked.preset} has no dense head, which this experiment asks; use cpu"
        )


def trained(asked: Asked, data: str, name: str, settings: Sequence[str] = ()) -> Recommender:
    """The run `out/name` of `maskgr train`: as it is, gone on with, or trained from the start."""
    folder = asked.out / name
    begun = (folder / TRAINING / "run.json").exists()
    if begun:
        config = train_config(asked.preset, settings, minutes=asked.minutes, seed=asked.seed)
        require_same(folder, open_dataset(data), config)
    if not is_artefact(folder / RECOMMENDER):
        command = [sys.executable, "-m", "maskgr", "train", data, "--out", str(folder)]
        command += ["--preset", asked.preset, "--seed", str(asked.seed)]
        if asked.minutes is not None:
            command += ["--minutes", str(asked.minutes)]
        command += [word for setting in settings for word in ("--set", setting)]
        if begun:
            command.append("--resume")
        # A process of its own: its output would mix with the table, and it may start others.
        training = subprocess.Popen(command, stdout=sys.stderr)
        try:
            failed = training.wait()
        except KeyboardInterrupt:
            training.wait()  # it heard the same, and keeps a checkpoint
            raise
        if failed:
            raise RequestError(f"training for {folder} failed; the reason is above")
    return Recommender.load(folder)
