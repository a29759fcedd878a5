from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from maskgr.data.config import SyntheticConfig
from maskgr.data.open import from_shop
from maskgr.data.sequences import Sequences
from maskgr.data.splits import Holdout, leave_out
from maskgr.data.synthetic import Shop, generate
from maskgr.errors import RequestError
from maskgr.evaluation import protocol
from maskgr.evaluation.metrics import Mean, recall, top_items
from maskgr.evaluation.protocol import evaluate, evaluate_sessions
from maskgr.evaluation.ranking import Query, Ranked

# Three users of a catalogue of four items.
HISTORIES = Sequences.of([[0, 1], [0, 1, 2], [1, 0, 2]])
HOLDOUT = Holdout(np.arange(3), HISTORIES, np.array([[2], [3], [3]], dtype=np.int32))


@dataclass
class Fixed:
    """Ranks by the same scores for everybody."""

    scores: np.ndarray  # (items,)
    invalid_shares: list[float] = field(default_factory=list)
    asked: list[Query] = field(default_factory=list)

    def rank(self, query: Query) -> Ranked:
        self.asked.append(query)
        scores = np.tile(self.scores, (len(query.histories), 1))
        if query.excluded is not None:
            scores[query.excluded.owners, query.excluded.values] = -np.inf
        items = top_items(scores, query.top)
        values = np.take_along_axis(scores, items, axis=1)
        share = self.invalid_shares.pop(0) if self.invalid_shares else None
        found = np.where(np.isfinite(values), items, -1)
        return Ranked(found.astype(np.int32), values.astype(np.float32), share)


def falling() -> Fixed:
    """Item 0 first, item 3 last."""
    return Fixed(-np.arange(4.0))


def test_unseen_removes_the_history_and_all_does_not() -> None:
    result = evaluate(falling(), HOLDOUT, 4, ks=(1, 2, 3))
    assert result.users == 3
    assert result.metrics["all"]["recall@2"].mean == 0
    assert result.metrics["all"]["recall@3"].mean == pytest.approx(1 / 3)
    assert result.metrics["unseen"]["recall@1"].mean == 1
    flat = result.to_dict("unseen")
    assert flat["recall@2"] == 1
    assert flat["ndcg@1"] == 1
    assert flat["protocol"] == "unseen"
    assert flat["protocols"]["all"]["ndcg@2"]["mean"] == 0
    assert "oracle" not in flat


def test_only_the_protocols_asked_for_are_ranked() -> None:
    ranker = falling()
    result = evaluate(ranker, HOLDOUT, 4, ks=(2,), protocols=("unseen",))
    assert list(result.metrics) == ["unseen"]
    assert [query.excluded is HISTORIES for query in ranker.asked] == [True]
    assert ranker.asked[0].top == 2


def test_metrics_at_k_do_not_depend_on_other_k() -> None:
    alone = evaluate(falling(), HOLDOUT, 4, ks=(2,)).metrics
    together = evaluate(falling(), HOLDOUT, 4, ks=(1, 2, 4)).metrics
    for name in ("all", "unseen"):
        for metric in ("recall@2", "ndcg@2"):
            assert alone[name][metric] == together[name][metric]


def test_share_of_invalid_beams_is_averaged_where_there_is_one() -> None:
    assert evaluate(falling(), HOLDOUT, 4, ks=(1,)).invalid_share is None
    ranker = Fixed(-np.arange(4.0), invalid_shares=[0.2, 0.4])
    assert evaluate(ranker, HOLDOUT, 4, ks=(1,)).invalid_share == pytest.approx(0.3)


# The same users, who went on with two items each.
PAIRS = Holdout(np.arange(3), HISTORIES, np.array([[2, 3], [3, 3], [3, 2]], dtype=np.int32))


@dataclass
class FixedSessions:
    """The same sessions for everybody, best first, without those that hold an excluded item."""

    plans: list[list[int]]
    asked: list[tuple[Query, int]] = field(default_factory=list)

    def sessions(self, query: Query, items: int) -> np.ndarray:
        self.asked.append((query, items))
        found = np.full((len(query.histories), query.top, items), -1, dtype=np.int64)
        for user in range(len(found)):
            banned = [] if query.excluded is None else query.excluded[user].tolist()
            own = [plan[:items] for plan in self.plans if not set(plan) & set(banned)]
            found[user, : len(own[: query.top])] = own[: query.top]
        return found


def test_average_session_recall_under_both_protocols() -> None:
    planner = FixedSessions([[0, 3], [3, 2], [2, 3], [3, 3]])
    result = evaluate_sessions(planner, PAIRS, 2, ks=(1, 2, 4), beams=4)
    assert result.users == 3
    names = ["session_recall@1", "session_recall@2", "session_recall@4"]
    assert list(result.metrics["all"]) == names
    # Shares of the two positions that are found for each user.
    expected = {
        "all": [[0.5, 0.5, 0.0], [0.5, 1.0, 1.0], [1.0, 1.0, 1.0]],
        # What is left: [3, 2], [2, 3], [3, 3] for the first; [3, 3] for the others.
        "unseen": [[0.0, 1.0, 0.5], [1.0, 1.0, 0.5], [1.0, 1.0, 0.5]],
    }
    for way, rows in expected.items():
        for name, shares in zip(names, rows, strict=True):
            found = result.metrics[way][name]  # type: ignore[index]
            assert found.mean == pytest.approx(np.mean(shares))
            assert found.low <= found.mean <= found.high
    assert result.to_dict("unseen")["session_recall@1"] == pytest.approx(0.5)
    assert [(query.top, items) for query, items in planner.asked] == [(4, 2)] * 2


def test_session_recall_of_fewer_items_than_held_out_asks_for_the_first() -> None:
    planner = FixedSessions([[2], [3]])
    result = evaluate_sessions(planner, PAIRS, 1, ks=(1,), protocols=("all",))
    assert result.metrics["all"]["session_recall@1"].mean == pytest.approx(1 / 3)
    assert planner.asked[0][0].top == 10  # the paper's beams


def test_session_recall_at_k_does_not_depend_on_other_k() -> None:
    planner = FixedSessions([[0, 3], [3, 2], [2, 3], [3, 3]])
    alone = evaluate_sessions(planner, PAIRS, 2, ks=(2,), beams=4).metrics
    together = evaluate_sessions(planner, PAIRS, 2, ks=(1, 2, 4), beams=4).metrics
    for name in ("all", "unseen"):
        assert alone[name]["session_recall@2"] == together[name]["session_recall@2"]
    assert {query.top for query, _ in planner.asked} == {4}  # the same search for all


@pytest.mark.parametrize(
    ("items", "ks", "expected"),
    [
        (3, (1,), "a session of 3 does not fit the 2 held-out items of each user; ask for 1 to 2"),
        (0, (1,), "a session of 0 does not fit the 2 held-out items"),
        (2, (5, 20), "session_recall@20 needs 20 beams, and the search has 10; give --beams 20"),
        (2, (0,), "metrics at K = 0 are impossible; use K >= 1"),
    ],
)
def test_raises_when_sessions_cannot_be_measured(
    items: int, ks: tuple[int, ...], expected: str
) -> None:
    with pytest.raises(RequestError, match=expected):
        evaluate_sessions(FixedSessions([[0, 1, 2]]), PAIRS, items, ks=ks)


@pytest.fixture(scope="module")
def shop() -> Shop:
    return generate(SyntheticConfig(users=300, items=60))


def test_oracle_ranks_by_true_probabilities(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "BATCH", 64)
    split = leave_out(from_shop(shop).histories)
    test, popular = split.test, Fixed(np.bincount(split.train.values, minlength=60).astype(float))
    result = evaluate(popular, test, 60, ks=(5,), shop=shop).to_dict("all")
    truth = shop.next_item_probabilities(test.histories)
    expected = recall(np.argsort(-truth, axis=1, kind="stable")[:, :5], test.targets, 5).mean()
    assert result["oracle"]["all"]["recall@5"]["mean"] == pytest.approx(expected)
    assert result["recall@5"] < result["oracle"]["all"]["recall@5"]["mean"]
    share = result["recall@5"] / result["oracle"]["all"]["recall@5"]["mean"]
    assert result["share_of_oracle"]["recall@5"] == pytest.approx(share)
    # Seen items never count under `unseen`, for the oracle either.
    seen = [t in h for t, h in zip(test.targets[:, 0], test.histories, strict=True)]
    assert result["oracle"]["unseen"]["recall@5"]["mean"] <= 1 - np.mean(seen)


@pytest.mark.parametrize("ks", [(0,), (), (5, -1)])
def test_raises_when_a_cutoff_is_impossible(ks: tuple[int, ...]) -> None:
    with pytest.raises(RequestError, match="are impossible; use K >= 1"):
        evaluate(falling(), HOLDOUT, 4, ks=ks)


def test_cutoff_beyond_the_catalogue_ranks_the_whole_catalogue() -> None:
    ranker = falling()
    result = evaluate(ranker, HOLDOUT, 4, ks=(50,))
    assert result.metrics["all"]["recall@50"].mean == 1
    assert ranker.asked[0].top == 4


def test_means_are_those_of_the_values_of_each_user() -> None:
    result = evaluate(falling(), HOLDOUT, 4, ks=(1, 3))
    assert result.values["all"]["recall@3"].tolist() == [1, 0, 0]
    assert result.values["unseen"]["recall@1"].tolist() == [1, 1, 1]
    sessions = evaluate_sessions(FixedSessions([[2, 3], [3, 3]]), PAIRS, 2, ks=(1,), beams=2)
    assert sessions.values["all"]["session_recall@1"].tolist() == [1, 0.5, 0]
    for found in (result, sessions):
        for way, metrics in found.metrics.items():
            for name, mean in metrics.items():
                assert Mean.of(found.values[way][name]) == mean
