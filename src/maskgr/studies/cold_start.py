"""Items that nobody trained on: held out whole, added afterwards by their text, then generated."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from maskgr.data.dataset import Dataset
from maskgr.data.open import open_dataset
from maskgr.data.splits import Holdout, leave_out
from maskgr.evaluation.protocol import evaluate
from maskgr.evaluation.ranking import Ranker
from maskgr.models.base import Decodes, require
from maskgr.recommender import Recommender
from maskgr.studies.report import Asked, Report, Row, percent
from maskgr.studies.runner import Runner

SHARE = 0.05  # of the items
METRICS = ("recall@5", "recall@10", "ndcg@5", "ndcg@10")


def run(asked: Asked) -> Report:
    """Recall for users whose next item is new, and for the others, beside popularity."""
    job = asked.job()
    dataset = open_dataset(asked.data)
    cold = np.zeros(len(dataset.items), dtype=bool)
    count = max(1, round(SHARE * len(cold)))
    cold[np.random.default_rng(asked.seed).permutation(len(cold))[:count]] = True
    warm = without(dataset, cold)
    folder = asked.out / "cold-start-data"
    warm.save(folder)
    runner = Runner.open(str(folder), asked.out)
    models = [runner.load(runner.train(job)), Recommender.train(warm, model="popularity")]
    embeddings = None if dataset.embeddings is None else dataset.embeddings[cold]
    new = dataset.items.filter(cold)
    models = [model.add_items(new, embeddings=embeddings) for model in models]
    test = renumbered(leave_out(dataset.histories).test, cold)
    # Users whose history is too short without the new items have no test item: their last item
    # was trained on.
    test = test.select(np.flatnonzero(np.isin(test.users, leave_out(warm.histories).test.users)))
    is_cold = test.targets[:, 0] >= len(warm.items)
    rows: list[Row] = []
    for label, chosen in (("new", is_cold), ("trained on", ~is_cold)):
        part = test.select(np.flatnonzero(chosen))
        if asked.users is not None:
            part = part.sample(asked.users)
        for model in models:
            for steps, ranker in _rankers(model):
                found = evaluate(ranker, part, len(dataset.items), protocols=("unseen",))
                figures = percent(found.values["unseen"], METRICS)
                rows.append((label, len(part.users), model.config.name, steps, *figures))
    return Report(
        f"Cold start on {asked.data}: {count:,} of {len(cold):,} items added after training, test, "
        "protocol unseen, percent",
        ("next item", "users", "model", "steps", *METRICS),
        tuple(rows),
    )


def _rankers(recommender: Recommender) -> Iterator[tuple[int | str, Ranker]]:
    """Generation in one step and digit by digit; popularity has one way only."""
    if recommender.config.name == "popularity":
        yield "", recommender.ranker()
        return
    for steps in (1, require(recommender.model, Decodes).levels):
        decoding = recommender.decoding(retrieval="generative", steps=steps)
        yield steps, recommender.ranker(decoding)


def without(dataset: Dataset, cold: npt.NDArray[np.bool_]) -> Dataset:
    """The dataset as it was before the `cold` items came."""
    number = np.cumsum(~cold) - 1
    kept = dataset.histories.keep(~cold[dataset.histories.values])
    times = dataset.timestamps
    return replace(
        dataset,
        items=dataset.items.filter(~cold),
        histories=replace(kept, values=number[kept.values].astype(np.int32)),
        timestamps=None if times is None else times[~cold[dataset.histories.values]],
        embeddings=None if dataset.embeddings is None else dataset.embeddings[~cold],
    )


def renumbered(holdout: Holdout, cold: npt.NDArray[np.bool_]) -> Holdout:
    """The cases in the item numbers of a catalogue that has the `cold` items last."""
    order = np.argsort(cold, kind="stable")
    number = np.empty(len(cold), dtype=np.int32)
    number[order] = np.arange(len(cold))
    histories = replace(holdout.histories, values=number[holdout.histories.values])
    return Holdout(holdout.users, histories, number[holdout.targets])
