from __future__ import annotations

from pathlib import Path

import pytest
import torch

from maskgr.artefact import write_folder
from maskgr.errors import RequestError
from maskgr.training.checkpoint import save_checkpoint
from maskgr.training.distributed import World
from maskgr.training.workspace import Workspace, workspace


@pytest.mark.parametrize("stage", [".", "history"])
def test_raises_when_the_folder_holds_a_training(tmp_path: Path, stage: str) -> None:
    save_checkpoint(tmp_path / stage, 1, {}, {"w": torch.ones(1)})
    with (
        pytest.raises(RequestError, match=r"holds a training; --resume \(resume=True\) goes on"),
        workspace(tmp_path, device="cpu"),
    ):
        pass
    with workspace(tmp_path, device="cpu", resume=True) as work:
        assert work.resume


def test_folder_without_checkpoints_begins_a_training(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("")
    with workspace(tmp_path, device="cpu") as work:
        assert work.run == tmp_path
        assert work.world == World(0, 1, torch.device("cpu"))
        assert work.stage("history").run == tmp_path / "history"


def test_artefact_is_made_once_and_kept_when_resuming(tmp_path: Path) -> None:
    made: list[Path] = []

    def make(folder: Path) -> None:
        made.append(folder)
        with write_folder(folder, "thing", 1, {}) as draft:
            (draft / "file").write_text(str(len(made)))

    for resume, times in ((True, 1), (True, 1), (False, 2)):  # a new training makes it anew
        work = Workspace(tmp_path, World(0, 1, torch.device("cpu")), resume)
        assert work.once("thing", make) == tmp_path / "thing"
        assert len(made) == times
    assert (tmp_path / "thing" / "file").read_text() == "2"


def test_artefact_is_made_by_the_writing_process_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(World, "wait", lambda self: None)
    work = Workspace(tmp_path, World(1, 2, torch.device("cpu")))
    assert work.once("thing", lambda folder: pytest.fail("made twice")) == tmp_path / "thing"


def test_artefact_is_made_with_the_threads_of_all_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(World, "wait", lambda self: None)
    before, found = torch.get_num_threads(), []
    work = Workspace(tmp_path, World(0, 2, torch.device("cpu"), before + 1))
    work.once("thing", lambda folder: found.append(torch.get_num_threads()))
    assert found == [before + 1]
    assert torch.get_num_threads() == before
