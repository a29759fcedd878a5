"""What an answer costs beside its number of steps: operations, and the time of one user alone."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from maskgr.data.splits import Holdout
from maskgr.evaluation.ranking import Query, Ranker

USERS = 32  # whose operations are counted, and who are timed one by one
TOP = 10


@dataclass(frozen=True)
class Costs:
    """The costs of one user's answer."""

    flops: float  # of matrix products and attention, counted by torch.utils.flop_counter
    ms_alone: float  # milliseconds of a request for one user, the median


def costs(ranker: Ranker, holdout: Holdout) -> Costs:
    """Measured on the first users of the sample."""
    some = holdout.sample(2 * USERS)
    half = some.select(np.arange(len(some.users) // 2))
    # What is computed once for all users, such as the items' vectors, is no cost of a user.
    both, one = (_flops(ranker, own) for own in (some, half))
    flops = (both - one) / max(1, len(some.users) - len(half.users))
    times = [_seconds(ranker, some, row) for row in range(min(USERS, len(some.users)))]
    return Costs(flops, 1000 * float(np.median(times)))


def _flops(ranker: Ranker, holdout: Holdout) -> float:
    # Attention as plain matrix products: fused kernels of some devices are not counted.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        ranker.rank(Query(holdout.histories, TOP))
    return float(counter.get_total_flops())


def _seconds(ranker: Ranker, holdout: Holdout, row: int) -> float:
    query = Query(holdout.histories.select(np.array([row])), TOP)
    start = time.perf_counter()
    ranker.rank(query)
    return time.perf_counter() - start
