"""Dense retrieval: the cross-entropy over a whole catalogue, and the low-rank head.

    python benchmarks/dense.py [--items 12000 1000000] [--rows 1024] [--width 128] [--json]

One step is forward and backward with a learned table. Memory is the peak that the first step adds,
beyond the table and its gradient, which no way of doing it can do without: it should not grow with
the catalogue. `plain` is `functional.cross_entropy(queries @ table.T, targets)`; it runs beside
the smallest catalogue alone, in turns with ours, and its loss is checked against ours. For the
others its logits are computed, not made. Each step runs in a process of its own, so that its peak
memory is its own. The head is the paper's (5 digits of 128 to 256 to 4096 entries), of rank 32 and
of full rank, forward and backward, in turns.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from maskgr.config import DenseConfig
from maskgr.models.dense import DenseHead
from maskgr.nn.softmax import catalogue_cross_entropy

ROUNDS = 3  # processes of each side at the smallest catalogue
SECONDS = 2.0  # that a process repeats its step for


def main() -> None:
    options = parse()
    if options.child:
        print(json.dumps(measure(options, options.items[0])))
        return
    report = compare(options, sorted(options.items))
    print(json.dumps(report, indent=2) if options.json else table(report))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--items", type=int, nargs="+", default=[12_000, 1_000_000])
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--child", choices=("ours", "plain"), help=argparse.SUPPRESS)
    return parser.parse_args()


def compare(options: argparse.Namespace, sizes: list[int]) -> dict[str, Any]:
    turns = [
        (run(options, "ours", sizes[0]), run(options, "plain", sizes[0])) for _ in range(ROUNDS)
    ]
    for ours, plain in turns:
        assert abs(ours["loss"] / plain["loss"] - 1) < 1e-5, "the two losses differ"
    small, plain = (middle([turn[side] for turn in turns]) for side in (0, 1))
    rows = [small, *(run(options, "ours", items) for items in sizes[1:])]
    for row in rows:
        row["plain_logits_bytes"] = 4 * options.rows * row["items"]
        row["peak_over_smallest"] = row["peak_bytes"] / small["peak_bytes"]
        row["cell_time_over_smallest"] = row["cell_nanoseconds"] / small["cell_nanoseconds"]
    report = {name: getattr(options, name) for name in ("rows", "width", "threads")}
    return report | {
        "head": heads(options),
        "sizes": rows,
        "plain": plain,
        "plain_peak_over_ours": plain["peak_bytes"] / small["peak_bytes"],
        "plain_time_over_ours": statistics.median(
            plain["seconds"] / ours["seconds"] for ours, plain in turns
        ),
    }


def heads(options: argparse.Namespace) -> dict[str, Any]:
    """Operations, parameters and time of the paper's head, low rank over full."""
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    made = {rank: DenseHead(DenseConfig(hidden=256, rank=rank), 640, 4096) for rank in (32, 0)}
    states = torch.randn(options.rows, 640)
    seconds: dict[int, list[float]] = {rank: [] for rank in made}
    for turn in range(1 + 5 * ROUNDS):
        for rank, head in made.items():
            head.zero_grad()
            start = time.perf_counter()
            head(states).sum().backward()
            if turn:  # the first is for warming up
                seconds[rank].append(time.perf_counter() - start)
    low, full = made[32], made[0]
    return {
        "flops": low.flops,
        "full_rank_flops": full.flops,
        "flops_ratio": low.flops / full.flops,
        "parameters_ratio": sum(p.numel() for p in low.parameters())
        / sum(p.numel() for p in full.parameters()),
        "time_ratio": statistics.median(
            one / other for one, other in zip(seconds[32], seconds[0], strict=True)
        ),
    }


def middle(runs: list[dict[str, Any]]) -> dict[str, Any]:
    return {key: statistics.median(found[key] for found in runs) for key in runs[0]}


def run(options: argparse.Namespace, side: str, items: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", side, "--items", str(items)]
    for name in ("rows", "width", "threads"):
        command += [f"--{name}", str(getattr(options, name))]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def measure(options: argparse.Namespace, items: int) -> dict[str, Any]:
    torch.set_num_threads(options.threads)
    step(options.child, *problem(8, 8, options.width))  # what torch loads when first used
    queries, table, targets = problem(options.rows, items, options.width)
    before = peak_bytes()
    loss = step(options.child, queries, table, targets)
    peak = peak_bytes() - before - table.nbytes  # the table itself was there before
    seconds: list[float] = []
    while sum(seconds) < SECONDS:
        table.grad = queries.grad = None
        start = time.perf_counter()
        step(options.child, queries, table, targets)
        seconds.append(time.perf_counter() - start)
    median = statistics.median(seconds)
    return {
        "items": items,
        "loss": loss,
        "peak_bytes": peak,
        "table_bytes": table.nbytes,
        "seconds": median,
        "cell_nanoseconds": 1e9 * median / (options.rows * items),
    }


def problem(rows: int, items: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, table and targets; scores have a standard deviation of 1."""
    generator = torch.Generator().manual_seed(0)
    queries = torch.randn(rows, width, generator=generator)
    table = torch.randn(items, width, generator=generator).mul_(width**-0.5)
    targets = torch.randint(items, (rows,), generator=generator)
    return queries.requires_grad_(), table.requires_grad_(), targets


def step(side: str, queries: Tensor, table: Tensor, targets: Tensor) -> float:
    """The mean loss, as training would take it, and its gradients."""
    if side == "plain":
        loss = functional.cross_entropy(queries @ table.T, targets)
    else:
        loss = catalogue_cross_entropy(queries, table, targets) / len(queries)
    loss.backward()
    return loss.item()


def peak_bytes() -> int:
    unit = 1 if sys.platform == "darwin" else 1024  # what ru_maxrss counts in
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def table(report: dict[str, Any]) -> str:
    lines = [
        f"{report['rows']} rows, width {report['width']}, {report['threads']} thread(s); peak "
        "beyond table and gradient",
        f"{'items':>12}{'':>7}{'peak, MB':>10}{'logits, MB':>12}{'s a step':>10}{'ns a cell':>11}"
        f"{'peak / smallest':>17}{'cell / smallest':>17}",
    ]
    for row in report["sizes"]:
        lines.append(
            f"{row['items']:12,}{'ours':>7}{row['peak_bytes'] / 1e6:10.1f}{'':12}"
            f"{row['seconds']:10.2f}{row['cell_nanoseconds']:11.1f}"
            f"{row['peak_over_smallest']:17.2f}{row['cell_time_over_smallest']:17.2f}"
        )
        lines.append(f"{'':12}{'plain':>7}{'':10}{row['plain_logits_bytes'] / 1e6:12.1f}")
    plain = report["plain"]
    lines.append(
        f"at {plain['items']:,} items plain takes {plain['peak_bytes'] / 1e6:.1f} MB, "
        f"{report['plain_peak_over_ours']:.1f} times ours, and {plain['seconds']:.2f} s, "
        f"{report['plain_time_over_ours']:.2f} times ours"
    )
    head = report["head"]
    lines.append(
        f"low-rank head over full rank: {head['flops_ratio']:.2f} of the operations, "
        f"{head['parameters_ratio']:.2f} of the parameters, {head['time_ratio']:.2f} of the time"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
