from __future__ import annotations

from pathlib import Path

import pytest
import torch

from maskgr.training.checkpoint import load_checkpoint, save_checkpoint


def save(run: Path, step: int) -> None:
    save_checkpoint(run, step, {"seconds": 1.5}, {"w": torch.full((3,), float(step))})


def test_newest_checkpoint_is_loaded_and_two_are_kept(tmp_path: Path) -> None:
    assert load_checkpoint(tmp_path) is None
    for step in (5, 10, 200):
        save(tmp_path, step)
    found = load_checkpoint(tmp_path)
    assert found is not None
    assert (found.step, found.state["seconds"]) == (200, 1.5)
    assert found.tensors["w"].tolist() == [200.0] * 3
    assert len(list((tmp_path / "checkpoints").iterdir())) == 2


def test_checkpoints_of_later_steps_are_removed(tmp_path: Path) -> None:
    save(tmp_path, 100)
    for step in (5, 10):  # begun again, because the hundredth was damaged
        save(tmp_path, step)
    assert sorted(int(p.name) for p in (tmp_path / "checkpoints").iterdir()) == [5, 10]


@pytest.mark.parametrize("damage", ["cut", "gone", "manifest"])
def test_damaged_checkpoint_is_named_and_the_one_before_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    folder = tmp_path / "checkpoints" / f"{2:010}"
    tensors = folder / "state.safetensors"
    if damage == "cut":
        tensors.write_bytes(tensors.read_bytes()[:-4])
    elif damage == "gone":
        tensors.unlink()
    else:
        (folder / "maskgr.json").write_text("{")
    found = load_checkpoint(tmp_path)
    assert found is not None
    assert found.step == 1
    assert str(folder) in capsys.readouterr().err


def test_checkpoint_is_found_after_a_kill_while_it_was_replaced(tmp_path: Path) -> None:
    save(tmp_path, 1)
    folder = tmp_path / "checkpoints" / f"{1:010}"
    folder.rename(folder.with_name(f".{folder.name}.previous"))
    found = load_checkpoint(tmp_path)
    assert found is not None
    assert found.step == 1


def test_no_checkpoint_is_loaded_where_all_are_damaged(tmp_path: Path) -> None:
    save(tmp_path, 1)
    (tmp_path / "checkpoints" / f"{1:010}" / "maskgr.json").unlink()
    assert load_checkpoint(tmp_path) is None
