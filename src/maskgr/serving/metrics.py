"""What /metrics shows, in Prometheus's format."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    ProcessCollector,
    generate_latest,
)

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
WAITS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
SIZES = (1, 2, 4, 8, 16, 32, 64)


class Metrics:
    """A registry of its own, so that two services in one process do not mix."""

    def __init__(self) -> None:
        own = self.registry = CollectorRegistry()
        ProcessCollector(registry=own)
        GCCollector(registry=own)
        self.requests = Counter(
            "maskgr_requests", "Answers", ["route", "method", "status"], registry=own
        )
        self.duration = Histogram(
            "maskgr_request_duration_seconds",
            "From the request's first byte to the answer's last",
            ["route"],
            buckets=SECONDS,
            registry=own,
        )
        self.queue = Gauge("maskgr_queue_length", "Requests that wait for the model", registry=own)
        self.waited = Histogram(
            "maskgr_queue_wait_seconds", "Time spent waiting", buckets=WAITS, registry=own
        )
        self.sizes = Histogram(
            "maskgr_batch_size", "Requests answered together", buckets=SIZES, registry=own
        )
        self.model = Gauge(
            "maskgr_model_info", "1 for each model", ["name", "version", "kind"], registry=own
        )
        self.reloads = Counter("maskgr_reloads", "Reloads", ["model", "result"], registry=own)

    def batch(self, size: int, waited: Sequence[float]) -> None:
        self.sizes.observe(size)
        for seconds in waited:
            self.waited.observe(seconds)

    def text(self) -> bytes:
        return generate_latest(self.registry)
