"""Explanations beside the recommendations that they explain."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from maskgr import Recommender
from maskgr.decoding.config import DecodingConfig
from maskgr.decoding.orders import ORDERS
from maskgr.errors import RequestError
from maskgr.explain import Explanation, explain
from maskgr.models.base import train_config
from tests.models.tiny import randomise, shop

HISTORY = ["i03", "i01", "i04", "i05"]
BRIEF = ["fit.steps=2", "validations=1", "width=16", "heads=2", "levels=3", "codes=3"]
FILTERS: list[dict[str, Any]] = [
    {},
    {"exclude_seen": True},
    {"exclude_seen": False, "deny": ["i00", "i07"]},
    {"allow": [f"i{n:02}" for n in range(0, 14, 2)], "exclude_seen": True},
]


@pytest.fixture(scope="module", autouse=True)
def _no_plots() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("maskgr.training.fit._plot", lambda run: None)
        yield


@pytest.fixture(scope="module")
def recommenders(_no_plots: None) -> dict[str, Recommender]:
    """Random weights, as large as trained ones; 14 items, several of which share their digits."""
    made = {}
    for name, preset, own in (
        ("maskgr", "tiny", []),
        ("maskgr-paper", "tiny-paper", ["dense.head=true", "unique=share"]),
    ):
        config = train_config(preset, [*BRIEF, *own], model=name)
        made[name] = Recommender.train(shop(), config=config)
        randomise(made[name].model)  # type: ignore[arg-type]
        made[name].model.eval()  # type: ignore[attr-defined]
    return made


@pytest.fixture(params=["maskgr", "maskgr-paper"])
def recommender(recommenders: dict[str, Recommender], request: Any) -> Recommender:
    return recommenders[request.param]


@pytest.fixture
def maskgr(recommenders: dict[str, Recommender]) -> Recommender:
    return recommenders["maskgr"]


def digits(recommender: Recommender, found: Explanation) -> list[tuple[int, ...]]:
    """The semantic IDs of the results."""
    number = {item: place for place, item in enumerate(recommender.items["item_id"])}
    codes = recommender.model.sids.digits  # type: ignore[attr-defined]
    return [tuple(codes[number[r.item_id]].tolist()) for r in found.results]


@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize("order", ORDERS)
def test_results_are_those_of_recommend_with_the_same_scores(
    recommender: Recommender, order: str, steps: int, filters: dict[str, Any]
) -> None:
    decoding = recommender.decoding(retrieval="generative", order=order, steps=steps, beams=4)
    for top in (3, 12):  # fewer and more than there are beams
        asked = {"top": top, "decoding": decoding, **filters}
        found = explain(recommender, HISTORY, **asked)
        assert list(found.results) == recommender.recommend(HISTORY, **asked)
        assert len(found.steps) == steps


def test_results_are_those_of_recommend_by_default(recommender: Recommender) -> None:
    found = explain(recommender, HISTORY, 4)
    assert list(found.results) == recommender.recommend(HISTORY, 4)
    is_paper = recommender.config.name == "maskgr-paper"
    assert found.retrieval == ("unified" if is_paper else "generative")


@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize("order", ORDERS)
def test_steps_lead_to_the_results(maskgr: Recommender, order: str, steps: int) -> None:
    decoding = maskgr.decoding(order=order, steps=steps, beams=4)
    found = explain(maskgr, HISTORY, 4, decoding=decoding)
    last = found.steps[-1]
    assert found.searched == len(found.results) == len(last) == 4
    assert [beam.digits for beam in last] == digits(maskgr, found)
    scores = [beam.score for beam in last]
    np.testing.assert_allclose(scores, [r.score for r in found.results], rtol=1e-5)
    for number, step in enumerate(found.steps):
        for beam in step:
            assert sum(digit is not None for digit in beam.digits) == sum(
                len(s[0].revealed) for s in found.steps[: number + 1]
            )
            assert all(0 < reveal.probability <= 1 for reveal in beam.revealed)


def test_one_step_reveals_all_digits_of_every_result(maskgr: Recommender) -> None:
    found = explain(maskgr, HISTORY, 14, exclude_seen=False, decoding=maskgr.decoding(steps=1))
    (step,) = found.steps
    assert found.searched == len(step) == len(found.results) == 14
    probs = np.exp([r.score for r in found.results])  # of the whole catalogue
    assert probs.sum() == pytest.approx(1, abs=1e-5)
    ids = np.array(digits(maskgr, found))
    assert [beam.digits for beam in step] == [tuple(own) for own in ids.tolist()]
    for beam in step:
        assert [reveal.level for reveal in beam.revealed] == [0, 1, 2]
        for reveal in beam.revealed:
            marginal = probs[ids[:, reveal.level] == reveal.code].sum()
            assert reveal.probability == pytest.approx(marginal, abs=1e-5)


@pytest.mark.parametrize("order", ORDERS)
def test_results_beyond_the_beams_are_told_apart(maskgr: Recommender, order: str) -> None:
    decoding = maskgr.decoding(order=order, beams=4)
    found = explain(maskgr, HISTORY, 10, decoding=decoding)
    assert found.searched == len(found.steps[-1]) == 4
    assert found.to_dict()["searched"] == 4
    first = [r.item_id for r in found.results[:4]]
    once = maskgr.recommend(HISTORY, 14 - len(HISTORY), decoding=maskgr.decoding(steps=1))
    others = [r for r in once if r.item_id not in first]
    assert list(found.results[4:]) == others[:6]


def test_dense_retrieval_has_no_steps_and_unified_ranks_the_beams(
    recommenders: dict[str, Recommender],
) -> None:
    paper = recommenders["maskgr-paper"]
    for retrieval, steps in (("dense", 0), ("unified", 3)):
        decoding = paper.decoding(retrieval=retrieval, beams=4)
        found = explain(paper, HISTORY, 4, decoding=decoding)
        assert found.retrieval == retrieval
        assert len(found.steps) == steps
        assert list(found.results) == paper.recommend(HISTORY, 4, decoding=decoding)
    assert set(digits(paper, found)) <= {beam.digits for beam in found.steps[-1]}


def test_raises_when_the_model_has_no_digits() -> None:
    popularity = Recommender.train(shop(), model="popularity")
    with pytest.raises(RequestError, match="Popularity cannot decode digits; maskgr"):
        explain(popularity, HISTORY, decoding=DecodingConfig())


@pytest.mark.parametrize("remask", [1, 2])
@pytest.mark.parametrize("steps", [1, 3])
def test_digits_taken_back_are_one_more_step(maskgr: Recommender, steps: int, remask: int) -> None:
    decoding = maskgr.decoding(steps=steps, beams=4, remask=remask)
    found = explain(maskgr, HISTORY, 4, decoding=decoding)
    assert list(found.results) == maskgr.recommend(HISTORY, 4, decoding=decoding)
    assert len(found.steps) == steps + 1
    assert {len(beam.revealed) for beam in found.steps[-1]} == {remask}
    ends = [beam.digits for beam in found.steps[-1]]
    assert digits(maskgr, found)[: len(ends)] == ends[:4]
