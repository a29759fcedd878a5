"""Scores of a whole catalogue: the exact softmax loss and the best items, beside plain torch.

    python benchmarks/scoring.py [--items 12000 1000000] [--rows 1024] [--width 256] [--quick]

`loss` is forward and backward of the cross-entropy with a learned table; plain is
`functional.cross_entropy(queries @ table.T, targets)`. `top` is the ten best items of each row with
their log-probabilities; plain is `(queries @ table.T).log_softmax(1).topk(10)`. Plain runs beside
the smallest catalogue alone, in turns with ours, and the results are compared; for larger
catalogues the size of its scores is computed. Memory is the peak that the first call adds, without
the table's gradient, which any implementation needs: it should not grow with the catalogue. Each
call runs in a process of its own, so that its peak memory is its own.
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

from maskgr.nn.scoring import best_items
from maskgr.nn.softmax import catalogue_cross_entropy

WORKS = ("loss", "top")
ROUNDS = 3  # processes of each side at the smallest catalogue
TOP = 10


def main() -> None:
    options = parse()
    if options.child:
        print(json.dumps(measure(options, options.items[0])))
        return
    report = {name: getattr(options, name) for name in ("rows", "width", "threads")}
    report |= {work: compare(options, work) for work in WORKS}
    print(json.dumps(report, indent=2) if options.json else table(report))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--items", type=int, nargs="+", default=[12_000, 1_000_000])
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    parser.add_argument("--seconds", type=float, default=2.0, help="that a process measures for")
    parser.add_argument("--quick", action="store_true", help="small sizes: does it run?")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--work", choices=WORKS, help=argparse.SUPPRESS)
    parser.add_argument("--child", choices=("ours", "plain"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quick:
        options.items, options.rows, options.width, options.seconds = [500, 2000], 64, 16, 0.05
    return options


def compare(options: argparse.Namespace, work: str) -> dict[str, Any]:
    smallest, *larger = sorted(options.items)
    turns = [
        (run(options, work, "ours", smallest), run(options, work, "plain", smallest))
        for _ in range(1 if options.quick else ROUNDS)
    ]
    for ours, plain in turns:
        assert abs(ours["result"] / plain["result"] - 1) < 1e-5, "the two results differ"
    small, plain = (middle([turn[side] for turn in turns]) for side in (0, 1))
    rows = [small, *(run(options, work, "ours", items) for items in larger)]
    for row in rows:
        row["plain_scores_bytes"] = 4 * options.rows * row["items"]
        row["peak_over_smallest"] = row["peak_bytes"] / max(small["peak_bytes"], 1)
        row["cell_time_over_smallest"] = row["cell_nanoseconds"] / small["cell_nanoseconds"]
    return {
        "sizes": rows,
        "plain": plain,
        "plain_peak_over_ours": plain["peak_bytes"] / max(small["peak_bytes"], 1),
        "plain_time_over_ours": statistics.median(
            plain["seconds"] / ours["seconds"] for ours, plain in turns
        ),
    }


def middle(runs: list[dict[str, Any]]) -> dict[str, Any]:
    return {key: statistics.median(found[key] for found in runs) for key in runs[0]}


def run(options: argparse.Namespace, work: str, side: str, items: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--work", work, "--child", side, "--items", str(items)]
    for name in ("rows", "width", "threads", "seconds"):
        command += [f"--{name}", str(getattr(options, name))]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def measure(options: argparse.Namespace, items: int) -> dict[str, Any]:
    torch.set_num_threads(options.threads)
    work = loss if options.work == "loss" else top
    work(options.child, *problem(TOP, TOP, options.width))  # what torch loads when first used
    queries, table, targets = problem(options.rows, items, options.width)
    before = peak_bytes()
    result = work(options.child, queries, table, targets)
    peak = peak_bytes() - before - (table.nbytes if table.grad is not None else 0)
    seconds: list[float] = []
    while sum(seconds) < options.seconds:
        table.grad = queries.grad = None
        start = time.perf_counter()
        work(options.child, queries, table, targets)
        seconds.append(time.perf_counter() - start)
    median = statistics.median(seconds)
    return {
        "items": items,
        "result": result,
        "peak_bytes": peak,
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


def loss(side: str, queries: Tensor, table: Tensor, targets: Tensor) -> float:
    """The mean loss, as training takes it, and its gradients."""
    if side == "plain":
        mean = functional.cross_entropy(queries @ table.T, targets)
    else:
        mean = catalogue_cross_entropy(queries, table, targets) / len(queries)
    mean.backward()
    return mean.item()


@torch.no_grad()
def top(side: str, queries: Tensor, table: Tensor, targets: Tensor) -> float:
    """The sum of the best items' log-probabilities."""
    if side == "plain":
        return float((queries @ table.T).log_softmax(1).topk(TOP).values.sum())
    return float(best_items(queries, table, TOP)[1].sum())


def peak_bytes() -> int:
    unit = 1 if sys.platform == "darwin" else 1024  # what ru_maxrss counts in
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def table(report: dict[str, Any]) -> str:
    lines = [
        f"{report['rows']} rows, width {report['width']}, {report['threads']} thread(s)",
        f"{'':6}{'items':>12}{'peak, MB':>10}{'plain scores, MB':>18}{'s a call':>10}"
        f"{'ns a cell':>11}{'peak / smallest':>17}{'cell / smallest':>17}",
    ]
    for work in WORKS:
        for row in report[work]["sizes"]:
            lines.append(
                f"{work:6}{row['items']:12,}{row['peak_bytes'] / 1e6:10.1f}"
                f"{row['plain_scores_bytes'] / 1e6:18.1f}{row['seconds']:10.3f}"
                f"{row['cell_nanoseconds']:11.2f}{row['peak_over_smallest']:17.2f}"
                f"{row['cell_time_over_smallest']:17.2f}"
            )
    for work in WORKS:
        plain = report[work]["plain"]
        lines.append(
            f"{work} at {plain['items']:,} items: plain takes {plain['peak_bytes'] / 1e6:.1f} MB, "
            f"{report[work]['plain_peak_over_ours']:.1f} times ours, and {plain['seconds']:.3f} s, "
            f"{report[work]['plain_time_over_ours']:.2f} times ours"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
