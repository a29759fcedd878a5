"""Downloads that are cached, resumed after an interruption, and checked on every use.

Written here because pooch does not resume.
"""

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
from collections.abc import Iterator
from dataclasses import dataclass
from email.message import Message
from pathlib import Path
from typing import cast

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from maskgr.artefact import sha256, sync
from maskgr.errors import SourceError
from maskgr.version import __version__

_ATTEMPTS = 5
_PAUSE = 0.5  # seconds before the second attempt, doubled for each further one
_TIMEOUT = 30.0  # seconds without data
_CHUNK = 1 << 18


def cache_folder() -> Path:
    """$MASKGR_CACHE, else `maskgr` in the user's cache folder."""
    if own := os.environ.get("MASKGR_CACHE"):
        return Path(own).expanduser()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared).expanduser() / "maskgr"
    return Path.home() / ".cache" / "maskgr"


def fetch_file(url: str, target: Path, *, md5: str | None = None, progress: bool = True) -> Path:
    """Downloads `url` to `target` unless it exists, checks it, and returns `target`.

    Without a published MD5, the SHA-256 of the first use is recorded beside the file, so that later
    damage is detected.
    """
    target = target.absolute()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.parent):
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
    """Removes the recorded checksum of a bad file, so that another one can replace it."""
    with contextlib.suppress(OSError):
        _record_of(target).unlink()


class _FetchError(Exception):
    """The server cannot be reached or does not have the file; trying again is useless."""


class _RetryError(_FetchError):
    """The download was interrupted; the next attempt resumes it."""


class _StaleError(_RetryError):
    """The partial file does not match the file on the server; the next attempt starts over."""


@dataclass(frozen=True)
class _Partial:
    """The bytes of an earlier attempt, and the HTTP validator of the version they belong to."""

    size: int
    validator: str


def _download(url: str, target: Path, md5: str | None, progress: bool) -> None:
    part = _part_of(target)
    _record_of(target).unlink(missing_ok=True)
    _receive_with_retries(url, target, progress)
    if md5 is not None and (found := _md5(part)) != md5:
        _discard(part)
        raise _deleted(f"{url} arrived with MD5 {found} instead of {md5}", url, target)
    os.replace(part, target)
    _origin_of(part).unlink(missing_ok=True)
    sync(target.parent)
    if md5 is None:
        _record_checksum(target)


def _check(url: str, target: Path, md5: str | None) -> None:
    if md5 is not None:
        if (found := _md5(target)) != md5:
            target.unlink()
            raise _deleted(f"{target} has MD5 {found} instead of {md5}", url, target)
        return
    recorded = _recorded_checksum(target)
    if recorded is None:
        _discard(_part_of(target))  # the user put the file here: there is nothing to resume
        _record_checksum(target)
    elif sha256(target) != recorded:
        target.unlink()
        _record_of(target).unlink()
        raise _deleted(f"{target} has changed since it was first used", url, target)


def _deleted(what: str, url: str, target: Path) -> SourceError:
    return SourceError(
        f"{what} and was deleted; run again to download {url}, "
        f"or fetch it elsewhere and put it at {target}"
    )


def _receive_with_retries(url: str, target: Path, progress: bool) -> None:
    part = _part_of(target)
    why = ""
    for attempt in range(_ATTEMPTS):
        if attempt:
            time.sleep(_PAUSE * 2 ** (attempt - 1))
        try:
            return _receive(url, part, target.name, progress)
        except _RetryError as error:
            why = str(error)
            if isinstance(error, _StaleError):
                _discard(part)
        except _FetchError as error:
            raise SourceError(
                f"cannot download {url} ({error}); fetch it elsewhere and put it at {target}"
            ) from error
    raise SourceError(
        f"cannot download {url} ({why}; {_ATTEMPTS} attempts); run again to resume, "
        f"or fetch it elsewhere and put it at {target}"
    )


def _receive(url: str, part: Path, name: str, progress: bool) -> None:
    """One attempt: resumes the partial file, or starts from the beginning."""
    partial = _find_partial(url, part)
    with _open(url, partial) as response:
        arrived = _resume_point(response, partial)
        if arrived == 0:
            _start_over(url, part, response.headers)
        length = response.headers.get("Content-Length", "")
        total = arrived + int(length) if length.isdecimal() else None
        mode = "r+b" if arrived else "wb"
        with part.open(mode) as file, _progress_bar(progress) as bar:
            file.seek(arrived)
            task = bar.add_task(name, total=total, completed=arrived)
            for chunk in _chunks(response):
                file.write(chunk)
                arrived += len(chunk)
                bar.advance(task, len(chunk))
            file.flush()
            os.fsync(file.fileno())
    if total is not None and arrived != total:
        raise _RetryError(f"{arrived} of {total} bytes arrived")


def _open(url: str, partial: _Partial | None) -> http.client.HTTPResponse:
    headers = {"User-Agent": f"maskgr/{__version__}"}
    if partial is not None:
        # If-Range: if the file has changed meanwhile, the server sends all of the new one.
        headers |= {"Range": f"bytes={partial.size}-", "If-Range": partial.validator}
    request = urllib.request.Request(url, headers=headers)
    try:
        return cast(http.client.HTTPResponse, urllib.request.urlopen(request, timeout=_TIMEOUT))
    except urllib.error.HTTPError as error:
        error.close()
        why = f"HTTP {error.code} {error.reason}"
        if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            raise _StaleError(why) from error
        busy = error.code >= 500 or error.code == http.HTTPStatus.TOO_MANY_REQUESTS
        raise (_RetryError if busy else _FetchError)(why) from error
    except urllib.error.URLError as error:
        raise _FetchError(_reason(error.reason)) from error
    except (OSError, http.client.HTTPException) as error:
        raise _RetryError(_reason(error)) from error


def _resume_point(response: http.client.HTTPResponse, partial: _Partial | None) -> int:
    """How many bytes of the partial file the response continues; 0 if it is the whole file."""
    if partial is None or response.status != http.HTTPStatus.PARTIAL_CONTENT:
        return 0
    fits = response.headers.get("Content-Range", "").startswith(f"bytes {partial.size}-")
    # Some servers support Range but ignore If-Range, so the validator is compared here too.
    if not fits or _validator(response.headers) not in (None, partial.validator):
        raise _StaleError("the file on the server changed while it was being downloaded")
    return partial.size


def _chunks(response: http.client.HTTPResponse) -> Iterator[bytes]:
    while True:
        try:
            chunk = response.read(_CHUNK)
        except (OSError, http.client.HTTPException) as error:
            raise _RetryError(_reason(error)) from error
        if not chunk:
            return
        yield chunk


def _find_partial(url: str, part: Path) -> _Partial | None:
    try:
        origin = json.loads(_origin_of(part).read_text(encoding="utf-8"))
        size = part.stat().st_size
        if origin["url"] == url and size > 0:
            return _Partial(size, str(origin["validator"]))
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        pass  # a partial file of unknown origin cannot be resumed
    return None


def _start_over(url: str, part: Path, headers: Message) -> None:
    # The old bytes are deleted before the new validator is written, so that a kill in between
    # cannot leave the old bytes with the new validator.
    _discard(part)
    if (validator := _validator(headers)) is not None:
        origin = {"url": url, "validator": validator}
        _origin_of(part).write_text(json.dumps(origin), encoding="utf-8")


def _validator(headers: Message) -> str | None:
    """The ETag or date that identifies this version of the file."""
    etag: str | None = headers.get("ETag")
    if etag is not None and not etag.startswith("W/"):  # weak ETags do not promise equal bytes
        return etag
    modified: str | None = headers.get("Last-Modified")
    return modified


def _reason(error: object) -> str:
    return str(getattr(error, "strerror", None) or error or type(error).__name__)


def _part_of(target: Path) -> Path:
    return target.with_name(target.name + ".part")


def _origin_of(part: Path) -> Path:
    return part.with_name(part.name + ".json")


def _discard(part: Path) -> None:
    part.unlink(missing_ok=True)
    _origin_of(part).unlink(missing_ok=True)


def _record_of(target: Path) -> Path:
    return target.with_name(target.name + ".sha256")


def _record_checksum(target: Path) -> None:
    if os.access(target.parent, os.W_OK):  # a shared cache may be read-only
        # The format that `sha256sum --check` reads.
        _record_of(target).write_text(f"{sha256(target)}  {target.name}\n", encoding="utf-8")


def _recorded_checksum(target: Path) -> str | None:
    """The recorded checksum; None if there is none or its file is incomplete."""
    record = _record_of(target)
    text = record.read_text(encoding="utf-8", errors="replace") if record.is_file() else ""
    match = re.match(r"[0-9a-f]{64}(?=\s)", text)
    return match.group() if match else None


def _md5(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lets one process at a time download to `folder`; the next one then finds the file."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # not all network file systems have locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _progress_bar(wanted: bool) -> Progress:
    """A progress bar on the terminal; prints nothing if not wanted or without a terminal."""
    hidden = not (wanted and sys.stderr.isatty())
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True, quiet=hidden),
        disable=hidden,
    )
