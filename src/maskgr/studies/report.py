"""The request that a study gets, the table that it returns, and the trainings that it needs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass
from pathlib import Path
from typing import Any

from maskgr.artefact import is_artefact
from maskgr.data.open import open_dataset
from maskgr.data.splits import Holdout
from maskgr.errors import RequestError
from maskgr.evaluation.metrics import Mean
from maskgr.models.base import TrainConfig, capabilities, model_class, train_config
from maskgr.recommender import RECOMMENDER, Recommender
from maskgr.run import TRAINING, require_same

Row = tuple[str | float, ...]


@dataclass(frozen=True)
class Asked:
    """The request; every study takes the same."""

    data: str  # a folder or a built-in source
    out: Path  # folder of its trainings; a finished one is used again
    _: KW_ONLY
    model: str | None = None  # None: the study's own
    preset: str | None = None  # None: the study's own, mostly cpu
    minutes: float | None = None  # of each training; None: the preset's
    users: int | None = None  # evaluated users; None: all
    seed: int = 0
    only: tuple[str, ...] = ()  # the variants to train, of a study that has variants

    def config(self, settings: Sequence[str] = ()) -> TrainConfig:
        """What to train, with `key=value` settings on top of the preset."""
        return train_config(
            self.preset or "cpu",
            settings,
            model=self.model,
            minutes=self.minutes,
            seed=self.seed,
        )

    def sample(self, holdout: Holdout) -> Holdout:
        """The users to evaluate."""
        return holdout if self.users is None else holdout.sample(self.users)


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


def percent(found: Mapping[str, Mean], names: Iterable[str]) -> list[float]:
    """The means of these metrics, in percent."""
    return [round(100 * found[name].mean, 2) for name in names]


def trained(asked: Asked, data: str, name: str, settings: Sequence[str] = ()) -> Recommender:
    """The run `out/name` of `maskgr train`: reused, resumed, or trained from the start."""
    config, folder = asked.config(settings), asked.out / name
    if "decode digits" not in capabilities(model_class(config.name)):  # before it is trained
        raise RequestError(f"{config.name} does not generate, and studies do; use --model maskgr")
    begun = (folder / TRAINING / "run.json").exists()
    if begun:
        require_same(folder, open_dataset(data), config)
    if not is_artefact(folder / RECOMMENDER):
        _train(asked, config, data, folder, settings, resume=begun)
    return Recommender.load(folder)


def _train(
    asked: Asked,
    config: TrainConfig,
    data: str,
    folder: Path,
    settings: Sequence[str],
    *,
    resume: bool,
) -> None:
    command = [sys.executable, "-m", "maskgr", "train", data, "--out", str(folder)]
    command += ["--model", config.name, "--preset", asked.preset or "cpu"]
    command += ["--seed", str(asked.seed)]
    if asked.minutes is not None:
        command += ["--minutes", str(asked.minutes)]
    command += [word for setting in settings for word in ("--set", setting)]
    if resume:
        command.append("--resume")
    # A process of its own: its output would mix with the table, and it may start others.
    training = subprocess.Popen(command, stdout=sys.stderr)
    try:
        failed = training.wait()
    except KeyboardInterrupt:
        training.wait()  # it got the same signal, and writes a checkpoint
        raise
    if failed:
        raise RequestError(f"training for {folder} failed; the reason is above")
