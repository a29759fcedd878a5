"""Weights of events in training: what is learned, what is skipped, who refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from maskgr.data.sequences import Sequences
from maskgr.data.splits import Split
from maskgr.errors import DataError, RequestError
from maskgr.models.sasrec import SASRec, SASRecConfig
from maskgr.nn.transformer import TransformerConfig
from maskgr.training.batches import Batches, Place
from maskgr.training.fit import Batch, fit
from maskgr.training.workspace import Workspace
from tests.training.toy import HERE, HOLDOUT, SETTINGS, Toy


class Weighing(Toy):
    weighs_events = True

    def forward(self, batch: Batch) -> Tensor:
        items = torch.from_numpy(batch.sequences.values).long()
        weights = batch.target_weights(torch.device("cpu"))
        assert weights is not None
        return -(self.logits.log_softmax(0)[items] @ weights)


def split_of(rows: list[list[int]], weights: list[float]) -> Split:
    train = replace(Sequences.of(rows), weights=np.array(weights, dtype=np.float32))
    return Split(train, HOLDOUT, HOLDOUT)


def test_weights_decide_what_is_learned(tmp_path: Path) -> None:
    # Items 0, 1 and 2 occur alike; their weights are 1, 3 and 0.
    split = split_of([[0, 1, 2]] * 8, [1, 3, 0] * 8)
    toy, config = Weighing(), replace(SETTINGS, steps=300, learning_rate=0.1, validations=1)
    fit(toy, split, config, Workspace(tmp_path, HERE), history_limit=4, seed=0)
    learned = toy.logits.detach().softmax(0)
    assert learned.tolist() == pytest.approx([0.25, 0.75, 0, 0, 0], abs=0.02)


def test_a_network_that_does_not_weigh_events_refuses_weights(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="Toy cannot weigh events, and these data have weights"):
        fit(
            Toy(),
            split_of([[0, 1]], [1, 2]),
            SETTINGS,
            Workspace(tmp_path, HERE),
            history_limit=4,
            seed=0,
        )


def test_windows_of_context_alone_are_not_trained_on() -> None:
    sequences = split_of([[1, 2], [3, 4], [5]], [0, 0, 0, 1, 2]).train
    batches = Batches(sequences, 5, 20)
    assert sorted(np.concatenate(batches.epoch(0)).tolist()) == [1, 2]
    _, batch = next(batches.from_place(Place()))
    assert batch.values.tolist() == [5, 3, 4]
    assert batch.weights is not None
    assert batch.weights.tolist() == [2, 0, 1]
    with pytest.raises(DataError, match="no event before the held-out ones is a target"):
        Batches(split_of([[1, 2]], [0, 0]).train, 5, 20)


def test_loss_of_a_weighted_sequence_by_hand() -> None:
    torch.manual_seed(0)
    config = SASRecConfig(TransformerConfig(layers=1, width=8, heads=2, hidden=16, dropout=0.0))
    network = SASRec(config, np.ones(6, dtype=np.int64), history_limit=5).eval()
    sequences = split_of([[3, 1, 4]], [0, 2, 0.5]).train
    batch = network.prepare(sequences, torch.Generator())
    assert batch.weight == 2.5
    with torch.no_grad():
        hidden, _ = network.encode(sequences.without_last())
        log_probs = (network.queries(hidden) @ network.items().T).log_softmax(1)
        by_hand = -(2 * log_probs[1, 1] + 0.5 * log_probs[2, 4])
        torch.testing.assert_close(network(batch), by_hand)
