"""A few hundred of the inputs of benchmarks/fuzz.py: accepted, or refused by one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.breaking.fuzzing import READERS, fuzz

INPUTS = 25  # of each reader


@pytest.mark.parametrize("reader", READERS)
def test_generated_input_is_accepted_or_refused_by_one_sentence(
    reader: str, tmp_path: Path
) -> None:
    found = fuzz(reader, INPUTS, 0, tmp_path, seconds=300)
    assert found.inputs >= INPUTS // 2  # hypothesis may find few that differ
    assert found.failures == {}
