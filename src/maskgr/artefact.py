"""Folders on disk that are whole or not there: open formats, checksums, atomic replacement.

A saved artefact is a folder with a `maskgr.json` that says what it is, how it was made, and the
size and SHA-256 of every other file. It is written beside its place and moved in with a rename, so
an interrupted write, a full disk or a kill leaves what was there before.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import maskgr
from maskgr.errors import ArtefactError

MANIFEST = "maskgr.json"


@dataclass(frozen=True)
class Manifest:
    """What `maskgr.json` says."""

    kind: str  # "dataset", "semantic-ids", "run"
    schema: int  # raised when the layout of this kind changes
    config: dict[str, Any]  # how it was made
    files: dict[str, dict[str, Any]]  # name -> {"bytes": ..., "sha256": ...}


@contextlib.contextmanager
def write_folder(
    path: Path | str, kind: str, schema: int, config: Mapping[str, Any]
) -> Iterator[Path]:
    """Yields an empty folder to fill; on leaving the block it becomes `path`, whole.

    Replaces an artefact of the same kind, or an empty folder; anything else is left alone.
    """
    path = Path(path).absolute()
    recover(path)
    _refuse_to_replace(path, kind)
    draft: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{path.name}.new-", dir=path.parent))
        draft.chmod(0o777 & ~_umask())
        yield draft
        _write_manifest(draft, kind, schema, config)
        _swap(draft, path)
    except OSError as error:
        raise ArtefactError(
            f"cannot write {path}: {error.strerror or error}; what was there before is unchanged"
        ) from error
    finally:
        if draft is not None:
            shutil.rmtree(draft, ignore_errors=True)


@contextlib.contextmanager
def write_file(path: Path | str) -> Iterator[Path]:
    """Yields a path to write to; on leaving the block it replaces `path` in one step."""
    path = Path(path).absolute()
    draft: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.new-", dir=path.parent)
        os.close(handle)
        draft = Path(name)
        yield draft
        draft.chmod(0o666 & ~_umask())
        sync(draft)
        os.replace(draft, path)
        sync(path.parent)
    except OSError as error:
        raise ArtefactError(
            f"cannot write {path}: {error.strerror or error}; what was there before is unchanged"
        ) from error
    finally:
        if draft is not None:
            draft.unlink(missing_ok=True)


def read_manifest(path: Path | str, kind: str, schema: int) -> Manifest:
    """The manifest of the artefact at `path`, after checking every file against it."""
    path = Path(path)
    recover(path.absolute())
    if not path.is_dir():
        raise ArtefactError(f"there is no folder {path}; check the path")
    manifest = _parse_manifest(path / MANIFEST)
    if manifest.kind != kind:
        raise ArtefactError(f"{path} holds a {manifest.kind}, not a {kind}; give another folder")
    if manifest.schema != schema:
        raise ArtefactError(
            f"{path} has layout version {manifest.schema} and this maskgr reads version {schema}; "
            "make it again, or use the maskgr that made it"
        )
    for name, expected in manifest.files.items():
        _check_file(path / name, expected)
    return manifest


def is_artefact(path: Path | str) -> bool:
    recover(Path(path).absolute())
    return (Path(path) / MANIFEST).is_file()


def recover(path: Path) -> None:
    """Finishes a replacement that was killed between its two renames (see `_swap`)."""
    previous = _previous(path)
    if previous.is_dir() and not path.exists():
        previous.rename(path)


def _swap(draft: Path, path: Path) -> None:
    # A folder cannot be replaced in one rename, so the old one steps aside first; if we are killed
    # in between, `recover` puts it back.
    previous = _previous(path)
    shutil.rmtree(previous, ignore_errors=True)
    if path.exists():
        path.rename(previous)
    draft.rename(path)
    sync(path.parent)
    shutil.rmtree(previous, ignore_errors=True)


def _previous(path: Path) -> Path:
    return path.with_name(f".{path.name}.previous")


def _refuse_to_replace(path: Path, kind: str) -> None:
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return
    if path.is_dir() and (path / MANIFEST).is_file():
        try:
            found = _parse_manifest(path / MANIFEST).kind
        except ArtefactError:
            return  # a damaged artefact must not stand in the way of making it again
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
        sync(file)
        files[file.relative_to(folder).as_posix()] = {
            "bytes": file.stat().st_size,
            "sha256": sha256(file),
        }
    content = {
        "kind": kind,
        "schema": schema,
        "maskgr": maskgr.__version__,
        "config": dict(config),
        "files": files,
    }
    target = folder / MANIFEST
    target.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    sync(target)
    sync(folder)


def _parse_manifest(file: Path) -> Manifest:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        return Manifest(
            kind=str(content["kind"]),
            schema=int(content["schema"]),
            config=dict(content["config"]),
            files={str(k): dict(v) for k, v in content["files"].items()},
        )
    except FileNotFoundError:
        raise ArtefactError(
            f"{file.parent} has no {file.name}, so it is not something maskgr saved; check the path"
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
    """Does not return before `path`, a file or a folder, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current
