from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

from maskgr import Recommender
from maskgr.config import SyntheticConfig
from maskgr.data.open import fetch
from maskgr.diffusion.layout import Layout
from maskgr.diffusion.objective import States, negative_elbo
from maskgr.errors import RequestError
from maskgr.items.catalogue import Catalogue
from maskgr.models.distillation import DenseTeacher
from maskgr.models.network import Network
from maskgr.models.softmax import Bonus
from tests.models.test_retrieval import CONFIG, PAPER

SIZES = (3, 4, 2)


@pytest.mark.parametrize("cells", [1, 2**22])
@pytest.mark.parametrize("biased", [False, True])
def test_expected_digits_by_enumeration(
    cells: int, biased: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("maskgr.models.distillation.CELLS", cells)
    rng = torch.Generator().manual_seed(0)
    codes = torch.tensor(list(product(*map(range, SIZES))))
    codes = codes[torch.randperm(len(codes), generator=rng)[:15]]
    codes = torch.cat([codes, codes[:2]])  # two tuples are shared
    revealed = torch.tensor(list(product([False, True], repeat=3))).repeat(3, 1)
    true = codes[torch.randint(len(codes), (len(revealed),), generator=rng)]
    queries = torch.randn(len(revealed), 5, generator=rng)
    table = torch.randn(len(codes), 5, generator=rng)
    scores = queries @ table.T
    bonus = None
    if biased:
        rows = torch.arange(len(revealed)).repeat_interleave(2)
        items = torch.stack([torch.randperm(len(codes), generator=rng)[:2] for _ in revealed])
        values = torch.randn(len(rows), generator=rng)
        bonus = Bonus(rows, items.flatten(), values)
        scores[rows, items.flatten()] += values
    teacher = DenseTeacher(1.0, table, bonus, Catalogue(codes, SIZES))
    found = teacher.expect(States(queries, queries, None), true, revealed)
    chances = scores.softmax(1).numpy()
    for row, level in product(range(len(revealed)), range(3)):
        agree = ((codes == true[row]) | ~revealed[row]).all(1).numpy()
        among = np.where(agree, chances[row], 0) / chances[row][agree].sum()
        by_hand = np.bincount(codes[:, level], among, minlength=SIZES[level])
        if revealed[row].all():
            by_hand = np.zeros(SIZES[level])
        assert found[level][row].numpy() == pytest.approx(by_hand, abs=1e-5)


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_the_target_is_a_mixture(share: float) -> None:
    torch.manual_seed(0)
    codes = torch.tensor(list(product(*map(range, SIZES))))[::2]
    catalogue = Catalogue(codes, SIZES)
    config = replace(CONFIG.network, dropout=0.0)
    network = Network(config, SIZES, CONFIG.dense, torch.randn(len(codes), 5))
    numbers, layout = torch.tensor([3, 1, 9, 9, 0]), Layout.of([6, 9])
    generator = torch.Generator().manual_seed(1)
    noise = network.draw_noise(layout, CONFIG.objective, generator)
    table = network.table(codes)
    teacher = DenseTeacher(share, table, None, catalogue)
    loss, states = negative_elbo(
        network, codes[numbers], layout, noise, catalogue, numbers, teacher
    )
    assert states.queries is not None
    masked = noise.masked.view(-1, 3)
    expected = teacher.expect(states, codes[numbers], ~masked)
    total = 0.0
    for item, level in masked.nonzero().tolist():
        row = torch.tensor([3 * item + level])
        hidden = network.denoise(codes[numbers], noise.masked, layout, row, numbers).digits
        digits, known = codes[numbers[item], None], ~masked[item, None]
        log_probs = network.log_probs(hidden, level, catalogue.allowed(level, digits, known))[0]
        target = share * expected[level][item]
        target[digits[0, level]] += 1 - share
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
