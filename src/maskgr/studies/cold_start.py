"""Items that nobody trained on: held out whole, added afterwards by their text, asked for."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from maskgr.config import TrainConfig
from maskgr.data.dataset import Dataset
from maskgr.data.open import open_dataset
from maskgr.data.sequences import Sequences
from maskgr.data.splits import Holdout, leave_out
from maskgr.evaluation.protocol import evaluate
from maskgr.recommender import Recommender
from maskgr.studies.dense import METRICS, WAYS
from maskgr.studies.report import Asked, Report, Row, require_dense, trained

SHARE = 0.05  # of the items


def run(asked: Asked) -> Report:
    """Recall on users whose next item is one of those held out, and on the others."""
    require_dense(asked)
    dataset = open_dataset(asked.data)
    cold = np.zeros(len(dataset.items), dtype=bool)
    count = max(1, round(SHARE * len(cold)))
    cold[np.random.default_rng(asked.seed).permutation(len(cold))[:count]] = True
    warm = without(dataset, cold)
    folder = asked.out / "cold-start-data"
    warm.save(folder)
    models = {
        "maskgr": trained(asked, str(folder), "cold-start"),
        "popularity": Recommender.train(warm, config=TrainConfig(model="popularity")),
    }
    embeddings = None if dataset.embeddings is None else dataset.embeddings[cold]
    models = {
        name: model.add_items(dataset.items.filter(cold), embeddings=embeddings)
        for name, model in models.items()
    }
    test = renumbered(leave_out(dataset.histories).test, cold)
    # Who has too little without the new items was trained on to the last: not to be asked.
    split = np.flatnonzero(np.isin(test.users, leave_out(warm.histories).test.users))
    test = Holdout(test.users[split], test.histories.select(split), test.targets[split])
    is_cold = test.targets[:, 0] >= len(warm.items)
    rows: list[Row] = []
    for label, chosen in (("new", is_cold), ("trained on", ~is_cold)):
        users = np.flatnonzero(chosen)
        part = Holdout(test.users[users], test.histories.select(users), test.targets[users])
        if asked.users is not None:
            part = part.sample(asked.users)
        for name, model in models.items():
            for way in WAYS if name == "maskgr" else ("",):
                how = model.decoding(retrieval=way) if way else None
                found = evaluate(model, part, decoding=how, protocols=("unseen",))
                values = found.metrics["unseen"]
                figures = (round(100 * values[metric].mean, 2) for metric in METRICS)
                rows.append((label, len(part.users), name, way, *figures))
    return Report(
        f"Cold start on {asked.data}: {count:,} of {len(cold):,} items added after training, test, "
        "protocol unseen, percent",
        ("next item", "users", "model", "retrieval", *METRICS),
        tuple(rows),
    )


def without(dataset: Dataset, cold: npt.NDArray[np.bool_]) -> Dataset:
    """The dataset as it was before the `cold` items came."""
    number = np.cumsum(~cold) - 1
    kept = dataset.histories.keep(~cold[dataset.histories.values])
    times = dataset.timestamps
    return replace(
        dataset,
        items=dataset.items.filter(~cold),
        histories=Sequences(number[kept.values].astype(np.int32), kept.offsets),
        timestamps=None if times is None else times[~cold[dataset.histories.values]],
        embeddings=None if dataset.embeddings is None else dataset.embeddings[~cold],
    )


def renumbered(holdout: Holdout, cold: npt.NDArray[np.bool_]) -> Holdout:
    """The questions in the numbers of a catalogue with the `cold` items behind the others."""
    order = np.argsort(cold, kind="stable")
    number = np.empty(len(cold), dtype=np.int32)
    number[order] = np.arange(len(cold))
    histories = Sequences(number[holdout.histories.values], holdout.histories.offsets)
    return Holdout(holdout.users, histories, number[holdout.targets])
