"""A network whose optimum is known, and a small MaskGR that is trained in processes of its own."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from maskgr.data.sequences import Sequences
from maskgr.data.splits import Holdout, Split
from maskgr.models.base import MODELS
from maskgr.training.distributed import World
from maskgr.training.fit import Batch, FitConfig, Trainable, fit
from maskgr.training.workspace import Workspace, workspace

HERE = World(0, 1, torch.device("cpu"))
SEQUENCES = Sequences.of([[min(n % 9, 4)] * (1 + n % 4) for n in range(40)])
HOLDOUT = Holdout(
    np.arange(6), Sequences.of([[n % 5] for n in range(6)]), np.ones((6, 1), np.int32)
)
SPLIT = Split(SEQUENCES, HOLDOUT, HOLDOUT)
SETTINGS = FitConfig(steps=40, token_budget=20, validations=4, ema=0.0)


class Toy(Trainable):
    """Learns how often each of five items occurs; its loss is the cross-entropy."""

    def __init__(self, on_forward: Any = None, on_validate: Any = None, items: int = 5) -> None:
        """The functions are called with the network, and `on_validate` with the questions too."""
        super().__init__()
        torch.manual_seed(0)
        self.logits = nn.Parameter(torch.randn(items))
        self.on_forward, self.on_validate = on_forward, on_validate

    def forward(self, batch: Batch) -> Tensor:
        if self.on_forward is not None:
            self.on_forward(self)
        items = torch.from_numpy(batch.sequences.values).long()
        return -self.logits.log_softmax(0)[items].sum()

    def validate(self, holdout: Holdout) -> dict[str, float]:
        value = 0.5 if self.on_validate is None else self.on_validate(self, holdout)
        return {"recall@10": float(value)}


def train_toy(run: Path, toy: Toy, *, resume: bool = False, **settings: Any) -> dict[str, float]:
    config = replace(SETTINGS, **settings)
    work = Workspace(run, HERE, resume)
    return fit(toy, SPLIT, config, work, history_limit=4, seed=0).metrics


# Models in processes that can be killed. They are forked from one that has imported everything.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    [
        *(target.partition(":")[0] for target in MODELS.values()),
        "torch._dynamo",
        "torch.utils.tensorboard",
    ]
)


def start(target: Callable[..., None], *arguments: Any) -> Any:
    process = FORKS.Process(target=target, args=arguments)
    process.start()
    return process


def train_maskgr(run: Path, dropout: float, rank: int = 0, size: int = 1, port: int = 0) -> None:
    """Trains, or goes on with a training, and writes the weights to `final.safetensors`."""
    from maskgr.models.base import TrainConfig
    from maskgr.models.maskgr.config import (
        DenseConfig,
        NetworkConfig,
        ObjectiveConfig,
        PaperConfig,
    )
    from maskgr.models.maskgr.paper import PaperMaskGR
    from maskgr.nn.weights import save_weights
    from maskgr.training import fit as module

    torch.set_num_threads(1)
    module._plot = lambda run: None
    place = {"WORLD_SIZE": size, "RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()})
    rng = np.random.default_rng(0)
    codes = np.array([(a, b) for a in range(4) for b in range(3)])
    text = rng.standard_normal((len(codes), 5)).astype(np.float32)
    sids: Any = SimpleNamespace(digits=codes, codebook_sizes=(4, 3), embeddings=text)
    own = PaperConfig(
        network=NetworkConfig(layers=1, width=8, heads=2, hidden=16, dropout=dropout),
        dense=DenseConfig(head=True, hidden=8),
        objective=ObjectiveConfig(whole_item=0.3, catalogue_aware=True),
    )
    config = FitConfig(
        steps=30, token_budget=24, learning_rate=1e-2, ema=0.9, validations=5, checkpoint_minutes=0
    )  # at most twelve items a batch: sometimes of one sequence
    train = Sequences.of([rng.integers(12, size=n % 7 + 1) for n in range(30)])
    questions = Sequences.of([rng.integers(12, size=n % 4) for n in range(9)])
    holdout = Holdout(np.arange(9), questions, rng.integers(12, size=(9, 1)).astype(np.int32))
    with workspace(run, device="cpu", resume=True) as work:
        torch.manual_seed(0)
        model = PaperMaskGR(
            TrainConfig("maskgr-paper", own, config), sids, np.zeros(12, dtype=np.int64)
        )
        model.piece_tokens = 12
        fit(model, Split(train, holdout, holdout), config, work, history_limit=6, seed=0)
        if work.world.writes:
            save_weights(model, run / "final.safetensors")
