"""The catalogue index against scanning the catalogue for each beam: time and memory.

    python benchmarks/catalogue.py [--items 10 12000 1000000 10000000] [--quick] [--json]

Digits are drawn Zipf-like at each level, so that some runs are long and most are short. Beams are
random items with a random subset of their digits revealed, the subset's size drawn first, so that
all stages of decoding weigh the same; the question is which codes remain at another level.
`excluding` asks the same with 200 items excluded in each row. `scan` compares the revealed columns
of the whole catalogue with one beam at a time, and its answers are checked against the index.
Each size runs in a process of its own, so that its peak memory is its own.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from maskgr.decoding.catalogue import Catalogue

EXCLUDED = 200
SCANNED = 20  # beams that the scan is timed on


def main() -> None:
    options = parse()
    if options.child:
        print(json.dumps(measure(options, options.items[0])))
        return
    rows = [run(options, items) for items in options.items]
    report = {name: getattr(options, name) for name in ("levels", "codes", "beams", "threads")}
    report["sizes"] = rows
    print(json.dumps(report, indent=2) if options.json else table(report))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    sizes = [10, 12_000, 1_000_000, 10_000_000]
    parser.add_argument("--items", type=int, nargs="+", default=sizes)
    parser.add_argument("--levels", type=int, default=4)
    parser.add_argument("--codes", type=int, default=256)
    parser.add_argument("--beams", type=int, default=1000)
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    parser.add_argument("--quick", action="store_true", help="two small sizes: does it run?")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quick:
        options.items, options.beams = [10, 1000], 50
    return options


def run(options: argparse.Namespace, items: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", "--items", str(items)]
    for name in ("levels", "codes", "beams", "threads"):
        command += [f"--{name}", str(getattr(options, name))]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def measure(options: argparse.Namespace, items: int) -> dict[str, Any]:
    torch.set_num_threads(options.threads)
    generator = torch.Generator().manual_seed(0)
    digits = zipf_digits(items, options.levels, options.codes, generator)
    before = peak_bytes()
    start = time.perf_counter()
    index = Catalogue(digits, [options.codes] * options.levels)
    index.prepare([range(length) for length in range(options.levels)])
    prefixes, prefix_bytes = time.perf_counter() - start, index.nbytes
    index.prepare()
    built = {
        "items": items,
        "prefixes_seconds": prefixes,
        "all_seconds": time.perf_counter() - start,
        "prefixes_bytes": prefix_bytes,
        "all_bytes": index.nbytes,
        "peak_bytes": peak_bytes(),
        "peak_bytes_before": before,
    }
    return built | measure_queries(index, digits, options.beams, generator)


def measure_queries(
    index: Catalogue, digits: Tensor, beams: int, generator: torch.Generator
) -> dict[str, Any]:
    items, levels = digits.shape
    columns = digits.T.to(torch.uint8 if max(index.codebook_sizes) <= 256 else torch.int16)
    seen = torch.randint(items, (beams, EXCLUDED), generator=generator)
    excluded = index.exclusions(seen)
    times: dict[str, list[float]] = {"allowed": [], "excluding": [], "scan": []}
    for level in range(levels):
        size = index.codebook_sizes[level]
        rows, known = draw_beams(digits, level, beams, generator)
        answer = index.allowed(level, rows, known)
        for row in range(min(SCANNED, beams)):
            naive = partial(scan, columns, level, size, rows[row], known[row])
            assert naive().equal(answer[row]), "the index and the scan differ"
            times["scan"].append(timed(naive, repeats=3))
        plain = partial(index.allowed, level, rows, known)
        times["allowed"].append(timed(plain) / beams)
        times["excluding"].append(timed(partial(plain, excluded)) / beams)
    means = {f"{name}_microseconds": statistics.mean(t) * 1e6 for name, t in times.items()}
    return means | {"ratio": means["scan_microseconds"] / means["allowed_microseconds"]}


def zipf_digits(items: int, levels: int, codes: int, generator: torch.Generator) -> Tensor:
    """(items, levels) int32; the code of rank r has weight 1 / r^0.8, ranks shuffled a level."""
    columns = []
    for _ in range(levels):
        weights = torch.arange(1, codes + 1).double() ** -0.8
        weights = weights[torch.randperm(codes, generator=generator)]
        edges = weights.cumsum(0) / weights.sum()
        draws = torch.rand(items, generator=generator, dtype=torch.float64)
        columns.append(torch.searchsorted(edges, draws, out_int32=True).clamp(max=codes - 1))
    return torch.stack(columns, dim=1)


def draw_beams(
    digits: Tensor, level: int, beams: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """(beams, levels) digits of random items, and which are revealed; never those of `level`."""
    items, levels = digits.shape
    rows = digits[torch.randint(items, (beams,), generator=generator)].long()
    chances = torch.rand((beams, levels), generator=generator)
    chances[:, level] = 2.0  # comes last, and at most levels - 1 are revealed
    ranks = chances.argsort(dim=1).argsort(dim=1)
    revealed = ranks < torch.randint(levels, (beams, 1), generator=generator)
    return rows.masked_fill(~revealed, -1), revealed


def scan(columns: Tensor, level: int, size: int, row: Tensor, revealed: Tensor) -> Tensor:
    """(codes,) bool, by comparing every item's revealed digits with the beam's."""
    remain = torch.ones(columns.shape[1], dtype=torch.bool)
    for known in revealed.nonzero().squeeze(1).tolist():
        remain &= columns[known] == row[known]
    return torch.bincount(columns[level][remain], minlength=size) > 0


def timed(query: Callable[[], Tensor], repeats: int = 15) -> float:
    """The median time of a query that has run before, in seconds."""
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        query()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def peak_bytes() -> int:
    unit = 1 if sys.platform == "darwin" else 1024  # what ru_maxrss counts in
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def table(report: dict[str, Any]) -> str:
    lines = [
        f"{report['levels']} levels × {report['codes']} codes, {report['beams']} beams with mixed "
        f"subsets revealed, {report['threads']} thread(s)",
        f"{'':>12}{'build, s':>17}{'bytes an item':>17}{'peak':>8}{'µs a beam and step':>29}",
        f"{'items':>12}{'prefixes':>10}{'all':>7}{'prefixes':>10}{'all':>7}{'GB':>8}"
        f"{'allowed':>9}{'excluding':>10}{'scan':>10}{'scan / allowed':>16}",
    ]
    for row in report["sizes"]:
        items = row["items"]
        lines.append(
            f"{items:12,}{row['prefixes_seconds']:10.2f}{row['all_seconds']:7.2f}"
            f"{row['prefixes_bytes'] / items:10.0f}{row['all_bytes'] / items:7.0f}"
            f"{row['peak_bytes'] / 1e9:8.2f}{row['allowed_microseconds']:9.1f}"
            f"{row['excluding_microseconds']:10.1f}{row['scan_microseconds']:10.1f}"
            f"{row['ratio']:16.1f}"
        )
    before = max(row["peak_bytes_before"] for row in report["sizes"]) / 1e9
    lines.append(f"of the peak, torch and drawing the digits take up to {before:.2f} GB")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
