"""Shared by all tests: the command run in this process, and where the real datasets are."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

# Tensors are tiny here: one thread is faster than several, also in processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Some virtual machines announce bfloat16 units (AMX) that they do not have; oneDNN would use them.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")

SHARED_DATA = Path(__file__).parents[2] / "shared" / "data"


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str


@pytest.fixture
def maskgr(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Outcome]:
    """`maskgr("data", "inspect", folder)` as typed in a shell."""

    from maskgr.cli import main

    def run(*words: object) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["maskgr", *map(str, words)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            main()
        out, err = capsys.readouterr()
        return Outcome(int(stop.value.code or 0), out, err)

    return run


@pytest.fixture
def real_data() -> Callable[[str], Path]:
    """The folder of a real dataset; the test is skipped where it is not at hand."""

    def find(name: str) -> Path:
        folder = SHARED_DATA / name
        if not folder.is_dir():
            pytest.skip(f"needs the dataset {name} in {SHARED_DATA}")
        return folder

    return find


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or fills the user's cache."""
    monkeypatch.setenv("MASKGR_CACHE", str(tmp_path_factory.mktemp("cache")))
