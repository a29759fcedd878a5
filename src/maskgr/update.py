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
from maskgr.data.ingest import cast_ids, codes
from maskgr.data.sequences import Sequences
from maskgr.data.splits import Split, last_targets
from maskgr.data.tables import below, from_frame
from maskgr.errors import DataError, RequestError
from maskgr.made import how_made
from maskgr.models.base import TrainConfig, Training, Updates, require
from maskgr.recommender import Recommender, held_out
from maskgr.requests import new_items
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
    counted = any(setting.partition("=")[0].strip().endswith("steps") for setting in settings)
    if counted and minutes is None:
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
        new = new_items(recommender.items, items)
        catalogue = below(recommender.items, new)
        if len(new):
            grown = model.grown(new, embeddings)
    if grown is recommender.model:
        grown = copy.deepcopy(grown)  # the recommender stays what it is
    log = _read(recommender, events, catalogue)
    users, changed = _joined(recommender.users, log)
    before = dict(recommender.made.get("provenance", {}))
    text = before.get("text", [])
    data = Dataset(
        users=users.ids,
        items=catalogue,
        histories=users.histories,
        text=tuple(text),
        provenance={"source": "update", "of": before, "text": text},
    )
    return Update(replace(recommender, model=grown, items=catalogue, users=users), data, changed)


def _read(recommender: Recommender, events: Any, catalogue: pl.DataFrame) -> Dataset:
    """The new events, read as the first ones were; no filter may leave out an old item."""
    before = DataConfig(**recommender.made.get("data_config", {}))
    frame = from_frame(events, "the new events").frame
    if not len(frame):
        raise DataError("the new events have no rows; nothing is to be learned from them")
    config = replace(
        _types_present(before, frame), k_core=0, unknown_items="error", unused_items="keep"
    )
    return Dataset.from_frames(frame, catalogue, config=config)


def _types_present(config: DataConfig, frame: pl.DataFrame) -> DataConfig:
    """The same without the event types that a short log happens not to have."""
    column = (config.columns or {}).get("event_type", "event_type")
    if column not in frame.columns or (config.events is None and config.targets is None):
        return config
    found = set(frame[column].cast(pl.String, strict=False).unique())
    events = (
        None if config.events is None else {k: v for k, v in config.events.items() if k in found}
    )
    targets = None if config.targets is None else tuple(t for t in config.targets if t in found)
    if targets == () or (events is not None and not any(events.values())):
        wanted = ", ".join(config.targets or config.events or ())
        raise DataError(
            f"the new events have none of the types {wanted}; nothing is to be learned from them"
        )
    return replace(config, events=events, targets=targets)


def _joined(users: Users, log: Dataset) -> tuple[Users, npt.NDArray[np.int64]]:
    """All users with all of their events, and the rows of those with new ones."""
    old, ids = users.histories, cast_ids(log.users, users.ids.dtype)
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
    if old.weights is not None or log.histories.weights is not None:
        weights = np.concatenate([_weights(old), _weights(log.histories)])
        histories = replace(histories, weights=weights[order])
    return Users.of(pl.concat([users.ids, ids.gather(new)]), histories), np.sort(rows)


def _weights(histories: Sequences) -> npt.NDArray[np.float32]:
    ones = np.ones(len(histories.values), dtype=np.float32)
    return ones if histories.weights is None else histories.weights


def update_split(data: Dataset, changed: npt.NDArray[np.int64], config: TrainConfig) -> Split:
    """What is held out anyway, but validated on the users with new events alone. Where nothing is
    held out, the last target of each of these is, for the validation alone."""
    if config.leave_out:
        split = held_out(data, config)
        asked = np.flatnonzero(np.isin(split.validation.users, changed))
        validation = split.validation.select(asked) if len(asked) else split.validation
        return replace(split, validation=validation)
    histories = data.histories
    cases = last_targets(histories.select(changed))
    cases = cases.select(np.flatnonzero(cases.histories.lengths))
    validation = replace(cases, users=changed[cases.users])
    kept = histories.lengths.copy()
    kept[validation.users] = cases.histories.lengths
    train = histories.keep(histories.places < np.repeat(kept, histories.lengths))
    return Split(train, validation, validation.select(np.zeros(0, dtype=np.int64)))


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
        if work.world.size > 1:
            work.world.require_alike(f"{update.data.content} {config}")
        trained = require(before.model, Updates).update(training)
        work.world.wait()  # as in `Recommender.train`
    return replace(
        before,
        model=trained,
        repeats=bool(split.train.repeats().any()),
        made={
            **(made or {}),
            "data_config": before.made.get("data_config", {}),
            "updates": before.made.get("fingerprint"),
            **how_made(update.data, training.fits, time.perf_counter() - start),
        },
    )
