"""Operations of an answer: counted exactly, and without what all users share."""

from __future__ import annotations

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from maskgr.data.sequences import Sequences
from maskgr.data.splits import Holdout
from maskgr.evaluation.ranking import Query, Ranked
from maskgr.studies.costs import costs


class Products:
    """A product of 3 x 5 x 7 for all users together, one of 5 x 11 for each, and attention."""

    def rank(self, query: Query) -> Ranked:
        users = len(query.histories)
        _ = torch.ones(3, 5) @ torch.ones(5, 7)
        _ = torch.ones(users, 5) @ torch.ones(5, 11)
        states = torch.ones(users, 1, 4, 8)
        scaled_dot_product_attention(states, states, states)
        return Ranked(np.zeros((users, 1), np.int32), np.zeros((users, 1), np.float32))


def test_operations_are_those_of_one_user() -> None:
    histories = Sequences.of([[1]] * 100)
    holdout = Holdout(np.arange(100), histories, np.ones((100, 1), np.int32))
    found = costs(Products(), holdout)
    assert found.flops == 2 * 5 * 11 + 2 * (2 * 4 * 4 * 8)
    assert found.ms_alone > 0
