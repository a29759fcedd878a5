"""Trainings of studies without a process each, which would cost seconds."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from maskgr.cli import main
from maskgr.data.config import SyntheticConfig
from maskgr.data.open import fetch


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    fetch("synthetic", synthetic=SyntheticConfig(users=80, items=30)).save(tmp_path / "shop")
    return tmp_path / "shop"


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The trainings that were started; they run in this process."""
    started: list[list[str]] = []

    def run(command: Sequence[str]) -> int:
        assert command[:3] == [sys.executable, "-m", "maskgr"]
        started.append(list(command[3:]))
        monkeypatch.setattr(sys, "argv", list(command[2:]))
        with pytest.raises(SystemExit) as stop, redirect_stdout(sys.stderr):
            main()
        return int(stop.value.code or 0)

    monkeypatch.setattr("maskgr.studies.runner.run_bound", run)
    return started
