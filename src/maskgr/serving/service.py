"""What a running service holds: its models, the batcher, keys and limits."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from maskgr.errors import ArtefactError, MaskGRError, RequestError
from maskgr.serving.batching import LARGEST, QUEUE, WINDOW, Batcher
from maskgr.serving.logs import log
from maskgr.serving.metrics import Metrics
from maskgr.serving.problems import ProblemError
from maskgr.serving.served import Served


@dataclass(frozen=True)
class ServiceConfig:
    keys: tuple[str, ...] = ()
    """Keys that may ask; none: everybody may."""
    admin_keys: tuple[str, ...] = ()
    """Keys that may reload; none: nobody may."""
    root: Path | None = None
    """The folder below which models may be reloaded from."""
    body_bytes: int = 2_000_000
    seconds: float = 10.0
    """Time limit of a request."""
    window: float = WINDOW
    """Seconds that a request waits for others to be answered with."""
    largest: int = LARGEST
    """Requests answered together at most."""
    queue: int = QUEUE
    """Requests that wait at most; more are refused."""


class Keys:
    """Compares digests in constant time, with every key, so that time tells nothing."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key.encode()) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def hold(self, given: bytes) -> bool:
        own = _digest(given)
        return bool(sum([hmac.compare_digest(own, digest) for digest in self._digests]))


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


class Service:
    def __init__(self, models: Sequence[Served], config: ServiceConfig | None = None) -> None:
        assert models
        self.config = config = config or ServiceConfig()
        self.models = {served.name: served for served in models}
        if len(self.models) < len(models):
            raise RequestError(
                f"two models have one name ({', '.join(m.name for m in models)}); give each its "
                "own: NAME=RUN"
            )
        self.default = models[0].name
        self.keys, self.admin_keys = Keys(config.keys), Keys(config.admin_keys)
        self.draining = False
        self.metrics = Metrics()
        self.batcher = Batcher(
            window=config.window,
            largest=config.largest,
            queue=config.queue,
            observer=self.metrics,
        )
        self.metrics.queue.set_function(lambda: len(self.batcher))
        for served in models:
            self._show(served, 1)
        self._reloading = asyncio.Lock()

    def model(self, name: str | None, pointer: str) -> Served:
        """The model of this name, as it is now."""
        if name is None:
            return self.models[self.default]
        if name not in self.models:
            known = ", ".join(self.models)
            raise ProblemError.at(pointer, f"there is no model {name!r}; the models are {known}")
        return self.models[name]

    def deadline(self, start: float) -> float:
        return start + self.config.seconds

    async def reload(self, name: str | None, path: str | None) -> dict[str, Any]:
        """Loads beside the old model, which answers until the new one is warm; the old one stays
        where that fails."""
        start, previous = time.monotonic(), self.model(name, "#/model")
        if self._reloading.locked():
            raise ProblemError(409, "another reload is under way; try again when it is done")
        async with self._reloading:
            try:
                folder = self._folder(previous, path)
                served = await asyncio.to_thread(Served.load, previous.name, folder)
            except Exception as error:
                self.metrics.reloads.labels(previous.name, "failed").inc()
                log("reload failed", model=previous.name, path=path, error=str(error))
                if isinstance(error, MaskGRError | OSError):
                    raise ProblemError.at("#/path", f"{error}; the old model stays") from error
                raise
            self.models[previous.name] = served
        self._show(previous, 0)
        self._show(served, 1)
        self.metrics.reloads.labels(served.name, "done").inc()
        log("reloaded", model=served.name, version=served.version, before=previous.version)
        return {
            "model": served.about,
            "previous": previous.about,
            "took_ms": round(1000 * (time.monotonic() - start), 3),
        }

    def _folder(self, previous: Served, path: str | None) -> Path:
        if path is None:
            if previous.path is None:
                raise ArtefactError("the model came from no folder; give a path")
            return previous.path
        if self.config.root is None or "\0" in path:
            raise ArtefactError("there is no folder to load from; leave path out")
        root = self.config.root.resolve()
        folder = (root / path).resolve()  # links are followed, so none leads outside
        if not folder.is_relative_to(root):
            raise ArtefactError(f"{path} is not below the folder of models; give a path below it")
        return folder

    def _show(self, served: Served, value: int) -> None:
        labels = (served.name, served.version, served.recommender.config.name)
        if value:
            self.metrics.model.labels(*labels).set(1)
        else:
            self.metrics.model.remove(*labels)
