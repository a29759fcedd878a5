"""Saved folders and files: written atomically, with a manifest of checksums.

An artefact is a folder with a `maskgr.json` that holds its kind, how it was made, and the size and
SHA-256 of every other file, and a `maskgr.sha256` with the checksum of that file itself, so that
neither can change or disappear unnoticed (`sha256sum --check maskgr.sha256`). It is written to a
draft beside its destination and renamed into place, so an interruption, a full disk or a kill
leaves the previous content unchanged. A draft is locked while its writer lives; the drafts of
writers that were killed are removed by the next write beside them.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from maskgr.errors import ArtefactError
from maskgr.version import __version__

MANIFEST, CHECKSUM = "maskgr.json", "maskgr.sha256"
CARD = "README.md"  # at the top of a folder, for people, who may edit it: it is never read
DRAFT = re.compile(r"\..+\.maskgr-[a-z0-9_]{8}")  # as `tempfile` names what `_draft` asks for


@dataclass(frozen=True)
class Manifest:
    """The content of `maskgr.json`."""

    kind: str  # "dataset", "semantic-ids", "run"
    schema: int  # layout version of this kind
    maskgr: str  # the version that wrote it
    config: dict[str, Any]  # how it was made
    files: dict[str, dict[str, Any]]  # name -> {"bytes": ..., "sha256": ...}


@contextlib.contextmanager
def write_folder(
    path: Path | str, kind: str, schema: int, config: Mapping[str, Any]
) -> Iterator[Path]:
    """Yields an empty folder to fill, and renames it to `path` when the block ends.

    Replaces an empty folder or an artefact of the same kind, and refuses to replace anything else.
    """
    path = Path(path).absolute()
    recover(path)
    _refuse_to_replace(path, kind)
    with _refusals(path), _draft(path, tempfile.mkdtemp) as draft:
        draft.chmod(0o777 & ~_umask())
        yield draft
        _write_manifest(draft, kind, schema, config)
        _swap(draft, path)


@contextlib.contextmanager
def write_file(path: Path | str) -> Iterator[Path]:
    """Yields a temporary path to write to, and renames it to `path` when the block ends."""
    path = Path(path).absolute()
    with _refusals(path), _draft(path, _empty_file) as draft:
        yield draft
        draft.chmod(0o666 & ~_umask())
        sync(draft)
        os.replace(draft, path)
        sync(path.parent)


def remove_folder(path: Path) -> None:
    """Removes a folder of ours: a kill leaves it whole, or a draft."""
    if path.exists():
        with contextlib.suppress(OSError), _draft(path, tempfile.mkdtemp) as draft:
            path.rename(draft / path.name)


@contextlib.contextmanager
def _refusals(path: Path) -> Iterator[None]:
    """Says that `path` cannot be written where the system refuses it."""
    try:
        yield
    except Exception as error:
        reason = refusal(error)
        if reason is None:
            raise
        raise ArtefactError(
            f"cannot write {path}: {reason}; the previous content is unchanged"
        ) from error


@contextlib.contextmanager
def _draft(path: Path, make: Callable[..., str]) -> Iterator[Path]:
    """A new folder or file beside `path`, locked for as long as this process needs it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for left in path.parent.iterdir():
        if is_draft(left):
            with contextlib.suppress(OSError), _locked(left):
                _remove(left)
    with contextlib.ExitStack() as stack:
        while True:
            draft = Path(make(prefix=f".{path.name}.maskgr-", dir=path.parent))
            stack.callback(_remove, draft)
            try:
                stack.enter_context(_locked(draft))
            except (BlockingIOError, FileNotFoundError):
                continue  # it was taken for one that a kill had left, before it was locked
            except OSError:
                break  # a file system without locks, where no draft is taken for one
            if draft.exists():
                break
        yield draft


def _empty_file(prefix: str, dir: Path) -> str:
    handle, name = tempfile.mkstemp(prefix=prefix, dir=dir)
    os.close(handle)
    return name


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Raises BlockingIOError where another process has the lock; it ends with its process."""
    handle = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)


def _remove(draft: Path) -> None:
    if draft.is_dir():
        shutil.rmtree(draft, ignore_errors=True)
    else:
        draft.unlink(missing_ok=True)


def is_draft(path: Path) -> bool:
    """Whether `path` is what a killed process left, or another one is writing."""
    return DRAFT.fullmatch(path.name) is not None


def refusal(error: Exception) -> str | None:
    """Why the system refused to read or write a file; None where the error is another one.

    safetensors and polars have classes of their own for such errors.
    """
    if isinstance(error, OSError):
        return str(error.strerror or error)
    found = re.search(r"([^:]*) \(os error \d+\)", str(error))
    return None if found is None else found[1].strip()


def read_manifest(path: Path | str, kind: str, schema: int) -> Manifest:
    """Reads the manifest at `path` and checks every file against its size and checksum."""
    path = Path(path)
    recover(path.absolute())
    if not path.is_dir():
        raise ArtefactError(f"there is no folder {path}; check the path")
    _check_manifest(path)
    manifest = _parse_manifest(path / MANIFEST)
    if manifest.kind != kind:
        raise ArtefactError(f"{path} holds a {manifest.kind}, not a {kind}; give another folder")
    if manifest.schema != schema:
        made = f"maskgr {manifest.maskgr}"
        raise ArtefactError(
            f"{path} has layout version {manifest.schema} and this maskgr reads version {schema}; "
            + (
                f"install {made} or newer, or make it again"
                if manifest.schema > schema
                else f"make it again, or load it with {made}"
            )
        )
    for name, expected in manifest.files.items():
        _check_file(path / name, expected)
    return manifest


def is_artefact(path: Path | str) -> bool:
    """Whether `path` is a folder that maskgr saved: one of its two manifest files is there."""
    recover(Path(path).absolute())
    return any((Path(path) / name).is_file() for name in (MANIFEST, CHECKSUM))


def recover(path: Path) -> None:
    """Restores the previous folder if `_swap` was killed between its two renames."""
    previous = _previous(path)
    if previous.is_dir() and not path.exists():
        with contextlib.suppress(FileNotFoundError):  # another process was quicker
            previous.rename(path)


def recover_all(folder: Path) -> None:
    """The same for every artefact in `folder`, before they are listed."""
    for previous in folder.glob(".*.previous"):
        recover(previous.with_name(previous.name[1:].removesuffix(".previous")))


def _swap(draft: Path, path: Path) -> None:
    # One rename cannot replace a folder that is not empty, so the old one is renamed first. If the
    # process is killed between the two renames, `recover` restores it.
    previous = _previous(path)
    remove_folder(previous)
    if path.exists():
        path.rename(previous)
    draft.rename(path)
    sync(path.parent)
    remove_folder(previous)


def _previous(path: Path) -> Path:
    return path.with_name(f".{path.name}.previous")


def _refuse_to_replace(path: Path, kind: str) -> None:
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return
    if path.is_dir() and is_artefact(path):
        try:
            found = _parse_manifest(path / MANIFEST).kind
        except ArtefactError:
            return  # a damaged artefact may be replaced
        if found == kind:
            return
        raise ArtefactError(
            f"{path} holds a {found} and will not be replaced by a {kind}; give another --out"
        )
    raise ArtefactError(
        f"{path} exists and was not made by maskgr, so it is left alone; give another --out"
    )


def _write_manifest(folder: Path, kind: str, schema: int, config: Mapping[str, Any]) -> None:
    files = {}
    for file in sorted(p for p in folder.rglob("*") if p.is_file()):
        file.chmod(0o666 & ~_umask())  # safetensors keeps its files from other users
        sync(file)
        if file == folder / CARD:
            continue
        files[file.relative_to(folder).as_posix()] = {
            "bytes": file.stat().st_size,
            "sha256": sha256(file),
        }
    content = {
        "kind": kind,
        "schema": schema,
        "maskgr": __version__,
        "config": dict(config),
        "files": files,
    }
    target = folder / MANIFEST
    target.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    sync(target)
    checksum = folder / CHECKSUM
    checksum.write_text(f"{sha256(target)}  {MANIFEST}\n", encoding="ascii")
    sync(checksum)
    sync(folder)


def _check_manifest(folder: Path) -> None:
    """Compares the manifest with its own checksum, where one of the two files is there."""
    manifest, checksum = folder / MANIFEST, folder / CHECKSUM
    if manifest.is_file() != checksum.is_file():
        lost = checksum if manifest.is_file() else manifest
        raise ArtefactError(
            f"{lost} is missing: it was deleted, or another version of maskgr made the folder; "
            "make the folder again"
        )
    if manifest.is_file() and not checksum.read_text("ascii", "replace").startswith(
        sha256(manifest)
    ):
        raise ArtefactError(
            f"{manifest} has changed since it was written (its checksum differs); make the folder "
            "again"
        )


def _parse_manifest(file: Path) -> Manifest:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        return Manifest(
            kind=str(content["kind"]),
            schema=int(content["schema"]),
            maskgr=str(content["maskgr"]),
            config=dict(content["config"]),
            files={str(k): dict(v) for k, v in content["files"].items()},
        )
    except FileNotFoundError:
        raise ArtefactError(
            f"{file.parent} has no {file.name}, so maskgr did not save it; check the path"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArtefactError(
            f"{file} is damaged ({error or type(error).__name__}); make the folder again"
        ) from error


def _check_file(file: Path, expected: Mapping[str, Any]) -> None:
    if not file.is_file():
        raise ArtefactError(f"{file} is missing; make the folder again")
    size = file.stat().st_size
    if size != expected.get("bytes"):
        raise ArtefactError(
            f"{file} has {size} bytes where {expected.get('bytes')} were written; "
            "make the folder again"
        )
    if sha256(file) != expected.get("sha256"):
        raise ArtefactError(
            f"{file} has changed since it was written (its checksum differs); make the folder again"
        )


def sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Flushes a file or a folder to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current
