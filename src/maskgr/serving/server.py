"""Runs the service until SIGTERM: not ready, what was asked is answered, exit code 0."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Iterator

import uvicorn

from maskgr.serving.app import create_app
from maskgr.serving.logs import log
from maskgr.serving.service import Service

DRAIN = 1.0  # seconds in which connections that are open learn that they shall go elsewhere
FINISH = 30  # seconds for what was asked before


class Server(uvicorn.Server):
    """uvicorn ends at once for new connections, and ends by the signal; ours announces it first."""

    def __init__(self, service: Service, host: str, port: int) -> None:
        super().__init__(
            uvicorn.Config(
                create_app(service),
                host=host,
                port=port,
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=FINISH,
            )
        )
        self.service = service

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


def serve(service: Service, host: str, port: int) -> None:
    server = Server(service, host, port)
    log("starting", host=host, port=port, models=[m.about for m in service.models.values()])
    server.run()
    log("stopped")
