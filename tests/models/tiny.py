"""A shop of a few items, and what rankings are by definition."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import polars as pl
import torch
from torch import Tensor, nn

from maskgr.data.dataset import Dataset
from maskgr.data.sequences import Sequences
from maskgr.evaluation.ranking import Query, Ranked
from maskgr.training.distributed import World
from maskgr.training.workspace import Workspace

ITEMS, USERS, TEXT = 14, 24, 6
HISTORIES = Sequences.of([[3, 1, 4, 1, 5], [], [9, 2], [6], [0, 1, 2, 3, 4, 5, 6, 7, 8]])


def shop(repeats: bool = False) -> Dataset:
    """Users walk from item to item, mostly to the next one; items have vectors for texts."""
    rng = np.random.default_rng(0)
    rows = []
    for user in range(USERS):
        step = rng.choice([1, 1, 1, 2], size=rng.integers(5, 9))
        items = (rng.integers(ITEMS) + np.cumsum(step)) % (ITEMS // 3 if repeats else ITEMS)
        rows += [(f"u{user}", f"i{item:02}", place) for place, item in enumerate(items)]
    events = pl.DataFrame(rows, schema=["user_id", "item_id", "position"], orient="row")
    items = pl.DataFrame({"item_id": [f"i{n:02}" for n in range(ITEMS)]})
    return Dataset.from_frames(events, items, embeddings=texts())


def texts() -> npt.NDArray[np.float32]:
    """(items, any) vectors of the items' texts."""
    return np.random.default_rng(1).normal(size=(ITEMS, TEXT)).astype(np.float32)


def workspace(folder: Path) -> Workspace:
    return Workspace(folder, World(0, 1, torch.device("cpu")))


@torch.no_grad()
def randomise(network: nn.Module, seed: int = 0) -> None:
    """Random weights, as large as trained ones: nothing is at its start."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in network.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.add_(noise, alpha=0.5 if parameter.ndim > 1 else 0.2)


def ranked_by(log_probs: Tensor, query: Query) -> Ranked:
    """The answer to `query` where each user's items have `log_probs` (users, items)."""
    left = log_probs.clone()
    if query.allowed is not None:
        left[:, torch.from_numpy(~query.allowed)] = -torch.inf
    if query.excluded is not None:
        left[query.excluded.owners, query.excluded.values] = -torch.inf
    scores, items = left.sort(dim=1, descending=True, stable=True)
    items[scores == -torch.inf] = -1
    return Ranked(items[:, : query.top].int().numpy(), scores[:, : query.top].numpy())


def assert_same(found: Ranked, expected: Ranked, exact: bool = False) -> None:
    assert np.array_equal(found.items, expected.items)
    if exact:
        assert np.array_equal(found.scores, expected.scores)
    else:
        np.testing.assert_allclose(found.scores, expected.scores, atol=1e-5, rtol=1e-5)


def queries() -> list[Query]:
    """One with every item, and with each filter."""
    allowed = np.arange(ITEMS) % 3 != 1
    return [
        Query(HISTORIES, ITEMS),
        Query(HISTORIES, 3),
        Query(HISTORIES, ITEMS, allowed=allowed),
        Query(HISTORIES, ITEMS, excluded=HISTORIES),
        Query(HISTORIES, 5, allowed, HISTORIES),
    ]
