"""Items that nobody trained on: held out whole, added afterwards by their text, then generated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from maskgr.data.dataset import Dataset
from maskgr.data.open import open_dataset
from maskgr.data.splits import Holdout, leave_out
from maskgr.recommender import Recommender
from maskgr.studies import paper
from maskgr.studies.measures import Measure
from maskgr.studies.runner import Runner
from maskgr.studies.study import FORMS, Asked, Study, Variant, Way, data_name

SHARE = 0.05  # of the items
NEW, KNOWN = "new", "trained on"


@dataclass(frozen=True, eq=False)
class ColdRunner(Runner):
    """Trains without the `cold` items, adds them, and asks for them, or for the others."""

    _: KW_ONLY
    whole: Dataset
    cold: npt.NDArray[np.bool_]  # (items,)

    def questions(self, run: Path, measure: Measure) -> tuple[Recommender, Holdout]:
        given = self.whole.embeddings
        recommender = self.load(run).add_items(
            self.whole.items.filter(self.cold),
            embeddings=None if given is None else given[self.cold],
        )
        test = renumbered(leave_out(self.whole.histories).test, self.cold)
        # Users whose history is too short without the new items have no test item: their last
        # item was trained on.
        asked = np.isin(test.users, leave_out(self.dataset.histories).test.users)
        is_new = test.targets[:, 0] >= len(self.dataset.items)
        wanted = is_new if measure.group == NEW else ~is_new
        return recommender, test.select(np.flatnonzero(asked & wanted))


def open_cold(data: str, asked: Asked) -> Runner:
    """A random share of the items is left out; the rest is a dataset of its own in `out`."""
    whole = open_dataset(data)
    cold = np.zeros(len(whole.items), dtype=bool)
    count = max(1, round(SHARE * len(cold)))
    cold[np.random.default_rng(asked.seed).permutation(len(cold))[:count]] = True
    folder = asked.out / "cold-start-data" / data_name(data)
    without(whole, cold).save(folder)
    plain = Runner.open(str(folder), asked.out)
    return ColdRunner(**vars(plain), whole=whole, cold=cold)


def ways(model: str, levels: int) -> Sequence[Way]:
    """Generation in one step and digit by digit; popularity has one way only."""
    return [
        Way((group, steps or ""), {"group": group, "decoding": {"steps": steps} if steps else {}})
        for group in (NEW, KNOWN)
        for steps in sorted({1, levels} if levels else {0})
    ]


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


STUDY = Study(
    title="Items added after training",
    where="",
    variants=[Variant(name, name) for name in (*FORMS, "popularity")],
    metrics=paper.METRICS,
    labels=("next item", "steps"),
    measure=Measure(protocols=("unseen",)),
    facts=("users", "minutes", "users/s"),
    ways=ways,
    open=open_cold,
    notes=(
        f"{SHARE:.0%} of the items are held out of training and added afterwards by their text; "
        "next item: whether the user's next item is one of them",
    ),
)
