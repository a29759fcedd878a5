from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest
import torch

from maskgr import Recommender
from maskgr.config import ObjectiveConfig, TrainConfig
from maskgr.data.config import SyntheticConfig
from maskgr.data.open import fetch
from maskgr.data.sequences import Sequences
from maskgr.data.splits import Holdout, Split
from maskgr.errors import RequestError
from maskgr.models.causal import check_copies
from maskgr.models.maskgr import MaskGR
from maskgr.models.network import Part, build_network
from maskgr.models.task import Task
from maskgr.training.distributed import World
from tests.models.test_retrieval import CONFIG, PAPER

BATCH = Sequences.of([np.array(items) for items in ([4], [3, 1], [2, 5, 9, 9], [0, 7, 8, 2])])
CODES = np.array([(a, b) for a in range(4) for b in range(3)])


def task(
    part: Part | None,
    size: int = 1,
    rank: int = 0,
    history: Literal["pooled", "tokens"] = "pooled",
    **objective: Any,
) -> Task:
    network = replace(CONFIG.network, dropout=0.0, history=history)
    config = replace(CONFIG, network=network, objective=ObjectiveConfig(**objective))
    torch.manual_seed(0)
    text = np.random.default_rng(0).standard_normal((len(CODES), 5)).astype(np.float32)
    sids: Any = SimpleNamespace(digits=CODES, codebook_sizes=(4, 3), embeddings=text)
    nobody = Holdout(np.empty(0, np.int64), Sequences.of([]), np.empty((0, 1), np.int32))
    model = MaskGR(build_network(config, sids).train(), sids, config)
    world = World(rank, size, torch.device("cpu"))
    return Task(model, Split(Sequences.of([]), nobody, nobody), world, part)


@pytest.mark.parametrize("part", [None, "digits", "dense"])
@pytest.mark.parametrize("distil", [0.0, 0.7])
@pytest.mark.parametrize("history", ["pooled", "tokens"])
def test_copies_are_each_a_batch_of_their_own(
    part: Part | None, distil: float, history: Literal["pooled", "tokens"]
) -> None:
    """The loss is the mean of what the copies have one by one."""
    many = task(part, history=history, catalogue_aware=True, distil=distil, copies=3)
    (piece,), divisor = many.prepare(BATCH, seed=5)
    one = task(part, history=history, catalogue_aware=True, distil=distil)
    (plain,), _ = one.prepare(BATCH, seed=5)
    assert divisor == 2 * len(BATCH.values)
    if part == "dense":
        assert many.loss(piece).item() == pytest.approx(one.loss(plain).item(), rel=1e-5)
        return
    # Sequences are copied one by one: their items' copies lie a sequence's length apart.
    first = np.concatenate(
        [
            3 * start + np.arange(length)
            for start, length in zip(BATCH.offsets, BATCH.lengths, strict=False)
        ]
    )
    lengths = np.repeat(BATCH.lengths, BATCH.lengths)
    alone = []
    for copy in range(3):
        chosen = np.zeros(3 * len(BATCH.values), dtype=bool)
        chosen[first + copy * lengths] = True
        tokens = torch.from_numpy(np.repeat(chosen, 2))
        uniform = None if piece.uniform is None else piece.uniform[torch.from_numpy(chosen)]
        own = replace(plain, noise=piece.noise.part(tokens), uniform=uniform)
        alone.append(one.loss(own).item())
    assert many.loss(piece).item() == pytest.approx(np.mean(alone), rel=1e-5)


@pytest.mark.parametrize("part", [None, "digits", "dense"])
def test_processes_share_a_batch_and_its_copies(part: Part | None) -> None:
    options: dict[str, Any] = {"catalogue_aware": True, "distil": 0.5, "copies": 2}
    whole = task(part, **options)
    pieces, divisor = whole.prepare(BATCH, seed=1)
    assert len(pieces) == 1, "a batch stays whole where every piece would cost a catalogue"
    total = whole.loss(pieces[0]).item()
    shares = 0.0
    for rank in range(2):
        own = task(part, 2, rank, **options)
        parts, same = own.prepare(BATCH, seed=1)
        assert same == divisor
        shares += sum(own.loss(piece).item() for piece in parts)
    assert shares == pytest.approx(total, rel=1e-5)


def test_digits_in_pieces_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    digits = task("digits", catalogue_aware=True, distil=0.5, copies=2)
    (whole,), divisor = digits.prepare(BATCH, seed=1)
    monkeypatch.setattr("maskgr.models.task.PIECE_TOKENS", 16)
    pieces, same = digits.prepare(BATCH, seed=1)
    assert len(pieces) == 3
    assert same == divisor
    total = sum(digits.loss(piece).item() for piece in pieces)
    assert total == pytest.approx(digits.loss(whole).item(), rel=1e-5)


def test_what_is_kept() -> None:
    found = {"recall@10": 0.3, "bound": 8.0}
    assert [task(part).score(found) for part in (None, "dense", "digits")] == [0.3, 0.3, -8.0]


@pytest.mark.parametrize(("config", "copies"), [(CONFIG, 0), (PAPER, 2)])
def test_bad_copies(config: TrainConfig, copies: int) -> None:
    changed = replace(config, objective=replace(config.objective, copies=copies))
    with pytest.raises(RequestError, match=f"objective.copies is {copies}"):
        check_copies(changed)


def test_no_room_for_the_copies() -> None:
    shop = fetch("synthetic", synthetic=SyntheticConfig(users=50, items=40))
    changed = replace(
        CONFIG,
        collaborative=0.5,
        objective=replace(CONFIG.objective, copies=4),
        loop=replace(CONFIG.loop, token_budget=100),
    )
    with pytest.raises(RequestError, match=r"objective\.copies=4, has 168 tokens"):
        Recommender.train(shop, config=changed)
