from __future__ import annotations

import pytest

from maskgr.training.fit import schedule


def test_schedule_by_hand() -> None:
    factors = [schedule(step, total=8, warmup=4) for step in range(9)]
    assert factors == pytest.approx([0.25, 0.5, 0.75, 1, 1, 0.853553, 0.5, 0.146447, 0], abs=1e-6)


def test_schedule_without_warmup_and_after_the_end() -> None:
    assert schedule(0, total=10, warmup=0) == 1
    assert schedule(99, total=10, warmup=0) == 0
    assert schedule(3, total=3, warmup=3) == 1
