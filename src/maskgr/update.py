"""Going on from a trained model with new events, new users and new items.

New events come after the old ones of their users, in the order of their own times. Everything that
is learned starts from what it was, semantic IDs of old items stay, and the training runs over all
events, old and new: on the new ones alone a model forgets. What is held out is what a training on
all these events would hold out, so the result can be evaluated, and validation asks the users with
new events alone.
"""

from __future__ import annotations

import contextlib
import copy
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
import torch

from maskgr.data.config import DataConfig
from maskgr.data.dataset import Dataset
from maskgr.data.ingest import codes
from maskgr.data.sequences import Sequences
from maskgr.data.splits import Holdout, Split
from maskgr.data.tables import from_frame
from maskgr.errors import DataError, RequestError
from maskgr.models.base import TrainConfig, Training, Updates, require
from maskgr.recommender import Recommender, counts_made, fits_made, held_out, versions
from maskgr.settings import apply_settings
from maskgr.training.workspace import workspace
from maskgr.users import Users

LEARNING_RATE = 0.3  # of the first training's: what is learned already should not be lost
MINUTES = 5.0


@dataclass(frozen=True, eq=False)
class Update:
    """A recommender that knows the new items, and all events, before it is trained on."""

    recommender: Recommender
    data: Dataset
    changed: npt.NDArray[np.int64]  # (users,) the rows of the users with new events


def update_config(
    recommender: Recommender, settings: Sequence[str] = (), *, minutes: float | None = None
) -> TrainConfig:
    """The recommender's settings for a training that goes on: shorter and with smaller steps."""
    fit = recommender.config.fit
    start = replace(
        recommender.config,
        fit=replace(
            fit,
            minutes=MINUTES if minutes is None else minutes,
            learning_rate=LEARNING_RATE * fit.learning_rate,
        ),
    )
    config = apply_settings(start, settings)
    if config.fit.steps != fit.steps and minutes is None:
        config = replace(config, fit=replace(config.fit, minutes=0.0))  # steps replace minutes
    if replace(config, fit=start.fit, device=start.device) != start:
        raise RequestError("an update changes settings of fit alone; train again to change others")
    return config


def prepare(
    recommender: Recommender,
    events: Any,
    items: Any = None,
    *,
    embeddings: npt.NDArray[Any] | None = None,
) -> Update:
    """Checks the new events and items, and puts them behind the old ones."""
    model = require(recommender.model, Updates)
    torch.manual_seed(recommender.config.seed)  # new items may start at random
    catalogue, grown = recommender.items, recommender.model
    if items is not None:
        new = recommender.new_items(items)
        catalogue = recommender.catalogue_with(new)
        if len(new):
            grown = model.grown(new, embeddings)
    if grown is recommender.model:
        grown = copy.deepcopy(grown)  # the recommender stays what it is
    log = _read(recommender, events, catalogue)
    users, changed = _joined(recommender.users, log)
    data = Dataset(
        users=users.ids,
        items=catalogue,
        histories=users.histories,
        provenance={"source": "update", "of": dict(recommender.made.get("provenance", {}))},
    )
    return Update(replace(recommender, model=grown, items=catalogue, users=users), data, changed)


def _read(recommender: Recommender, events: Any, catalogue: pl.DataFrame) -> Dataset:
    """The new events, read as the first ones were; no filter may leave out an old item."""
    before = DataConfig(**recommender.made.get("data_config", {}))
    config = replace(before, k_core=0, unknown_items="error", unused_items="keep")
    frame = from_frame(events, "the new events").frame
    if not len(frame):
        raise DataError("the new events have no rows; nothing is to be learned from them")
    return Dataset.from_frames(frame, catalogue.select("item_id"), config=config)


def _joined(users: Users, log: Dataset) -> tuple[Users, npt.NDArray[np.int64]]:
    """All users with all of their events, and the rows of those with new ones."""
    old, ids = users.histories, log.users.cast(users.ids.dtype, strict=False)
    if ids.null_count():
        first = log.users[int(ids.is_null().arg_max() or 0)]
        raise DataError(
            f"user {first!r} of the new events is no {users.ids.dtype}, as the old users' IDs are; "
            "write them the same way"
        )
    rows = codes(ids, users.ids).to_numpy().astype(np.int64)
    new = np.flatnonzero(rows < 0)
    rows[new] = len(old) + np.arange(len(new))
    owners = np.concatenate([old.owners, rows[log.histories.owners]])
    values = np.concatenate([old.values, log.histories.values])
    order = np.argsort(owners, kind="stable")  # new events behind the old of the same user
    lengths = np.bincount(owners, minlength=len(old) + len(new))
    histories = Sequences.from_lengths(values[order], lengths)
    return Users.of(pl.concat([users.ids, ids.gather(new)]), histories), np.sort(rows)


def update_split(data: Dataset, changed: npt.NDArray[np.int64], config: TrainConfig) -> Split:
    """What is held out anyway, but validated on the users with new events alone. Where nothing is
    held out, the last item of each of these is, for the validation alone."""
    if config.leave_out:
        split = held_out(data, config)
        asked = np.flatnonzero(np.isin(split.validation.users, changed))
        validation = split.validation.select(asked) if len(asked) else split.validation
        return replace(split, validation=validation)
    histories = data.histories
    users = changed[histories.lengths[changed] > 1]
    chosen = histories.select(users)
    is_last = np.zeros(len(histories.values), dtype=bool)
    is_last[histories.offsets[1:][users] - 1] = True
    targets = chosen.values[chosen.offsets[1:] - 1][:, None]
    validation = Holdout(users, chosen.without_last(), targets)
    nobody = validation.select(np.zeros(0, dtype=np.int64))
    return Split(histories.keep(~is_last), validation, nobody)


def train(
    update: Update,
    config: TrainConfig,
    *,
    run: Path | str | None = None,
    resume: bool = False,
    progress: bool = False,
    made: Mapping[str, Any] | None = None,
) -> Recommender:
    """Trains on; see `Recommender.update`."""
    if run is None and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise RequestError(
            "processes that train together need one folder for all of them; give run=…"
        )
    start, before = time.perf_counter(), update.recommender
    split = update_split(update.data, update.changed, config)
    with contextlib.ExitStack() as stack:
        folder = Path(run or stack.enter_context(TemporaryDirectory(prefix="maskgr-")))
        work = stack.enter_context(
            workspace(folder, device=config.device, resume=resume, progress=progress)
        )
        training = Training(update.data, split, config, work)
        trained = require(before.model, Updates).update(training)
    return replace(
        before,
        model=trained,
        repeats=bool(split.train.repeats().any()),
        made={
            **(made or {}),
            "fingerprint": update.data.fingerprint,
            "provenance": dict(update.data.provenance),
            "data_config": before.made.get("data_config", {}),
            "updates": before.made.get("fingerprint"),
            "counts": counts_made(update.data),
            "fits": fits_made(training.fits),
            "seconds": round(time.perf_counter() - start, 3),
            "versions": versions(),
        },
    )
