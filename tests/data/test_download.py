"""Downloads from a local server that drops, changes and refuses files as real ones do."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from maskgr.data import download
from maskgr.data.download import cache_folder, fetch_file, forget_checksum
from maskgr.errors import SourceError

BODY = bytes(range(256)) * 40
HALF = len(BODY) // 2


@dataclass
class Behaviour:
    """Settings of the server, and the requests it received."""

    body: bytes = BODY
    etag: str | None = '"one"'
    modified: str | None = None
    ranges: bool = True
    if_range: bool = True
    shift: int = 0  # answers with a range this far from the one asked for
    drops: int = 0  # how many responses still break off halfway
    statuses: list[int] = field(default_factory=list)  # errors to answer with first
    requests: list[dict[str, str]] = field(default_factory=list)
    url: str = ""

    def ranges_asked(self) -> list[str | None]:
        return [request.get("Range") for request in self.requests]


class Handler(BaseHTTPRequestHandler):
    behaviour: Behaviour

    def do_GET(self) -> None:
        plan = self.behaviour
        plan.requests.append(dict(self.headers))
        if plan.statuses:
            self.send_error(plan.statuses.pop(0))
            return
        start = self._start(plan)
        if start >= len(plan.body):
            self.send_error(416)
            return
        self._send(plan, start)

    def _start(self, plan: Behaviour) -> int:
        asked = self.headers.get("Range")
        if asked is None or not plan.ranges:
            return 0
        if plan.if_range and self.headers.get("If-Range") not in (plan.etag, plan.modified):
            return 0
        return int(asked.removeprefix("bytes=").removesuffix("-")) + plan.shift

    def _send(self, plan: Behaviour, start: int) -> None:
        content = plan.body[start:]
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(plan.body) - 1}/*")
        self.send_header("Content-Length", str(len(content)))
        if plan.etag:
            self.send_header("ETag", plan.etag)
        if plan.modified:
            self.send_header("Last-Modified", plan.modified)
        self.end_headers()
        if plan.drops:
            plan.drops -= 1
            content = content[: len(content) // 2]
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Behaviour]:
    monkeypatch.setattr(download, "_PAUSE", 0)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    plan = Behaviour()
    handler = type("PlannedHandler", (Handler,), {"behaviour": plan})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as httpd:
        plan.url = f"http://127.0.0.1:{httpd.server_port}/thing.gz"
        thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield plan
        httpd.shutdown()
        thread.join()


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "raw" / "thing.gz"


def beside(target: Path) -> set[str]:
    return {file.name for file in target.parent.iterdir()} - {target.name}


def leave_partial(
    target: Path, url: str, validator: str = '"one"', content: bytes = BODY[:HALF]
) -> None:
    """Writes the files that a killed download leaves."""
    target.parent.mkdir(parents=True)
    part = target.with_name("thing.gz.part")
    part.write_bytes(content)
    origin = {"url": url, "validator": validator}
    part.with_name("thing.gz.part.json").write_text(json.dumps(origin))


def test_file_is_downloaded_once_and_its_checksum_recorded(server: Behaviour, target: Path) -> None:
    assert fetch_file(server.url, target) == target
    assert fetch_file(server.url, target) == target
    assert target.read_bytes() == BODY
    assert len(server.requests) == 1
    record = target.with_name("thing.gz.sha256")
    assert record.read_text() == f"{hashlib.sha256(BODY).hexdigest()}  thing.gz\n"
    assert beside(target) == {record.name}


def test_file_with_published_md5_needs_no_record(server: Behaviour, target: Path) -> None:
    md5 = hashlib.md5(BODY).hexdigest()
    for _ in range(2):
        fetch_file(server.url, target, md5=md5)
    assert target.read_bytes() == BODY
    assert len(server.requests) == 1
    assert beside(target) == set()


def test_dropped_connection_is_resumed(server: Behaviour, target: Path) -> None:
    server.drops = 2
    fetch_file(server.url, target)
    assert target.read_bytes() == BODY
    assert server.ranges_asked() == [None, f"bytes={HALF}-", f"bytes={HALF + HALF // 2}-"]
    assert server.requests[1]["If-Range"] == '"one"'
    assert beside(target) == {"thing.gz.sha256"}


def test_later_run_resumes_a_killed_one(server: Behaviour, target: Path) -> None:
    leave_partial(target, server.url)
    fetch_file(server.url, target)
    assert target.read_bytes() == BODY
    assert server.ranges_asked() == [f"bytes={HALF}-"]


def test_date_is_the_validator_when_etag_is_weak(server: Behaviour, target: Path) -> None:
    server.etag, server.modified, server.drops = 'W/"x"', "Wed, 01 Jan 2014 00:00:00 GMT", 1
    fetch_file(server.url, target)
    assert target.read_bytes() == BODY
    assert server.requests[1]["If-Range"] == server.modified
    assert server.ranges_asked() == [None, f"bytes={HALF}-"]


def test_starts_over_when_server_sends_no_validator(server: Behaviour, target: Path) -> None:
    server.etag, server.drops = None, 1
    fetch_file(server.url, target)
    assert target.read_bytes() == BODY
    assert server.ranges_asked() == [None, None]


def test_starts_over_when_server_has_no_ranges(server: Behaviour, target: Path) -> None:
    server.ranges, server.drops = False, 1
    fetch_file(server.url, target)
    assert target.read_bytes() == BODY
    assert server.ranges_asked() == [None, f"bytes={HALF}-"]


@pytest.mark.parametrize("if_range", [True, False])
def test_changed_file_is_not_joined_to_the_old_part(
    server: Behaviour, target: Path, if_range: bool
) -> None:
    leave_partial(target, server.url, validator='"zero"', content=b"\0" * HALF)
    server.if_range = if_range
    fetch_file(server.url, target)
    assert target.read_bytes() == BODY


def test_wrong_range_is_not_used(server: Behaviour, target: Path) -> None:
    leave_partial(target, server.url)
    server.shift = 1
    fetch_file(server.url, target)
    assert target.read_bytes() == BODY
    assert server.ranges_asked() == [f"bytes={HALF}-", None]


def test_part_of_another_url_is_not_used(server: Behaviour, target: Path) -> None:
    leave_partial(target, server.url + "?old", content=b"\0" * HALF)
    fetch_file(server.url, target)
    assert target.read_bytes() == BODY
    assert server.ranges_asked() == [None]


@pytest.mark.parametrize("origin", ["", "[]", "{}", '{"url": '])
def test_part_of_unknown_origin_is_not_used(server: Behaviour, target: Path, origin: str) -> None:
    leave_partial(target, server.url, content=b"\0" * HALF)
    target.with_name("thing.gz.part.json").write_text(origin)
    fetch_file(server.url, target)
    assert target.read_bytes() == BODY
    assert server.ranges_asked() == [None]


def test_part_longer_than_the_file_is_discarded(server: Behaviour, target: Path) -> None:
    leave_partial(target, server.url, content=BODY + b"more")
    fetch_file(server.url, target)
    assert target.read_bytes() == BODY
    assert server.ranges_asked() == [f"bytes={len(BODY) + 4}-", None]


def test_busy_server_is_asked_again(server: Behaviour, target: Path) -> None:
    server.statuses = [503, 429]
    fetch_file(server.url, target)
    assert target.read_bytes() == BODY


def test_raises_after_five_dropped_connections(server: Behaviour, target: Path) -> None:
    server.drops = 99
    with pytest.raises(SourceError) as caught:
        fetch_file(server.url, target)
    arrived = target.with_name("thing.gz.part").stat().st_size
    assert str(caught.value) == (
        f"cannot download {server.url} ({arrived} of {len(BODY)} bytes arrived; 5 attempts); "
        f"run again to resume, or fetch it elsewhere and put it at {target}"
    )
    assert len(server.requests) == 5
    assert not target.exists()
    server.drops = 0
    fetch_file(server.url, target)
    assert target.read_bytes() == BODY
    assert server.ranges_asked()[-1] == f"bytes={arrived}-"


def test_raises_naming_url_and_target_when_server_lacks_the_file(
    server: Behaviour, target: Path
) -> None:
    server.statuses = [404]
    with pytest.raises(SourceError) as caught:
        fetch_file(server.url, target)
    assert str(caught.value) == (
        f"cannot download {server.url} (HTTP 404 Not Found); "
        f"fetch it elsewhere and put it at {target}"
    )
    assert len(server.requests) == 1


def test_raises_naming_url_and_target_when_offline(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def offline(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(socket, "getaddrinfo", offline)
    with pytest.raises(SourceError) as caught:
        fetch_file("http://nowhere.invalid/thing.gz", target)
    assert str(caught.value) == (
        "cannot download http://nowhere.invalid/thing.gz (Name or service not known); "
        f"fetch it elsewhere and put it at {target}"
    )


def test_download_with_wrong_md5_is_deleted(server: Behaviour, target: Path) -> None:
    md5 = hashlib.md5(b"something else").hexdigest()
    with pytest.raises(SourceError) as caught:
        fetch_file(server.url, target, md5=md5)
    found = hashlib.md5(BODY).hexdigest()
    assert str(caught.value) == (
        f"{server.url} arrived with MD5 {found} instead of {md5} and was deleted; "
        f"run again to download {server.url}, or fetch it elsewhere and put it at {target}"
    )
    assert list(target.parent.iterdir()) == []


def test_file_put_there_by_hand_is_accepted(server: Behaviour, target: Path) -> None:
    leave_partial(target, server.url)
    target.write_bytes(b"by hand")
    fetch_file(server.url, target)
    assert target.read_bytes() == b"by hand"
    assert server.requests == []
    assert beside(target) == {"thing.gz.sha256"}
    assert hashlib.sha256(b"by hand").hexdigest() in (
        target.with_name("thing.gz.sha256").read_text()
    )


def test_raises_when_file_put_there_by_hand_has_wrong_md5(server: Behaviour, target: Path) -> None:
    target.parent.mkdir()
    target.write_bytes(b"by hand")
    with pytest.raises(SourceError, match=r"thing\.gz has MD5 \w{32} instead of \w{32} and was"):
        fetch_file(server.url, target, md5=hashlib.md5(BODY).hexdigest())
    assert not target.exists()


def test_damaged_file_is_deleted_and_downloaded_again(server: Behaviour, target: Path) -> None:
    fetch_file(server.url, target)
    target.write_bytes(BODY[:-1] + b"!")
    with pytest.raises(SourceError, match="has changed since it was first used and was deleted"):
        fetch_file(server.url, target)
    assert list(target.parent.iterdir()) == []
    fetch_file(server.url, target)
    assert target.read_bytes() == BODY


def test_incomplete_checksum_record_is_written_again(server: Behaviour, target: Path) -> None:
    fetch_file(server.url, target)
    record = target.with_name("thing.gz.sha256")
    whole = record.read_text()
    record.write_text(whole[:20])
    fetch_file(server.url, target)
    assert record.read_text() == whole


def test_file_can_be_replaced_after_its_checksum_is_forgotten(
    server: Behaviour, target: Path
) -> None:
    fetch_file(server.url, target)
    forget_checksum(target)
    forget_checksum(target)
    target.write_bytes(b"better")
    assert fetch_file(server.url, target).read_bytes() == b"better"


def test_checksum_of_a_removed_file_does_not_apply_to_its_replacement(
    server: Behaviour, target: Path
) -> None:
    fetch_file(server.url, target)
    target.unlink()
    server.statuses = [404]
    with pytest.raises(SourceError, match="put it at"):
        fetch_file(server.url, target)
    target.write_bytes(b"by hand")
    assert fetch_file(server.url, target).read_bytes() == b"by hand"


def test_concurrent_calls_download_once(server: Behaviour, target: Path) -> None:
    threads = [threading.Thread(target=fetch_file, args=(server.url, target)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert target.read_bytes() == BODY
    assert len(server.requests) == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_raises_one_sentence_when_disk_is_full(
    server: Behaviour, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target.parent.mkdir()
    target.with_name("thing.gz.part").symlink_to("/dev/full")
    monkeypatch.setattr(download, "_discard", lambda part: None)  # would remove the symlink
    with pytest.raises(SourceError) as caught:
        fetch_file(server.url, target)
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.__cause__.errno == errno.ENOSPC
    assert str(caught.value) == (
        f"cannot store {target} (No space left on device); make room for it and run again, "
        "or set MASKGR_CACHE to another folder"
    )


def test_pauses_grow_between_attempts(
    server: Behaviour, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(download, "_PAUSE", 0.5)
    monkeypatch.setattr(time, "sleep", pauses.append)
    server.statuses = [500, 500, 500]
    fetch_file(server.url, target)
    assert pauses == [0.5, 1.0, 2.0]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_shown_on_a_terminal(
    server: Behaviour, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("COLUMNS", "100")
    fetch_file(server.url, target)
    assert "thing.gz" in screen.getvalue()
    assert "10.2/10.2 kB" in screen.getvalue()


def test_progress_can_be_turned_off(
    server: Behaviour, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    fetch_file(server.url, target, progress=False)
    assert screen.getvalue() == ""


def test_no_progress_is_shown_without_a_terminal(
    server: Behaviour, target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fetch_file(server.url, target)
    assert capsys.readouterr() == ("", "")


def test_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    monkeypatch.setenv("MASKGR_CACHE", "~/mine")
    assert cache_folder() == Path("/home/someone/mine")
    monkeypatch.setenv("MASKGR_CACHE", "")
    assert cache_folder() == Path("/caches/maskgr")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path("/home/someone/.cache/maskgr")
