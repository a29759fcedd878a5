"""Runs the service until SIGTERM: not ready, what was asked is answered, exit code 0."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import threading
from collections.abc import Iterator

import uvicorn

from maskgr.errors import RequestError
from maskgr.serving.app import create_app
from maskgr.serving.logs import log
from maskgr.serving.service import Service

DRAIN = 1.0  # seconds in which connections that are open learn that they shall go elsewhere
FINISH = 30  # seconds for what was asked before
# Seconds that an idle connection stays open, longer than clients and proxies keep theirs: one that
# is closed here while a request is on its way is an error there.
IDLE = 75
BACKLOG = 2048  # connections that wait to be accepted


class Server(uvicorn.Server):
    """uvicorn ends at once for new connections, and ends by the signal; ours announces it first."""

    def __init__(self, service: Service) -> None:
        super().__init__(
            uvicorn.Config(
                create_app(service),
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=IDLE,
                timeout_graceful_shutdown=FINISH,
            )
        )
        self.service = service

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        log("ready", models=[served.about for served in self.service.models.values()])

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():  # it gets no signals
            yield
            return
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._drain)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    def _drain(self) -> None:
        if self.service.draining:  # asked twice: at once
            self.force_exit = self.should_exit = True
            return
        self.service.draining = True
        log("draining")
        asyncio.get_running_loop().call_later(DRAIN, setattr, self, "should_exit", True)


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens; port 0 is any free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or error
        raise RequestError(
            f"cannot listen at {host}, port {port} ({why}); give another --host or --port"
        ) from None


def serve(service: Service, where: socket.socket) -> None:
    """Until SIGTERM or SIGINT."""
    Server(service).run(sockets=[where])
    log("stopped")
