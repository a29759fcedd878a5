from __future__ import annotations

import numpy as np
import pytest
import torch

from maskgr.data.sequences import Sequences
from maskgr.data.splits import Holdout
from maskgr.evaluation.ranking import Query, Ranked
from maskgr.models.maskgr.bias import FOLLOW, REPEAT, Bias, Shortlist, choose_bias
from maskgr.models.neighbours import Neighbours
from maskgr.models.sasrec import SASRec, SASRecConfig
from maskgr.nn.scoring import best_items
from maskgr.nn.transformer import TransformerConfig

ITEMS = 6
TRAIN = Sequences.of([[0, 1, 2], [0, 1], [3, 4]])
HISTORIES = Sequences.of([[0, 4, 0], [], [3], [5]])


def history(repeat: float | None) -> SASRec:
    network = TransformerConfig(layers=1, width=4, heads=1, hidden=4)
    made = SASRec(SASRecConfig(network, repeat_bias=repeat is not None), np.ones(ITEMS, np.int64))
    if made.repeat is not None and repeat is not None:
        with torch.no_grad():
            made.repeat.fill_(repeat)
    return made


def biases(bias: Bias, repeat: float | None, neighbours: bool) -> dict[tuple[int, int], float]:
    """(user, item) -> its bias."""
    table = Neighbours.count(TRAIN, ITEMS, 3) if neighbours else None
    bonus = bias.bonus(history(repeat), table, HISTORIES)
    assert bonus is not None
    keys = list(zip(bonus.rows.tolist(), bonus.items.tolist(), strict=True))
    assert keys == sorted(set(keys))
    return dict(zip(keys, bonus.values.tolist(), strict=True))


def test_repeat_bias_is_on_every_item_of_a_history_once() -> None:
    found = biases(Bias(repeat=2.0), -1.5, neighbours=True)  # scaled by sqrt(width) = 2
    assert found == dict.fromkeys([(0, 0), (0, 4), (2, 3), (3, 5)], -6.0)


def test_neighbours_that_a_user_has_not_had_are_raised() -> None:
    strengths = Neighbours.count(TRAIN, ITEMS, 3).after(HISTORIES)
    pairs = zip(strengths[0].owners.tolist(), strengths[0].values.tolist(), strict=True)
    expected = {key: 0.5 * float(v) for key, v in zip(pairs, strengths[1], strict=True)}
    assert set(expected) == {(0, 1), (0, 2), (2, 4)}
    seen = dict.fromkeys([(0, 0), (0, 4), (2, 3), (3, 5)], 0.0)
    assert biases(Bias(follow=0.5), None, neighbours=True) == pytest.approx(expected | seen)


def test_an_item_of_the_history_has_the_repeat_bias_though_it_is_a_neighbour() -> None:
    table = Neighbours.count(TRAIN, ITEMS, 3)
    bonus = Bias(1.0, 1.0).bonus(history(-3.0), table, Sequences.of([[1, 0]]))
    assert bonus is not None
    found = dict(zip(bonus.items.tolist(), bonus.values.tolist(), strict=True))
    assert found[1] == found[0] == -6.0
    assert found[2] > 0


def test_no_bonus_where_nothing_is_biased() -> None:
    table = Neighbours.count(TRAIN, ITEMS, 3)
    assert Bias().bonus(history(None), table, HISTORIES) is None
    assert Bias(follow=1.0).bonus(history(0.0), None, HISTORIES) is None


@torch.no_grad()
@pytest.mark.parametrize("repeat", [None, -0.4, 0.7])
@pytest.mark.parametrize("neighbours", [False, True])
def test_shortlist_ranks_as_the_catalogue_does(repeat: float | None, neighbours: bool) -> None:
    torch.manual_seed(0)
    own, queries = history(repeat).eval(), torch.randn(len(HISTORIES), 4)
    table = Neighbours.count(TRAIN, ITEMS, 3) if neighbours else None
    for top in (2, ITEMS):
        shortlist = Shortlist.of(own, table, HISTORIES, queries, top)
        for bias in (Bias(), Bias(2.0), Bias(4.0, 0.3), Bias(1.0, 1.5)):
            bonus = bias.bonus(own, table, HISTORIES)
            expected, _ = best_items(queries, own.table(), top, bonus=bonus)
            assert np.array_equal(shortlist.rank(bias).items, expected.numpy())


class Ranker:
    """Finds the target at a rank that falls and rises with the weights."""

    def __init__(self, best: Bias) -> None:
        self.best, self.asked = best, list[Bias]()

    def __call__(self, query: Query, bias: Bias) -> Ranked:
        self.asked.append(bias)
        far = abs(bias.repeat - self.best.repeat) + abs(bias.follow - self.best.follow)
        items = np.zeros((len(query.histories), 10), dtype=np.int32)
        items[:, min(9, round(5 * far))] = 1
        return Ranked(items, items.astype(np.float32))


HOLDOUT = Holdout(np.arange(2), Sequences.of([[2], [3]]), np.ones((2, 1), dtype=np.int32))


def test_weights_with_the_best_validation_are_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    ranker = Ranker(Bias(2.0, 0.8))
    assert choose_bias(ranker, HOLDOUT, repeats=True, neighbours=True) == Bias(2.0, 0.8)
    assert len(ranker.asked) == len(REPEAT) + len(FOLLOW)
    told = capsys.readouterr().err.splitlines()
    assert [line.split(",")[0] for line in told] == [
        "bias: weight of repeat 2.0",
        "bias: weight of follow 0.8",
    ]


def test_only_biases_that_a_model_has_are_weighed() -> None:
    ranker = Ranker(Bias(2.0, 0.8))
    assert choose_bias(ranker, HOLDOUT, repeats=True, neighbours=False) == Bias(2.0, 0.0)
    assert choose_bias(ranker, HOLDOUT, repeats=False, neighbours=True) == Bias(1.0, 0.8)
    asked = len(ranker.asked)
    assert choose_bias(ranker, HOLDOUT, repeats=False, neighbours=False) == Bias()
    assert len(ranker.asked) == asked
