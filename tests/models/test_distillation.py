from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

from maskgr import Recommender
from maskgr.data.config import SyntheticConfig
from maskgr.data.open import fetch
from maskgr.decoding.catalogue import Catalogue
from maskgr.errors import RequestError
from maskgr.models.distillation import DenseTeacher
from maskgr.models.maskgr.objective import masked_loss, masked_rows
from maskgr.models.network import Network
from maskgr.nn.layout import Layout
from maskgr.nn.softmax import Bonus
from tests.models.test_retrieval import CONFIG, PAPER

SIZES = (3, 4, 2)


@pytest.mark.parametrize("cells", [1, 2**22])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("copies", [1, 3])
def test_expected_digits_by_enumeration(
    cells: int, biased: bool, copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("maskgr.models.distillation.CELLS", cells)
    monkeypatch.setattr("maskgr.nn.softmax.CELLS", cells)
    monkeypatch.setattr("maskgr.nn.softmax.ITEMS", 5)
    rng = torch.Generator().manual_seed(0)
    codes = torch.tensor(list(product(*map(range, SIZES))))
    codes = codes[torch.randperm(len(codes), generator=rng)[:15]]
    codes = torch.cat([codes, codes[:2]])  # two tuples are shared
    revealed = torch.tensor(list(product([False, True], repeat=3))).repeat(3, 1)
    count = len(revealed) // copies
    owners = torch.arange(count).repeat(copies)
    came = torch.randint(len(codes), (count,), generator=rng)
    queries = torch.randn(count, 5, generator=rng)
    table = torch.randn(len(codes), 5, generator=rng)
    scores = queries @ table.T
    bonus = None
    if biased:
        rows = torch.arange(count).repeat_interleave(2)
        items = torch.stack([torch.randperm(len(codes), generator=rng)[:2] for _ in queries])
        values = torch.randn(len(rows), generator=rng)
        bonus = Bonus(rows, items.flatten(), values)
        scores[rows, items.flatten()] += values
    teacher = DenseTeacher(0.9, queries, table, bonus, Catalogue(codes, SIZES))
    uniform = 0.9 * torch.rand(len(revealed), generator=rng)
    uniform[4] = 0.95
    digits, lesson = teacher.teach(came, owners, uniform, revealed)
    chances = scores.softmax(1)
    edges = chances.cumsum(1)
    for row, level in product(range(len(revealed)), range(3)):
        known, owner = bool(revealed[row].any()), int(owners[row])
        drawn = (
            int((edges[owner] < uniform[row] / 0.9).sum()) if known and row != 4 else came[owner]
        )
        assert digits[row].tolist() == codes[drawn].tolist()
        assert float(lesson.weight[row]) == pytest.approx(float(row != 4) if known else 0.9)
        agree = ((codes == digits[row]) | ~revealed[row]).all(1).numpy()
        own = chances[owner].numpy()
        among = np.where(agree, own, 0) / own[agree].sum()
        by_hand = np.bincount(codes[:, level], among, minlength=SIZES[level])
        if revealed[row].all() or row == 4:
            by_hand = np.zeros(SIZES[level])
        assert lesson.expected[level][row].numpy() == pytest.approx(by_hand, abs=1e-5)


def test_items_are_drawn_as_often_as_they_are_expected() -> None:
    rng = torch.Generator().manual_seed(0)
    codes = torch.tensor(list(product(*map(range, SIZES))))[:12]
    queries, table = torch.randn(1, 5, generator=rng), torch.randn(12, 5, generator=rng)
    count, share = 20_000, 0.6
    revealed = torch.tensor([True, False, False]).expand(count, 3)
    teacher = DenseTeacher(share, queries.expand(count, 5), table, None, Catalogue(codes, SIZES))
    came, uniform = torch.full((count,), 7), torch.rand(count, generator=rng)
    digits, lesson = teacher.teach(came, torch.arange(count), uniform, revealed)
    chances = share * (queries @ table.T).softmax(1)[0]
    chances[7] += 1 - share
    matches = (digits[:, None] == codes).all(2).float()  # (count, items)
    assert matches.mean(0).numpy() == pytest.approx(chances.numpy(), abs=0.015)
    assert float(lesson.weight.mean()) == pytest.approx(share, abs=0.015)


@pytest.mark.parametrize("share", [0.3, 1.0])
def test_what_is_expected_stands_for_the_drawn_digits(share: float) -> None:
    """The mean over all items that could be drawn, of the loss that has their digits as targets."""
    rng = torch.Generator().manual_seed(3)
    codes = torch.tensor(list(product(*map(range, SIZES))))[::2]
    catalogue = Catalogue(codes, SIZES)
    queries, table = torch.randn(1, 5, generator=rng), torch.randn(len(codes), 5, generator=rng)
    teacher = DenseTeacher(share, queries, table, None, catalogue)
    chances = (queries @ table.T).softmax(1)[0]
    came = torch.tensor([4])
    for revealed in torch.tensor(list(product([False, True], repeat=3)))[:-1]:
        log_probs = [torch.randn(len(codes), size, generator=rng) for size in SIZES]
        # What a network says depends on what is revealed of the item.
        seen = torch.unique(codes * revealed, dim=0, return_inverse=True)[1]
        level = int((~revealed).int().argmax())
        hard = log_probs[level][seen, codes[:, level]]
        wanted = share * chances @ hard + (1 - share) * hard[came]
        edges = share * chances.cumsum(0)
        found = torch.zeros(1)
        for item in range(-1, len(codes)):  # each of the uniform's intervals, by its middle
            low = edges[item - 1] if item > 0 else torch.tensor(0.0)
            low, high = (edges[-1], torch.tensor(1.0)) if item < 0 else (low, edges[item])
            middle = (low + high)[None] / 2
            digits, lesson = teacher.teach(came, torch.tensor([0]), middle, revealed[None])
            own = int((codes == digits).all(1).int().argmax())
            said = log_probs[level][seen[own]]
            taught = (lesson.expected[level][0] * said).sum()
            score = torch.lerp(said[digits[0, level]], taught, lesson.weight[0])
            found += (high - low) * score
        assert float(found) == pytest.approx(float(wanted), abs=1e-5)


@pytest.mark.parametrize("share", [0.3, 1.0])
def test_the_target_is_a_mixture(share: float) -> None:
    torch.manual_seed(0)
    codes = torch.tensor(list(product(*map(range, SIZES))))[::2]
    catalogue = Catalogue(codes, SIZES)
    config = replace(CONFIG.network, dropout=0.0)
    network = Network(config, SIZES, CONFIG.dense, torch.randn(len(codes), 5))
    numbers, layout = torch.tensor([3, 1, 9, 9, 0]), Layout.of([6, 9])
    generator = torch.Generator().manual_seed(1)
    noise = network.draw_noise(layout, CONFIG.objective, generator)
    past = network.remember(codes[numbers], layout, numbers)
    teacher = DenseTeacher(share, network.queries(past), network.table(codes), None, catalogue)
    masked = noise.masked.view(-1, 3)
    uniform = torch.rand(5, generator=generator)
    digits, lesson = teacher.teach(numbers, torch.arange(5), uniform, ~masked)
    rows, _ = masked_rows(noise.masked, 3)
    states = network.predict(past, digits, noise.masked, layout, rows)
    loss = masked_loss(network, states, digits, noise, catalogue, lesson)
    total = 0.0
    for item, level in masked.nonzero().tolist():
        row = torch.tensor([3 * item + level])
        hidden = network.predict(past, digits, noise.masked, layout, row)
        true, known = digits[item, None], ~masked[item, None]
        log_probs = network.log_probs(hidden, level, catalogue.allowed(level, true, known))[0]
        target = lesson.weight[item] * lesson.expected[level][item]
        target[true[0, level]] += 1 - lesson.weight[item]
        possible = target > 0
        total -= float((target[possible] * log_probs.detach()[possible]).sum() / noise.levels[row])
    assert float(loss.total.detach()) == pytest.approx(total, rel=1e-4)
    loss.total.backward()
    assert network.tokens.weight.grad is not None
    assert network.tokens.weight.grad.isfinite().all()


@pytest.mark.parametrize(
    ("config", "share", "words"),
    [(CONFIG, 1.5, "from 0 to 1"), (PAPER, 0.5, "network.attention=causal")],
)
def test_bad_settings(config: object, share: float, words: str) -> None:
    shop = fetch("synthetic", synthetic=SyntheticConfig(users=50, items=40))
    changed = replace(config, objective=replace(config.objective, distil=share))  # type: ignore[type-var, attr-defined]
    with pytest.raises(RequestError, match=words):
        Recommender.train(shop, config=changed)
