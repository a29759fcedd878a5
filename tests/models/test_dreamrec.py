"""DreamRec against slow loops over prefixes and users, one step of the noise at a time."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from maskgr.data.sequences import Sequences
from maskgr.data.splits import leave_out
from maskgr.decoding.orders import history_seeds
from maskgr.errors import RequestError
from maskgr.evaluation.ranking import Query
from maskgr.models.base import TrainConfig, Training
from maskgr.models.dreamrec import DreamRec, DreamRecConfig, Embeddings, NoisyBatch
from maskgr.nn.gaussian import alpha_bars, seeded_noise
from maskgr.nn.transformer import TransformerConfig
from maskgr.training.fit import FitConfig
from tests.models.tiny import (
    HISTORIES,
    ITEMS,
    assert_same,
    queries,
    randomise,
    ranked_by,
    shop,
    workspace,
)

NETWORK = TransformerConfig(layers=2, width=8, heads=2, hidden=16, dropout=0.4)
CONFIG = DreamRecConfig(NETWORK, diffusion_steps=30, sampling_steps=4, guidance=1.5)
COUNTS = np.arange(ITEMS) % 5
BATCH = Sequences.of([[7], [3, 3], [0, 2, 0, 9], [4, 1, 8, 6]])


def model(**settings: object) -> DreamRec:
    torch.manual_seed(0)
    made = DreamRec(replace(CONFIG, **settings), COUNTS, 4, seed=5)  # type: ignore[arg-type]
    randomise(made)
    return made.eval()


def prepared(own: DreamRec, sequences: Sequences = BATCH, seed: int = 0) -> NoisyBatch:
    return own.prepare(sequences, torch.Generator().manual_seed(seed))


def table(own: DreamRec) -> Tensor:
    """(items, width) embeddings: free, or of length sqrt(width)."""
    weight = own.items.weight
    if own.config.embeddings == "free":
        return weight
    return torch.stack([row / row.norm() * math.sqrt(len(row)) for row in weight])


def state(own: DreamRec, history: np.ndarray) -> Tensor:
    return own.guide(Sequences.of([history]))[0]


# The loss


@pytest.mark.parametrize("embeddings", get_args(Embeddings))
def test_loss_of_every_prefix_by_hand(embeddings: Embeddings) -> None:
    own = model(embeddings=embeddings, null_share=0.5)
    batch, vectors, bars = prepared(own), table(own), alpha_bars("exponential", 30)
    expected, row = 0.0, 0
    for sequence in BATCH:
        for n in range(1, len(sequence)):
            history, target = sequence[:n], int(sequence[n])
            guidance = own.null[0] if batch.unguided[row] else state(own, history)
            left = bars[batch.times[row]].float()
            noisy = left.sqrt() * vectors[target] + (1 - left).sqrt() * batch.noise[row]
            found = own.denoiser(noisy[None], guidance[None], batch.times[row, None])[0]
            expected += (found - vectors[target]).square().mean().item()
            if own.query is not None:
                for query in (found, own.query(state(own, history))):
                    cosines = functional.cosine_similarity(query, vectors, dim=1)
                    expected -= (cosines / own.config.temperature).log_softmax(0)[target].item()
            row += 1
    assert row == len(batch.times) == batch.weight
    assert own(batch).item() == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("embeddings", get_args(Embeddings))
def test_losses_of_parts_sum_to_the_loss_of_the_batch(embeddings: Embeddings) -> None:
    own = model(embeddings=embeddings)
    batch = prepared(own)
    parts = [batch.part(np.array(rows)) for rows in ([0, 2], [1, 3])]
    assert own(batch).item() == pytest.approx(sum(own(part).item() for part in parts), rel=1e-5)


@pytest.mark.parametrize("rows", [[], [0]])
def test_a_part_without_targets_has_no_loss_and_gradients_of_zero(rows: list[int]) -> None:
    own = model()
    loss = own(prepared(own).part(np.array(rows, dtype=np.int64)))
    loss.backward()
    assert loss.item() == 0
    assert all(p.grad is not None and (p.grad == 0).all() for p in own.parameters())


def test_a_batch_of_items_alone_can_be_divided_by_its_weight() -> None:
    own = model()
    batch = prepared(own, Sequences.of([[1], [2]]))
    assert own(batch).item() / batch.weight == 0


def test_times_are_uniform_and_the_null_vector_has_its_share() -> None:
    own = model(null_share=0.1)
    batch = prepared(own, Sequences.of([list(range(4))] * 2000))
    counts = np.bincount(batch.times.numpy(), minlength=30)
    assert len(counts) == 30
    assert abs(counts - 200).max() < 75
    assert batch.unguided.float().mean().item() == pytest.approx(0.1, abs=0.015)
    assert batch.noise.mean().item() == pytest.approx(0, abs=0.02)
    assert batch.noise.std().item() == pytest.approx(1, abs=0.02)


def test_unguided_targets_teach_nothing_about_the_history() -> None:
    own = model(embeddings="free")
    batch = prepared(own)
    for share, taught in ((torch.ones, False), (torch.zeros, True)):
        own.zero_grad()
        own(replace(batch, unguided=share(len(batch.times), dtype=torch.bool))).backward()
        gain, null = own.encoder.norm.weight.grad, own.null.grad
        assert gain is not None
        assert null is not None
        assert bool(gain.any()) == taught
        assert bool(null.any()) == (not taught)


def test_the_diffusion_teaches_free_embeddings_alone() -> None:
    """Contrasted ones are taught by the history's cross-entropy, and as parts of histories."""
    for kind in get_args(Embeddings):
        own = model(embeddings=kind)
        batch = prepared(own, Sequences.of([[3, 1]]))  # 1 is no part of a history
        if own.query is not None:  # any history asks for the same, which no embedding can change
            torch.nn.init.zeros_(own.query.weight)
            torch.nn.init.zeros_(own.query.bias)
        own(batch).backward()
        gradient = own.items.weight.grad
        assert gradient is not None
        assert bool(gradient[1].any()) == (kind == "free")


# Ranking


@torch.no_grad()
def generated(own: DreamRec, history: np.ndarray) -> Tensor:
    """(width,) x_0, by the formulas of DDIM or of DDPM."""
    config, recent = own.config, history[-own.history_limit :]
    bars = alpha_bars("exponential", 30).float()
    guidance = state(own, recent) if len(recent) else own.null[0]
    seeds = history_seeds(Sequences.of([recent]), 5)
    stream = seeded_noise(seeds, 8, torch.device("cpu"))

    def predict(x: Tensor, t: int) -> Tensor:
        known = own.denoiser(x[None], guidance[None], torch.tensor([t]))[0]
        unknown = own.denoiser(x[None], own.null, torch.tensor([t]))[0]
        moved: Tensor = (1 + config.guidance) * known - config.guidance * unknown
        return moved

    x = next(stream)[0]
    if config.sampling_steps:
        for t, after in ((29, 19), (19, 10), (10, 0)):
            clean = predict(x, t)
            noise = (x - bars[t].sqrt() * clean) / (1 - bars[t]).sqrt()
            x = bars[after].sqrt() * clean + (1 - bars[after]).sqrt() * noise
    else:
        for t in range(29, 0, -1):
            kept, before = bars[t] / bars[t - 1], bars[t - 1]
            mean = before.sqrt() * (1 - kept) * predict(x, t) + kept.sqrt() * (1 - before) * x
            variance = (1 - kept) * (1 - before) / (1 - bars[t])
            x = mean / (1 - bars[t]) + variance.sqrt() * next(stream)[0]
    return predict(x, 0)


@torch.no_grad()
@pytest.mark.parametrize("embeddings", get_args(Embeddings))
@pytest.mark.parametrize("sampling_steps", [4, 0])
def test_ranking_by_products_with_what_is_generated(
    embeddings: Embeddings, sampling_steps: int
) -> None:
    own = model(embeddings=embeddings, sampling_steps=sampling_steps)
    asked = torch.stack([generated(own, history) for history in HISTORIES])
    if embeddings == "contrasted":
        asked = functional.normalize(asked, dim=1) / (0.1 * math.sqrt(8))
    expected = (asked @ table(own).T).log_softmax(1)
    for query in queries():
        found, wanted = own.rank(query), ranked_by(expected, query)
        assert np.array_equal(found.items, wanted.items)
        np.testing.assert_allclose(found.scores, wanted.scores, rtol=1e-3, atol=1e-3)


def test_an_answer_does_not_depend_on_other_users_or_global_randomness() -> None:
    own = model(sampling_steps=0)
    together = own.rank(Query(HISTORIES, ITEMS))
    torch.manual_seed(99)
    for user in range(len(HISTORIES)):
        alone = own.rank(Query(HISTORIES.select(np.array([user])), ITEMS))
        assert np.array_equal(alone.items[0], together.items[user])
        np.testing.assert_allclose(alone.scores[0], together.scores[user], rtol=1e-4, atol=1e-4)


def test_seeds_make_the_noise() -> None:
    own, other = model(), model()
    other.seed = 6
    query = Query(HISTORIES, ITEMS)
    assert_same(own.rank(query), model().rank(query), exact=True)
    assert not np.allclose(own.rank(query).scores, other.rank(query).scores)


@torch.no_grad()
def test_no_history_is_guided_by_the_null_vector() -> None:
    own = model()
    assert torch.equal(own.guide(Sequences.of([[], []])), own.null.expand(2, -1))
    mixed = own.guide(Sequences.of([[], [3, 1]]))
    torch.testing.assert_close(mixed[0], own.null[0])
    torch.testing.assert_close(mixed[1], own.guide(Sequences.of([[3, 1]]))[0])


@torch.no_grad()
def test_a_state_does_not_depend_on_later_items() -> None:
    own = model()
    vectors = own.vectors()
    first = own.encode(Sequences.of([[3, 1, 4]]), vectors)
    changed = own.encode(Sequences.of([[3, 1, 9, 2]]), vectors)
    torch.testing.assert_close(first[:2], changed[:2])
    assert not torch.allclose(first[2], changed[2])


def test_guidance_of_zero_asks_for_the_conditional_prediction_alone() -> None:
    own, calls = model(guidance=0.0), []
    own.denoiser.register_forward_hook(lambda module, args, out: calls.append(len(out)))
    own.rank(Query(HISTORIES, 3))
    assert len(calls) == 4  # one a step
    calls.clear()
    guided = model()
    guided.denoiser.register_forward_hook(lambda module, args, out: calls.append(len(out)))
    guided.rank(Query(HISTORIES, 3))
    assert len(calls) == 8


def test_dropout_is_off_in_evaluation() -> None:
    own, query = model(), Query(HISTORIES, 4)
    before = own.rank(query)
    own.train()
    batch = prepared(own)
    assert own(batch).item() != own(batch).item()
    assert_same(own.rank(query), before, exact=True)


# Learning


def learned(config: DreamRecConfig, folder: Path) -> tuple[DreamRec, float]:
    """A model of the tiny shop, and how many of the next items are among its first three."""
    data = shop()
    split = leave_out(data.histories)
    fit = FitConfig(steps=100, token_budget=200, learning_rate=1e-2, ema=0.9, validations=2)
    training = TrainConfig("dreamrec", config, fit, history_limit=10, device="cpu")
    own = DreamRec.learn(Training(data, split, training, workspace(folder)))
    assert not own.training
    ranked = own.rank(Query(split.test.histories, 3)).items
    return own, float((ranked == split.test.targets).any(1).mean())


SMALL = DreamRecConfig(
    replace(NETWORK, layers=1, width=16, dropout=0.0), diffusion_steps=50, sampling_steps=5
)


def test_learns_which_item_comes_next(tmp_path: Path) -> None:
    assert learned(SMALL, tmp_path)[1] > 0.6  # by chance: 0.21


def test_free_embeddings_collapse_and_contrasted_ones_do_not(tmp_path: Path) -> None:
    """The squared error alone shrinks the embeddings in which it is measured."""

    def spread(own: DreamRec) -> float:
        vectors = own.vectors().detach()
        return float((vectors - vectors.mean(0)).norm() / len(vectors) ** 0.5)

    for kind, least, most in (("free", 0.0, 0.85), ("contrasted", 0.95, 1.1)):
        config = replace(SMALL, embeddings=kind)  # type: ignore[arg-type]
        torch.manual_seed(0)
        before = spread(DreamRec(config, COUNTS))
        own, _ = learned(config, tmp_path / kind)
        assert least < spread(own) / before < most


@pytest.mark.parametrize("embeddings", get_args(Embeddings))
def test_saved_and_loaded_model_ranks_alike(embeddings: Embeddings, tmp_path: Path) -> None:
    own = model(embeddings=embeddings)
    own.save(tmp_path)
    config = TrainConfig("dreamrec", own.config, FitConfig(), history_limit=4, seed=5, device="cpu")
    loaded = DreamRec.load(tmp_path, config)
    assert not loaded.training
    assert_same(loaded.rank(Query(HISTORIES, 5)), own.rank(Query(HISTORIES, 5)), exact=True)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"embeddings": "frozen"}, "embeddings is 'frozen'; choose one of free, contrasted"),
        ({"sampling_steps": 600}, "sampling_steps is 600, more than the 500 diffusion_steps"),
        ({"diffusion_steps": 0}, "diffusion_steps is 0; give a whole number from 1 to "),
        ({"null_share": 1.0}, "null_share is 1.0; give a number from "),
        ({"guidance": -1.0}, "guidance is -1.0; give a number from "),
        ({"temperature": 0.0}, "temperature is 0.0; give a number from "),
    ],
)
def test_raises_for_settings_that_make_no_sense(settings: dict[str, object], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        DreamRecConfig(**settings)  # type: ignore[arg-type]
