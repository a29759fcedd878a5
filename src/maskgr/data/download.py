"""Files from the web: cached, continued where they broke off, and checked on every use."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import http.client
import json
import os
import re
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from email.message import Message
from pathlib import Path
from typing import cast

import maskgr
from maskgr.artefact import sha256, sync
from maskgr.errors import SourceError

_ATTEMPTS = 5
_PAUSE = 0.5  # seconds before the second attempt; doubled before each further one
_TIMEOUT = 30.0  # seconds without a byte
_CHUNK = 1 << 18


def cache_folder() -> Path:
    """Where downloads live: $MASKGR_CACHE, else the user's cache folder."""
    if own := os.environ.get("MASKGR_CACHE"):
        return Path(own).expanduser()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared).expanduser() / "maskgr"
    return Path.home() / ".cache" / "maskgr"


def fetch_file(url: str, target: Path, *, md5: str | None = None, progress: bool = True) -> Path:
    """`target`, downloaded from `url` unless it is there already, and checked either way.

    Without a published MD5 the SHA-256 of the first sight is kept beside the file, so that later
    damage is seen.
    """
    target = target.absolute()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _alone_in(target.parent):
            if target.exists():
                _check(url, target, md5)
            else:
                _download(url, target, md5, progress)
    except OSError as error:
        raise SourceError(
            f"cannot store {target} ({error.strerror or error}); make room for it and run again, "
            "or set MASKGR_CACHE to another folder"
        ) from error
    return target


def forget_checksum(target: Path) -> None:
    """Lets another file take the place of `target`: what was recorded proved to be no good."""
    with contextlib.suppress(OSError):
        _record_of(target).unlink()


class _FetchError(Exception):
    """The server cannot be reached or does not have the file."""


class _DroppedError(_FetchError):
    """It broke off; another attempt may go on from there."""


class _StaleError(_DroppedError):
    """What has arrived so far does not belong to what the server has now."""


@dataclass(frozen=True)
class _Half:
    """What an earlier attempt left, and the server's mark of the version it belongs to."""

    size: int
    mark: str


def _download(url: str, target: Path, md5: str | None, progress: bool) -> None:
    part = _part_of(target)
    _record_of(target).unlink(missing_ok=True)
    _receive_patiently(url, target, progress)
    if md5 is not None and (found := _md5(part)) != md5:
        _discard(part)
        raise _deleted(f"{url} arrived with MD5 {found} instead of {md5}", url, target)
    os.replace(part, target)
    _note_of(part).unlink(missing_ok=True)
    sync(target.parent)
    if md5 is None:
        _record(target)


def _check(url: str, target: Path, md5: str | None) -> None:
    if md5 is not None:
        if (found := _md5(target)) != md5:
            target.unlink()
            raise _deleted(f"{target} has MD5 {found} instead of {md5}", url, target)
        return
    recorded = _recorded(target)
    if recorded is None:
        _discard(_part_of(target))  # the file was put here by hand: nothing is left to continue
        _record(target)
    elif sha256(target) != recorded:
        target.unlink()
        _record_of(target).unlink()
        raise _deleted(f"{target} has changed since it was first used", url, target)


def _deleted(what: str, url: str, target: Path) -> SourceError:
    return SourceError(
        f"{what} and was deleted; run again to download {url}, "
        f"or fetch it elsewhere and put it at {target}"
    )


def _receive_patiently(url: str, target: Path, progress: bool) -> None:
    part = _part_of(target)
    why = ""
    for attempt in range(_ATTEMPTS):
        if attempt:
            time.sleep(_PAUSE * 2 ** (attempt - 1))
        try:
            return _receive(url, part, target.name, progress)
        except _DroppedError as dropped:
            why = str(dropped)
            if isinstance(dropped, _StaleError):
                _discard(part)
        except _FetchError as failed:
            raise SourceError(
                f"cannot download {url} ({failed}); fetch it elsewhere and put it at {target}"
            ) from failed
    raise SourceError(
        f"cannot download {url} ({why}; {_ATTEMPTS} attempts); run again to go on from there, "
        f"or fetch it elsewhere and put it at {target}"
    )


def _receive(url: str, part: Path, name: str, progress: bool) -> None:
    """One attempt: from the start, or from where the last one ended."""
    half = _find_half(url, part)
    with _open(url, half) as response:
        arrived = _starting_point(response, half)
        if arrived == 0:
            _start_over(url, part, response.headers)
        total = _total(response, arrived)
        with (
            part.open("r+b" if arrived else "wb") as file,
            _progress(name, arrived, total, progress) as advance,
        ):
            file.seek(arrived)
            for chunk in _chunks(response):
                file.write(chunk)
                arrived += len(chunk)
                advance(len(chunk))
            file.flush()
            os.fsync(file.fileno())
    if total is not None and arrived != total:
        raise _DroppedError(f"{arrived} of {total} bytes arrived")


def _open(url: str, half: _Half | None) -> http.client.HTTPResponse:
    headers = {"User-Agent": f"maskgr/{maskgr.__version__}"}
    if half is not None:
        # If-Range: should the file have changed meanwhile, the server sends the new one whole.
        headers |= {"Range": f"bytes={half.size}-", "If-Range": half.mark}
    request = urllib.request.Request(url, headers=headers)
    try:
        return cast(http.client.HTTPResponse, urllib.request.urlopen(request, timeout=_TIMEOUT))
    except urllib.error.HTTPError as error:
        error.close()
        why = f"HTTP {error.code} {error.reason}"
        if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            raise _StaleError(why) from error
        busy = error.code >= 500 or error.code == http.HTTPStatus.TOO_MANY_REQUESTS
        raise (_DroppedError if busy else _FetchError)(why) from error
    except urllib.error.URLError as error:
        raise _FetchError(_reason(error.reason)) from error
    except (OSError, http.client.HTTPException) as error:
        raise _DroppedError(_reason(error)) from error


def _starting_point(response: http.client.HTTPResponse, half: _Half | None) -> int:
    if half is None or response.status != http.HTTPStatus.PARTIAL_CONTENT:
        return 0
    fits = response.headers.get("Content-Range", "").startswith(f"bytes {half.size}-")
    # Some servers know Range but not If-Range, so their mark is compared here as well.
    if not fits or _mark(response.headers) not in (None, half.mark):
        raise _StaleError("the file on the server changed while it was being downloaded")
    return half.size


def _total(response: http.client.HTTPResponse, arrived: int) -> int | None:
    length = response.headers.get("Content-Length", "")
    return arrived + int(length) if length.isdecimal() else None


def _chunks(response: http.client.HTTPResponse) -> Iterator[bytes]:
    while True:
        try:
            chunk = response.read(_CHUNK)
        except (OSError, http.client.HTTPException) as error:
            raise _DroppedError(_reason(error)) from error
        if not chunk:
            return
        yield chunk


def _find_half(url: str, part: Path) -> _Half | None:
    try:
        note = json.loads(_note_of(part).read_text(encoding="utf-8"))
        size = part.stat().st_size
        if note["url"] == url and size > 0:
            return _Half(size, str(note["mark"]))
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        pass  # half a file of unknown origin is worth nothing
    return None


def _start_over(url: str, part: Path, headers: Message) -> None:
    # The old half goes before the new mark is written: a kill in between must not join the two.
    _discard(part)
    if (mark := _mark(headers)) is not None:
        _note_of(part).write_text(json.dumps({"url": url, "mark": mark}), encoding="utf-8")


def _mark(headers: Message) -> str | None:
    etag: str | None = headers.get("ETag")
    if etag is not None and not etag.startswith("W/"):  # weak ones do not promise equal bytes
        return etag
    modified: str | None = headers.get("Last-Modified")
    return modified


def _reason(error: object) -> str:
    return str(getattr(error, "strerror", None) or error or type(error).__name__)


def _part_of(target: Path) -> Path:
    return target.with_name(target.name + ".part")


def _note_of(part: Path) -> Path:
    return part.with_name(part.name + ".json")


def _discard(part: Path) -> None:
    part.unlink(missing_ok=True)
    _note_of(part).unlink(missing_ok=True)


def _record_of(target: Path) -> Path:
    return target.with_name(target.name + ".sha256")


def _record(target: Path) -> None:
    if os.access(target.parent, os.W_OK):  # a shared cache that is read-only is of use all the same
        # The layout that `sha256sum --check` reads.
        _record_of(target).write_text(f"{sha256(target)}  {target.name}\n", encoding="utf-8")


def _recorded(target: Path) -> str | None:
    """The checksum on record; None if there is none, or its file was never finished."""
    record = _record_of(target)
    text = record.read_text(encoding="utf-8", errors="replace") if record.is_file() else ""
    match = re.match(r"[0-9a-f]{64}(?=\s)", text)
    return match.group() if match else None


def _md5(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Makes a second process wait, then find the file; two must not write one half."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some network file systems have no locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


@contextlib.contextmanager
def _progress(
    name: str, done: int, total: int | None, wanted: bool
) -> Iterator[Callable[[int], None]]:
    """A bar on the terminal; yields what to call with each further number of bytes."""
    if not (wanted and sys.stderr.isatty()):
        yield lambda _: None
        return
    from rich import progress
    from rich.console import Console

    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(name, total=total, completed=done)
        yield lambda count: bar.advance(task, count)
