"""CaDiRec against slow loops over positions, sequences and items."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from maskgr.data.sequences import Sequences
from maskgr.data.splits import leave_out
from maskgr.errors import RequestError
from maskgr.evaluation.ranking import Query
from maskgr.models.base import TrainConfig, Training
from maskgr.models.cadirec import CaDiRec, CaDiRecConfig, ViewBatch, info_nce
from maskgr.models.sasrec import NegativeBatch, SASRec, SASRecConfig
from maskgr.nn.gaussian import alpha_bars, time_embedding
from maskgr.nn.transformer import Layout, TransformerConfig
from maskgr.training.fit import FitConfig
from tests.models.tiny import HISTORIES, ITEMS, assert_same, queries, randomise, shop, workspace

NETWORK = TransformerConfig(layers=2, width=8, heads=2, hidden=16, dropout=0.4)
CONFIG = CaDiRecConfig(
    NETWORK,
    denoiser_layers=1,
    noised_share=0.4,
    diffusion_steps=20,
    nearest=3,
    diffusion_weight=0.3,
    contrast_weight=0.7,
    temperature=2.0,
)
COUNTS = np.arange(ITEMS) % 5
BATCH = Sequences.of([[7], [3, 3], [0, 2, 9, 4], [4, 1, 8, 6], [5, 2, 6, 10, 11, 12]])


def model(**settings: object) -> CaDiRec:
    torch.manual_seed(0)
    made = CaDiRec(replace(CONFIG, **settings), COUNTS, history_limit=6)  # type: ignore[arg-type]
    randomise(made)
    return made.eval()


def prepared(own: CaDiRec, sequences: Sequences = BATCH, seed: int = 0) -> ViewBatch:
    return own.prepare(sequences, torch.Generator().manual_seed(seed))


# The losses


def test_info_nce_by_hand() -> None:
    """Two sequences in the plane: four views, each with one partner and two negatives."""
    views = torch.tensor([[1.0, 0.0], [0.0, 2.0], [3.0, 0.0], [1.0, 1.0]])
    products = {(0, 1): 0, (0, 2): 3, (0, 3): 1, (1, 2): 0, (1, 3): 2, (2, 3): 3}
    expected = 0.0
    for row, partner in ((0, 1), (1, 0), (2, 3), (3, 2)):
        others = {n: products[min(row, n), max(row, n)] / 0.5 for n in range(4) if n != row}
        expected += math.log(sum(math.exp(v) for v in others.values())) - others[partner]
    assert info_nce(views, 0.5).item() == pytest.approx(expected, rel=1e-6)


def test_info_nce_of_a_sequence_alone_is_zero() -> None:
    assert info_nce(torch.randn(2, 3), 1.0).item() == 0


@torch.no_grad()
def slow_loss(own: CaDiRec, batch: ViewBatch) -> tuple[float, float, float]:
    """The means of the three losses, one sequence, one item and one view at a time."""
    table, bars = own.backbone.items(), alpha_bars("sqrt", 20)
    summed, noised, views, place, target = 0.0, [], [], 0, 0
    sequences_with_noise = set()
    for number, row in enumerate(batch.sequences):
        for n, item in enumerate(row):
            hidden, _ = own.backbone.encode(Sequences.of([row[:n]]))
            logits = table @ own.backbone.queries(hidden[-1:])[0]
            if isinstance(batch.targets, NegativeBatch):
                summed -= functional.logsigmoid(logits[int(item)]).item()
                summed -= functional.logsigmoid(-logits[batch.targets.negatives[target]]).item()
            else:
                summed -= logits.log_softmax(0)[int(item)].item()
            target += 1
        length = len(row) - 1
        if not length:
            continue
        here = slice(place, place + length)
        place += length
        items, chosen = torch.from_numpy(row[:-1]).long(), batch.chosen[here]
        t, noise, picks = int(batch.times[number]), batch.noise[here], batch.picks[here]
        x = table[items] + (1 - bars[0]).sqrt().float() * noise[:, 0]
        left = bars[t].float()
        x = torch.where(chosen[:, None], left.sqrt() * x + (1 - left).sqrt() * noise[:, 1], x)
        when = own.denoiser.time(time_embedding(torch.tensor([t]), 8))
        hidden, _ = own.denoiser.encoder(own.denoiser.norm(x + when), Layout.of([length]), [None])
        for view in range(2):
            replaced = row[:-1].copy()
            for n in chosen.nonzero().flatten().tolist():
                logits = table @ hidden[n] / math.sqrt(8)
                replaced[n] = logits.argsort(descending=True)[:3][picks[n, view]]
                if not view:
                    noised.append(-logits.log_softmax(0)[items[n]].item())
                    sequences_with_noise.add(number)
            hidden_view, _ = own.backbone.encode(Sequences.of([replaced]))
            views.append(hidden_view[-1])
    contrast = info_nce(torch.stack(views), 2.0).item() / len(views)
    share = len(sequences_with_noise) / (len(views) / 2)
    return summed / target, share * float(np.mean(noised)), contrast


@pytest.mark.parametrize("loss", ["bce", "softmax"])
@pytest.mark.parametrize("seed", range(3))
def test_loss_is_the_weighted_sum_of_three_means(seed: int, loss: str) -> None:
    own = model(loss=loss)
    batch = prepared(own, seed=seed)
    assert batch.chosen.any()
    targets, noised, contrast = slow_loss(own, batch)
    expected = targets + 0.3 * noised + 0.7 * contrast
    assert own(batch).item() / batch.weight == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("loss", ["bce", "softmax"])
def test_without_the_two_weights_the_loss_is_sasrecs(loss: str) -> None:
    own = model(loss=loss, diffusion_weight=0.0, contrast_weight=0.0)
    alone = own.backbone.prepare(BATCH, torch.Generator().manual_seed(0))
    assert own(prepared(own)).item() == pytest.approx(own.backbone(alone).item())


@pytest.mark.parametrize("loss", ["bce", "softmax"])
def test_losses_of_targets_and_noised_items_add_up_over_parts(loss: str) -> None:
    """The contrastive loss does not: a part has fewer sequences to contrast."""
    own = model(loss=loss, contrast_weight=0.0)
    batch = prepared(own)
    parts = [batch.part(np.array(rows)) for rows in ([0, 2, 4], [1, 3])]
    assert own(batch).item() == pytest.approx(sum(own(part).item() for part in parts), rel=1e-5)


@pytest.mark.parametrize("loss", ["bce", "softmax"])
@pytest.mark.parametrize("rows", [[], [0], [1, 3]])
def test_every_parameter_has_a_gradient_whatever_is_in_a_part(rows: list[int], loss: str) -> None:
    own = model(loss=loss)
    batch = prepared(own)
    part = batch.part(np.array(rows, dtype=np.int64))
    part = replace(part, chosen=torch.zeros_like(part.chosen))  # and nothing is noised
    own(part).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in own.parameters())


# Draws and views


def test_noised_items_are_a_share_of_the_inputs_and_times_are_uniform() -> None:
    own = model(noised_share=0.25)
    batch = prepared(own, Sequences.of([list(range(5))] * 2000))
    assert batch.chosen.shape == (8000,)
    assert batch.chosen.float().mean().item() == pytest.approx(0.25, abs=0.02)
    counts = np.bincount(batch.times.numpy(), minlength=20)
    assert len(counts) == 20
    assert abs(counts - 100).max() < 50
    assert sorted(set(batch.picks.flatten().tolist())) == [0, 1, 2]


def test_views_replace_chosen_items_alone_by_items_near_the_prediction() -> None:
    own = model()
    batch = prepared(own, seed=1)
    inputs = BATCH.without_last()
    items = torch.from_numpy(inputs.values).long()
    places = batch.chosen.nonzero().squeeze(1)
    predicted, table = torch.randn(len(places), 8), own.backbone.items().detach()
    views = own.replaced(items, places, predicted, table, batch.picks)
    assert views.shape == (len(items), 2)
    assert torch.equal(views[~batch.chosen], items[~batch.chosen, None].expand(-1, 2))
    near = (predicted @ table.T).argsort(dim=1, descending=True)[:, :3]
    for row, place in enumerate(places.tolist()):
        assert views[place].tolist() == near[row][batch.picks[place]].tolist()


def test_last_items_touch_nothing_but_the_backbones_loss() -> None:
    """They are targets: neither the denoiser's context nor the views may know them."""
    own = model()
    batch = prepared(own)
    values = BATCH.values.copy()
    last = BATCH.offsets[1:] - 1
    values[last] = (values[last] + 1) % ITEMS
    changed = replace(batch, sequences=Sequences(values, BATCH.offsets))

    def beside_the_backbone(own_batch: ViewBatch) -> float:
        targets = replace(own_batch.targets, sequences=own_batch.sequences)
        return float(own(own_batch).item() - own.backbone(targets).item())

    assert beside_the_backbone(batch) == pytest.approx(beside_the_backbone(changed), rel=1e-5)
    assert own(batch).item() != pytest.approx(own(changed).item(), rel=1e-5)


@torch.no_grad()
def test_a_noised_item_is_known_by_its_noised_vector_alone() -> None:
    """At the last step nothing of it is left; the items around it count."""
    own = model()
    sequences = Sequences.of([[1, 2, 3]])
    noise, place = torch.randn(3, 2, 8), torch.tensor([1])
    table = own.backbone.items()

    def predicted(items: list[int], t: int) -> Tensor:
        return own.predict(table[items], sequences, place, torch.tensor([t]), noise)

    torch.testing.assert_close(predicted([1, 2, 3], 19), predicted([1, 9, 3], 19))
    assert not torch.allclose(predicted([1, 2, 3], 5), predicted([1, 9, 3], 5))
    for other in ([8, 2, 3], [1, 2, 8]):
        assert not torch.allclose(predicted([1, 2, 3], 19), predicted(other, 19))


def test_views_teach_the_backbone_but_not_the_item_vectors() -> None:
    own = model()
    inputs = BATCH.select(np.arange(1, 5)).without_last()
    both = torch.from_numpy(inputs.values).long()[:, None].repeat(1, 2)
    both[0, 0] = 12
    loss = info_nce(own.view_states(inputs, both), 1.0)
    taught = [*own.backbone.encoder.parameters(), *own.backbone.items.parameters()]
    gradients = torch.autograd.grad(loss, taught, allow_unused=True)
    in_encoder = len(list(own.backbone.encoder.parameters()))
    assert all(gradient is not None for gradient in gradients[:in_encoder])
    assert all(gradient is None for gradient in gradients[in_encoder:])


@torch.no_grad()
def test_view_states_are_those_after_each_view_alone() -> None:
    own = model()
    inputs = BATCH.select(np.arange(1, 5)).without_last()
    both = torch.randint(ITEMS, (len(inputs.values), 2))
    states = own.view_states(inputs, both)
    for number in range(len(inputs)):
        rows = slice(inputs.offsets[number], inputs.offsets[number + 1])
        for view in range(2):
            hidden, _ = own.backbone.encode(Sequences.of([both[rows, view].numpy()]))
            torch.testing.assert_close(states[2 * number + view], hidden[-1])


# The model


def test_ranking_is_that_of_its_sasrec() -> None:
    own = model()
    backbone = SASRec(SASRecConfig(NETWORK, loss="bce"), COUNTS, history_limit=6)
    backbone.load_state_dict(own.backbone.state_dict())
    for query in queries():
        assert_same(own.rank(query), backbone.eval().rank(query), exact=True)


def test_dropout_is_off_in_evaluation() -> None:
    own, query = model(), Query(HISTORIES, 4)
    before = own.rank(query)
    own.train()
    batch = prepared(own)
    assert own(batch).item() != own(batch).item()
    assert_same(own.rank(query), before, exact=True)


def test_saved_and_loaded_model_ranks_alike(tmp_path: Path) -> None:
    own = model()
    own.save(tmp_path)
    config = TrainConfig("cadirec", CONFIG, FitConfig(), history_limit=6, device="cpu")
    loaded = CaDiRec.load(tmp_path, config)
    assert not loaded.training
    assert_same(loaded.rank(Query(HISTORIES, 5)), own.rank(Query(HISTORIES, 5)), exact=True)


def test_learns_which_item_comes_next(tmp_path: Path) -> None:
    data = shop()
    split = leave_out(data.histories)
    network = replace(NETWORK, layers=1, width=16, dropout=0.0)
    config = TrainConfig(
        "cadirec",
        CaDiRecConfig(network, denoiser_layers=1, noised_share=0.3),
        FitConfig(steps=80, token_budget=200, learning_rate=1e-2, ema=0.9, validations=2),
        device="cpu",
    )
    learned = CaDiRec.learn(Training(data, split, config, workspace(tmp_path)))
    assert not learned.training
    ranked = learned.rank(Query(split.test.histories, 3)).items
    assert (ranked == split.test.targets).any(1).mean() > 0.6  # by chance: 0.21


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"nearest": 0}, "nearest is 0; give a whole number from 1 to "),
        ({"noised_share": 1.0}, "noised_share is 1.0; give a number from "),
        ({"contrast_weight": -1.0}, "contrast_weight is -1.0; give a number from "),
        ({"temperature": 0.0}, "temperature is 0.0; give a number from "),
    ],
)
def test_raises_for_settings_that_make_no_sense(settings: dict[str, float], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        CaDiRecConfig(**settings)  # type: ignore[arg-type]
