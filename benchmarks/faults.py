"""What happens when things break: kills, damaged files, full disks, too little memory.

    python benchmarks/faults.py [--only kills,tampering,limits] [--kills 1000] [--minutes 120]
                                [--seed 0] [--quick] [--json]

`--only` also takes commands: train, update, sids, recommend, add-items, export, reload. Exit code 1
where anything happened that may not happen. Processes run one at a time (a training in two
processes: two), each bounded in memory; needs Linux, and root for the full disk.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

# Before anything is imported that reads them.
os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", POLARS_MAX_THREADS="1")
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")
os.environ["MASKGR_CACHE"] = "cache"  # in the current folder of each command

from breaking import limits, tampering
from breaking.children import preload
from breaking.kills import SHARES, Breaker, kill_all

PARTS = ("kills", "tampering", "limits")
COMMANDS = sorted({name.split(",")[0] for name in SHARES})


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default=",".join(PARTS), help="parts, or commands to kill")
    parser.add_argument("--kills", type=int, default=1000, help="over all commands")
    parser.add_argument("--minutes", type=float, default=240, help="no further kill after that")
    parser.add_argument("--patience", type=float, default=120, help="seconds that are no hang")
    parser.add_argument("--memory", type=float, default=8, help="GiB of address space of a process")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="where to work; default: a temporary one")
    parser.add_argument("--quick", action="store_true", help="a few of each: does it run?")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    asked = set(options.only.split(","))
    if unknown := asked - {*PARTS, *COMMANDS}:
        parser.error(f"{', '.join(unknown)}: choose from {', '.join((*PARTS, *COMMANDS))}")
    if options.quick:
        options.kills = min(options.kills, 20)
    preload()
    with tempfile.TemporaryDirectory(prefix="maskgr-faults-", dir=options.folder) as folder:
        breaker = Breaker(
            Path(folder),
            options.seed,
            options.patience,
            int(options.memory * 2**30),
            time.monotonic() + 60 * options.minutes,
        )
        breaker.prepare(onnx=bool(asked & {*PARTS, "export"}))
        found = {name: list(own) for name, own in measured(breaker, asked, options)}
    failures = list(failed(found))
    if options.json:
        print(json.dumps({"failures": failures, **plain(found)}, indent=2))
    else:
        show(found, options.kills)
    for failure in failures:
        print(f"FAILED: {failure}", file=sys.stderr)
    sys.exit(1 if failures else 0)


def measured(
    breaker: Breaker, asked: set[str], options: argparse.Namespace
) -> Iterator[tuple[str, Iterator[Any]]]:
    commands = asked & set(COMMANDS)
    if commands or "kills" in asked:
        yield "kills", told(kill_all(breaker, options.kills, commands or None))
    if "tampering" in asked:
        yield "tampering", told(tampering.tamper_all(breaker, options.seed, quick=options.quick))
    if "limits" in asked:
        yield "limits", told(limits.limit_all(breaker, quick=options.quick))


def told(results: Iterable[Any]) -> Iterator[Any]:
    """The same, each result shown while the next is awaited, where somebody watches."""
    for result in results:
        if sys.stderr.isatty():
            print(result, file=sys.stderr)
        yield result


def failed(found: dict[str, list[Any]]) -> Iterator[str]:
    for tally in found.get("kills", ()):
        yield from (f"{tally.job}: {failure}" for failure in tally.failures)
    for own in found.get("tampering", ()):
        if own.failed:
            yield f"{own.artefact}, {own.file}, {own.change}: {own.outcome} ({own.said})"
    for own in found.get("limits", ()):
        if own.failed:
            yield f"{own.job}, {own.limit}: {own.outcome} ({own.said})"


def plain(found: dict[str, list[Any]]) -> dict[str, Any]:
    return {name: [asdict(own) for own in rows] for name, rows in found.items()}


def show(found: dict[str, list[Any]], kills: int) -> None:
    if "kills" in found:
        columns = ("kills", "before", "while_writing", "done", "drafts", "real", "finished")
        rows = [[t.job, *(getattr(t, c) for c in columns), len(t.failures)] for t in found["kills"]]
        rows.append(["all", *(sum(row[n] for row in rows) for n in range(1, len(columns) + 2))])
        table(["kill -9", *columns, "failures"], rows)
        if (done := rows[-1][1]) < kills:
            print(f"{done} of {kills} kills: the minutes were over, or a command could not be run")
    if "tampering" in found:
        rows = []
        for name, own in grouped(found["tampering"], lambda o: (o.artefact, o.file)).items():
            counted = Counter(o.outcome if not o.failed else "FAILED" for o in own)
            rows.append([*name, *(counted[key] for key in ("noticed", "no effect", "FAILED"))])
        table(["artefact", "file", "noticed", "no effect", "failures"], rows)
    if "limits" in found:
        rows = [[o.job, o.limit, o.outcome, o.said[:90]] for o in found["limits"]]
        table(["command", "limit", "outcome", "said"], rows)


def grouped(rows: list[Any], key: Any) -> dict[Any, list[Any]]:
    found: dict[Any, list[Any]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return found


def table(columns: list[str], rows: list[list[Any]]) -> None:
    cells = [[str(cell) for cell in row] for row in (columns, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        print("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip())
    print()


if __name__ == "__main__":
    main()
