"""The service on loopback: requests per second, latency, CPU time, overload, memory.

    python benchmarks/serve.py [RUN] [--seconds 10] [--clients 64] [--duration 600] [--quick]
        [--json]

`maskgr serve` runs in a process of its own; this one asks. RUN is a trained run; without one a
model of preset `tiny` is trained for a few steps on the generated shop (its speed does not depend
on what it learned).

(a) As many requests as `--clients` connections can make, in one step and digit by digit, answered
    together (`--batch 64`) and one at a time (`--batch 1`);
(b) CPU time of the service for a request to a popularity model, less that of the model itself;
(c) requests at half, one and four times the rate that (a) held, at times of a Poisson process:
    latency counts from the time at which a request is due, so a client that falls behind is seen;
(d) memory over `--duration` seconds at half the rate.

Everything is bounded: each part by `--seconds` or `--duration`, connections by `CONNECTIONS`, and
the service is ended whatever happens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from maskgr.data.config import SyntheticConfig
from maskgr.data.open import from_shop
from maskgr.data.sequences import Sequences
from maskgr.data.synthetic import generate
from maskgr.evaluation.ranking import Query
from maskgr.models.base import train_config
from maskgr.recommender import Recommender

CONNECTIONS = 900  # more than wait (512) and are answered together (64)
TOP = 10
LOADS = (0.5, 1.0, 4.0)


@dataclass
class Seen:
    """What the answers to one load were."""

    seconds: float = 0.0
    statuses: dict[int, int] = field(default_factory=dict)
    latencies: list[float] = field(default_factory=list)  # of those served, in seconds
    failed: int = 0  # connections that broke, or answers that could not be read

    def note(self, status: int, latency: float) -> None:
        self.statuses[status] = self.statuses.get(status, 0) + 1
        if status == 200:
            self.latencies.append(latency)

    def report(self) -> dict[str, Any]:
        served = self.statuses.get(200, 0)
        cuts = np.percentile(self.latencies, [50, 95, 99]) if served else [float("nan")] * 3
        return {
            "requests": sum(self.statuses.values()) + self.failed,
            "served_per_second": served / self.seconds,
            **{f"p{p}_ms": 1000 * float(cut) for p, cut in zip((50, 95, 99), cuts, strict=True)},
            "refused_429": self.statuses.get(429, 0),
            "other_errors": self.failed
            + sum(n for status, n in self.statuses.items() if status not in (200, 429)),
        }


class Connection:
    """HTTP/1.1 as little as needed, so that asking costs less than answering."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.reader: asyncio.StreamReader | None = None
        self.writer: asyncio.StreamWriter | None = None

    async def ask(self, request: bytes) -> int:
        """The status of the answer."""
        if self.writer is None:
            self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port)
        assert self.reader is not None
        self.writer.write(request)
        head = await self.reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head)
        assert length is not None
        await self.reader.readexactly(int(length[1]))
        if b"connection: close" in head:
            self.close()
        return int(head[9:12])

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()
            self.writer = None


def posted(body: dict[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    head = (
        "POST /v1/recommend HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


async def as_fast_as_possible(port: int, requests: list[bytes], clients: int, limit: float) -> Seen:
    """Each client asks again once it is answered."""
    seen, start = Seen(), time.perf_counter()

    async def client(number: int) -> None:
        connection, place = Connection(port), number
        while (now := time.perf_counter()) - start < limit:
            try:
                status = await connection.ask(requests[place % len(requests)])
                seen.note(status, time.perf_counter() - now)
            except (OSError, EOFError, asyncio.IncompleteReadError):
                seen.failed += 1
                connection.close()
            place += clients
        connection.close()

    await asyncio.gather(*(client(number) for number in range(clients)))
    seen.seconds = time.perf_counter() - start
    return seen


async def at_rate(port: int, requests: list[bytes], rate: float, limit: float) -> Seen:
    """Requests come at random times, `rate` a second on average, whether or not others wait."""
    rng, seen, start = random.Random(0), Seen(), time.perf_counter()
    idle = [Connection(port) for _ in range(CONNECTIONS)]
    free = asyncio.Semaphore(CONNECTIONS)

    async def one(request: bytes, due: float) -> None:
        connection = idle.pop()
        try:
            seen.note(await connection.ask(request), time.perf_counter() - due)
        except (OSError, EOFError, asyncio.IncompleteReadError):
            seen.failed += 1
            connection.close()
        idle.append(connection)
        free.release()

    due, tasks, number = start, set[asyncio.Task[None]](), 0
    while due - start < limit and time.perf_counter() - start < 2 * limit:
        if (wait := due - time.perf_counter()) > 0:
            await asyncio.sleep(wait)
        await free.acquire()
        task = asyncio.create_task(one(requests[number % len(requests)], due))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        due, number = due + rng.expovariate(rate), number + 1
    await asyncio.gather(*tasks)
    seen.seconds = time.perf_counter() - start
    for connection in idle:
        connection.close()
    return seen


@contextmanager
def service(runs: list[str], *options: str) -> Iterator[int]:
    """The port of a service in its own process."""
    command = [sys.executable, "-m", "maskgr", "serve", *runs, "--port", "0", *options]
    with TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with log.open("w") as stream:
            process = subprocess.Popen(command, stderr=stream)
        try:
            end = time.monotonic() + 120
            while not (found := re.search(r"http://\S+:(\d+)\n", log.read_text())):
                if process.poll() is not None or time.monotonic() > end:
                    raise SystemExit(f"the service did not start: {log.read_text()}")
                time.sleep(0.1)
            port = int(found[1])
            metrics(port)  # answers once it is ready
            yield port
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()


def metrics(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


def batch_size(before: dict[str, float], after: dict[str, float]) -> float:
    count, total = "maskgr_batch_size_count", "maskgr_batch_size_sum"
    return (after[total] - before[total]) / max(after[count] - before[count], 1)


def throughput(runs: list[str], bodies: dict[str, list[bytes]], options: Any) -> dict[str, Any]:
    """(a)"""
    report: dict[str, Any] = {}
    for batch in ("64", "1"):
        with service(runs, "--batch", batch) as port:
            for way, requests in bodies.items():
                asyncio.run(as_fast_as_possible(port, requests, 8, options.seconds / 5))  # warm
                before = metrics(port)
                seen = asyncio.run(
                    as_fast_as_possible(port, requests, options.clients, options.seconds)
                )
                report.setdefault(way, {})[batch] = {
                    **seen.report(),
                    "batch_size": batch_size(before, metrics(port)),
                }
    for way in bodies:
        own = report[way]
        own["batched_over_alone"] = own["64"]["served_per_second"] / own["1"]["served_per_second"]
    return report


def overhead(
    port: int, popularity: Recommender, histories: list[list[str]], options: Any
) -> dict[str, float]:
    """(b): milliseconds of CPU, of all threads."""
    requests = [posted({"history": h, "top": TOP, "model": "popularity"}) for h in histories]
    asyncio.run(as_fast_as_possible(port, requests, 8, options.seconds / 5))
    cpu, before = "process_cpu_seconds_total", metrics(port)
    seen = asyncio.run(as_fast_as_possible(port, requests, 8, options.seconds))
    after = metrics(port)
    served = seen.statuses.get(200, 1)
    whole = (after[cpu] - before[cpu]) / served
    rows = [popularity.numbers(history) for history in histories]
    size = max(round(batch_size(before, after)), 1)
    start = time.process_time()
    for place in range(0, len(rows), size):
        own = Sequences.of(rows[place : place + size])
        popularity.model.rank(Query(own, TOP, None, own))
    model = (time.process_time() - start) / len(rows)
    return {
        "service_cpu_ms": 1000 * whole,
        "model_cpu_ms": 1000 * model,
        "overhead_cpu_ms": 1000 * (whole - model),
    }


def memory(port: int, requests: list[bytes], rate: float, duration: float) -> dict[str, Any]:
    """(d): megabytes at the start, at each tenth of the time, and how much they grew since the
    first tenth."""
    used = [metrics(port)["process_resident_memory_bytes"] / 1e6]
    for _ in range(10):
        asyncio.run(at_rate(port, requests, rate, duration / 10))
        used.append(metrics(port)["process_resident_memory_bytes"] / 1e6)
    return {"seconds": duration, "megabytes": used, "grew": used[-1] - used[1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", nargs="?")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--duration", type=float, default=600.0)
    parser.add_argument("--quick", action="store_true", help="only check that it runs")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.quick:
        options.seconds, options.clients, options.duration = 0.5, 8, 1.0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the service is ended, too
    with TemporaryDirectory(prefix="maskgr-serve-") as folder:
        report = measure(options, Path(folder))
    print(json.dumps(report, indent=2) if options.json else table(report))


def measure(options: Any, folder: Path) -> dict[str, Any]:
    shop = from_shop(generate(SyntheticConfig(users=500 if options.quick else 4000)))
    if options.run:
        run, recommender = options.run, Recommender.load(options.run)
    else:
        run = str(folder / "model")
        recommender = Recommender.train(shop, config=train_config("tiny", ["fit.steps=20"]))
        recommender.save(run)
    popularity = Recommender.train(shop, model="popularity")
    popularity.save(folder / "popularity")
    users = recommender.users.ids[:400].to_list()
    histories = [recommender.history_of(user)[-20:] for user in users]
    bodies = {
        f"{steps} steps": [posted({"history": h, "top": TOP, "steps": steps}) for h in histories]
        for steps in (1, recommender.model.levels)  # type: ignore[attr-defined]
    }
    way, requests = list(bodies.items())[-1]
    models = [f"shop={run}"]
    report: dict[str, Any] = {"throughput": throughput(models, bodies, options)}
    rate = report["throughput"][way]["64"]["served_per_second"]
    known = [shop.item_ids.gather(shop.histories[n][-20:]).to_list() for n in range(400)]
    with service([*models, f"popularity={folder / 'popularity'}"]) as port:
        report["http"] = overhead(port, popularity, known, options)
        report["load"] = {"way": way, "rate": rate}
        for load in LOADS:
            seen = asyncio.run(at_rate(port, requests, load * rate, options.seconds))
            report["load"][str(load)] = seen.report()
        report["memory"] = memory(port, requests, rate / 2, options.duration)
    return report


def table(report: dict[str, Any]) -> str:
    names = ("served/s", "p50, ms", "p95, ms", "p99, ms")
    lines = [f"{'':26}" + "".join(f"{name:>10}" for name in names) + f"{'429':>8}{'errors':>8}"]

    def row(name: str, own: dict[str, Any]) -> str:
        return (
            f"{name:26}{own['served_per_second']:10.1f}{own['p50_ms']:10.1f}{own['p95_ms']:10.1f}"
            f"{own['p99_ms']:10.1f}{own['refused_429']:8}{own['other_errors']:8}"
        )

    for way, own in report["throughput"].items():
        lines += [row(f"{way}, together", own["64"]), row(f"{way}, one at a time", own["1"])]
        lines.append(
            f"  together is {own['batched_over_alone']:.2f} times as fast, "
            f"{own['64']['batch_size']:.1f} requests at once"
        )
    load = report["load"]
    for share in LOADS:
        lines.append(row(f"{load['way']}, {share:g} x {load['rate']:.0f}/s", load[str(share)]))
    http, used = report["http"], report["memory"]
    lines += [
        f"a request costs {http['service_cpu_ms']:.2f} ms of CPU beside a model that costs "
        f"{http['model_cpu_ms']:.2f}: overhead {http['overhead_cpu_ms']:.2f}",
        f"memory over {used['seconds']:.0f} s: "
        + ", ".join(f"{m:.0f}" for m in used["megabytes"])
        + f" MB; {used['grew']:+.1f} MB since the first tenth",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
