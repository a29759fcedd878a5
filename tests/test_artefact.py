"""Saved folders and files stay intact through interruptions, full disks and kills."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maskgr import artefact
from maskgr.artefact import is_artefact, read_manifest, write_file, write_folder
from maskgr.errors import ArtefactError


def save(path: Path, text: str, kind: str = "dataset") -> None:
    with write_folder(path, kind, 1, {"about": text}) as folder:
        (folder / "a.txt").write_text(text)


def content(path: Path) -> str:
    assert read_manifest(path, "dataset", 1).config == {"about": (path / "a.txt").read_text()}
    return (path / "a.txt").read_text()


def test_folder_is_written_then_replaced_without_leftovers(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "thing"
    save(target, "one")
    assert content(target) == "one"
    save(target, "two")
    assert content(target) == "two"
    assert [p.name for p in target.parent.iterdir()] == ["thing"]
    assert sorted(p.name for p in target.iterdir()) == ["a.txt", "maskgr.json", "maskgr.sha256"]


def test_interruption_keeps_previous_folder(tmp_path: Path) -> None:
    save(tmp_path / "thing", "old")
    with (
        contextlib.suppress(KeyboardInterrupt),
        write_folder(tmp_path / "thing", "dataset", 1, {}) as folder,
    ):
        (folder / "a.txt").write_text("half")
        raise KeyboardInterrupt
    assert content(tmp_path / "thing") == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["thing"]


def full_disk(*_: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_failed_sync_keeps_previous_folder_and_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "thing", "old")
    (tmp_path / "file").write_text("old")
    monkeypatch.setattr(artefact, "sync", full_disk)
    expected = "cannot write .*thing: No space left on device; the previous content is unchanged"
    with pytest.raises(ArtefactError, match=expected):
        save(tmp_path / "thing", "new")
    with (
        pytest.raises(ArtefactError, match=r"cannot write .*file: No space left"),
        write_file(tmp_path / "file") as draft,
    ):
        draft.write_text("new")
    assert content(tmp_path / "thing") == "old"
    assert (tmp_path / "file").read_text() == "old"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "thing"]


def test_write_refused_by_the_kernel_keeps_previous_folder(tmp_path: Path) -> None:
    """A file-size limit makes the kernel refuse the write, as a full disk would."""
    save(tmp_path / "thing", "old")
    program = f"""
import resource, signal
from pathlib import Path
from maskgr.artefact import write_folder
from maskgr.errors import ArtefactError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    with write_folder({str(tmp_path / "thing")!r}, "dataset", 1, {{}}) as folder:
        (folder / "a.txt").write_bytes(b"x" * 5000)
except ArtefactError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "cannot write" in done.stdout, done.stderr
    assert content(tmp_path / "thing") == "old"


def test_folder_loads_after_writer_is_killed_at_any_moment(tmp_path: Path) -> None:
    """A process replaces the folder in a loop and is killed; the folder must load."""
    save(tmp_path / "thing", "0")
    program = f"""
import itertools
from maskgr.artefact import write_folder
for n in itertools.count():
    with write_folder({str(tmp_path / "thing")!r}, "dataset", 1, {{"about": str(n)}}) as folder:
        (folder / "a.txt").write_text(str(n))
    print(n, flush=True)
"""
    for round_ in range(6):
        process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()  # the first replacement is done
        time.sleep(0.003 * round_)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        assert content(tmp_path / "thing").isdigit()
    save(tmp_path / "thing", "after")
    assert content(tmp_path / "thing") == "after"


def test_recovers_after_kill_between_the_two_renames(tmp_path: Path) -> None:
    save(tmp_path / "thing", "old")
    (tmp_path / "thing").rename(tmp_path / ".thing.previous")
    assert is_artefact(tmp_path / "thing")
    assert content(tmp_path / "thing") == "old"


def test_drafts_of_killed_writers_are_removed_and_those_of_living_ones_are_not(
    tmp_path: Path,
) -> None:
    left = [tmp_path / ".thing.maskgr-abcdefgh", tmp_path / ".other.maskgr-01234567"]
    left[0].mkdir()
    (left[0] / "a.txt").write_text("half")
    left[1].write_text("half")
    foreign = tmp_path / ".thing.new-abcdefgh"
    foreign.write_text("not ours")
    with write_file(tmp_path / "file") as draft:
        assert not any(path.exists() for path in left)
        save(tmp_path / "thing", "x")  # beside a write that is under way
        draft.write_text("y")
    assert (tmp_path / "file").read_text() == "y"
    assert sorted(path.name for path in tmp_path.iterdir()) == [foreign.name, "file", "thing"]


def test_raises_rather_than_replace_a_foreign_folder_or_another_kind(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_text("meow")
    with pytest.raises(ArtefactError, match="was not made by maskgr, so it is left alone"):
        save(tmp_path / "photos", "x")
    save(tmp_path / "run", "x", kind="run")
    with pytest.raises(ArtefactError, match="holds a run and will not be replaced by a dataset"):
        save(tmp_path / "run", "x")
    assert (tmp_path / "photos" / "cat.jpg").read_text() == "meow"
    (tmp_path / "empty").mkdir()
    save(tmp_path / "empty", "fine")


def test_raises_naming_the_damaged_file(tmp_path: Path) -> None:
    thing = tmp_path / "thing"
    save(thing, "hello")
    (thing / "a.txt").write_text("hullo")
    with pytest.raises(ArtefactError, match=r"a\.txt has changed since it was written"):
        content(thing)
    (thing / "a.txt").write_text("hell")
    with pytest.raises(ArtefactError, match=r"a\.txt has 4 bytes where 5 were written"):
        content(thing)
    (thing / "a.txt").unlink()
    with pytest.raises(ArtefactError, match=r"a\.txt is missing; make the folder again"):
        content(thing)
    save(thing, "hello")
    manifest = (thing / "maskgr.json").read_text()
    (thing / "maskgr.json").write_text(manifest.replace('"schema": 1', '"schema": 2'))
    with pytest.raises(ArtefactError, match=r"maskgr\.json has changed since it was written"):
        content(thing)
    save(thing, "again")  # a damaged artefact can be replaced
    assert content(thing) == "again"


def test_raises_for_wrong_kind_wrong_version_or_missing_manifest(tmp_path: Path) -> None:
    save(tmp_path / "thing", "x")
    with pytest.raises(ArtefactError, match="holds a dataset, not a run"):
        read_manifest(tmp_path / "thing", "run", 1)
    with pytest.raises(ArtefactError, match="layout version 1 and this maskgr reads version 2"):
        read_manifest(tmp_path / "thing", "dataset", 2)
    with pytest.raises(ArtefactError, match="there is no folder"):
        read_manifest(tmp_path / "nothing", "dataset", 1)
    (tmp_path / "plain").mkdir()
    with pytest.raises(ArtefactError, match=r"has no maskgr\.json"):
        read_manifest(tmp_path / "plain", "dataset", 1)


@pytest.mark.parametrize("name", ["maskgr.json", "maskgr.sha256"])
def test_checking_is_not_turned_off_by_deleting_a_manifest_file(tmp_path: Path, name: str) -> None:
    save(tmp_path / "thing", "x")
    (tmp_path / "thing" / name).unlink()
    assert is_artefact(tmp_path / "thing")
    with pytest.raises(ArtefactError, match=rf"{name} is missing: it was deleted, or another ver"):
        content(tmp_path / "thing")
    save(tmp_path / "thing", "again")
    assert content(tmp_path / "thing") == "again"


def test_a_dataset_without_its_manifest_is_not_read_as_plain_files(tmp_path: Path) -> None:
    from maskgr import Dataset
    from tests.models.tiny import shop

    shop().save(tmp_path / "data")
    (tmp_path / "data" / "maskgr.json").unlink()
    with pytest.raises(ArtefactError, match=r"maskgr\.json is missing"):
        Dataset.load(tmp_path / "data")


def test_files_can_be_read_by_whom_the_umask_allows(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    before = os.umask(0o022)
    try:
        with write_folder(tmp_path / "thing", "model", 1, {}) as folder:
            save_file({"a": np.zeros(3)}, folder / "a.safetensors")
    finally:
        os.umask(before)
    modes = {file.name: file.stat().st_mode & 0o777 for file in (tmp_path / "thing").iterdir()}
    assert set(modes.values()) == {0o644}, modes


WRITERS = {
    "numpy": "import numpy as np; np.save(folder / 'a.npy', np.zeros(50_000))",
    "polars": "import polars as pl; import numpy as np; pl.DataFrame({'a': "
    "np.random.default_rng(0).random(50_000)}).write_parquet(folder / 'a.parquet')",
    "safetensors": "import numpy as np; from safetensors.numpy import save_file; "
    "save_file({'a': np.zeros(50_000)}, folder / 'a.safetensors')",
}


@pytest.mark.parametrize("writer", WRITERS)
def test_a_size_limit_is_one_sentence_whoever_writes(tmp_path: Path, writer: str) -> None:
    program = f"""
import resource
from pathlib import Path
from maskgr.artefact import write_folder
from maskgr.errors import ArtefactError
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
try:
    with write_folder({str(tmp_path / "thing")!r}, "dataset", 1, {{}}) as folder:
        {WRITERS[writer]}
except ArtefactError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(
        r"cannot write \S+/thing: .+; the previous content is unchanged\n", done.stdout
    )
    assert not list(tmp_path.iterdir())
