"""A generated log with event types and weights: inspected and ingested, seconds and peak memory.

    python benchmarks/events.py [--events 5000000] [--folder FOLDER] [--quick] [--json]

The log is written in row groups, so that generating it takes little memory; each side runs in a
process of its own, so that its peak memory is its own. With --folder the log stays there, for
`maskgr train FOLDER --events purchase=1,cart=0.5,view=0.2`.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import polars as pl

TYPES = ("view", "cart", "purchase")
SHARES = (0.85, 0.1, 0.05)
EVENTS = {"purchase": 1.0, "cart": 0.5, "view": 0.2}
EVENTS_PER_USER = 50
EVENTS_PER_ITEM = 100
CHUNK = 1_000_000  # rows generated and written at once
WORDS = ("tent", "kettle", "lamp", "boots", "mixer", "bench", "razor", "camera", "dock", "rake")
START = 1_700_000_000
MEASURED = ("seconds", "peak_gib")


def write_shop(folder: Path, events: int) -> None:
    """A skewed log in random order and a catalogue with text, a number and a flag."""
    users, items = max(10, events // EVENTS_PER_USER), max(10, events // EVENTS_PER_ITEM)
    parts = folder / "parts"
    parts.mkdir(parents=True, exist_ok=True)
    for number, start in enumerate(range(0, events, CHUNK)):
        rows = _events(np.random.default_rng(number), min(CHUNK, events - start), users, items)
        rows.write_parquet(parts / f"{number:04}.parquet")
    pl.scan_parquet(parts / "*.parquet").sink_parquet(folder / "interactions.parquet")
    for part in parts.iterdir():
        part.unlink()
    parts.rmdir()
    _items(items).write_parquet(folder / "items.parquet")


def _events(rng: np.random.Generator, rows: int, users: int, items: int) -> pl.DataFrame:
    """Users at random; the items of a user lie near each other, and low numbers are popular."""
    user = rng.integers(users, size=rows)
    near = (user * 7919) % items + rng.integers(-20, 21, size=rows)
    popular = (items * rng.random(rows) ** 3).astype(np.int64)
    item = np.where(rng.random(rows) < 0.6, near % items, popular)
    kind = rng.choice(len(TYPES), size=rows, p=SHARES)
    return pl.DataFrame(
        {
            "user_id": user,
            "item_id": item,
            "timestamp": START + rng.integers(365 * 86_400, size=rows),
            "event_type": pl.Series(TYPES).gather(kind),
            "weight": rng.choice([0.5, 1.0, 2.0], size=rows).astype(np.float32),
        }
    ).with_columns(
        pl.format("user-{}", pl.col("user_id")).alias("user_id"),
        pl.format("item-{}", pl.col("item_id")).alias("item_id"),
    )


def _items(count: int) -> pl.DataFrame:
    rng = np.random.default_rng(0)
    words = pl.Series(WORDS)
    return pl.DataFrame(
        {
            "item_id": [f"item-{n}" for n in range(count)],
            "title": [f"{words[n % 10]} {words[n // 10 % 10]} {n}" for n in range(count)],
            "price": rng.integers(1, 500, size=count),
            "in_stock": rng.random(count) < 0.9,
        }
    )


def inspect(folder: Path) -> dict[str, int]:
    from maskgr.data.config import DataConfig
    from maskgr.data.open import inspect_data

    found = inspect_data(str(folder), DataConfig(events=EVENTS))
    assert found.usable
    return {"users": found.users or 0, "duplicates": found.duplicates or 0}


def ingest(folder: Path) -> dict[str, int]:
    from maskgr.data.config import DataConfig
    from maskgr.data.dataset import Dataset
    from maskgr.data.splits import leave_out

    config = DataConfig(events=EVENTS, targets=("purchase",))
    split = leave_out(Dataset.load(folder, config=config).histories)
    return {"tested users": len(split.test.users), "targets": int(split.train.is_target.sum())}


SIDES = {"inspect": inspect, "ingest + split": ingest}


def measure(side: str, folder: Path) -> dict[str, float]:
    """Seconds and peak memory of one side, in a fresh process."""
    answer = subprocess.run(
        [sys.executable, __file__, "--side", side, "--folder", str(folder)],
        check=True,
        capture_output=True,
        text=True,
    )
    return dict(json.loads(answer.stdout))


def run_side(side: str, folder: Path) -> None:
    start = time.perf_counter()
    found = SIDES[side](folder)
    seconds = time.perf_counter() - start
    gigabytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(json.dumps({"seconds": seconds, "peak_gib": gigabytes, **found}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--events", type=int, default=5_000_000)
    parser.add_argument("--folder", type=Path, help="keep the log here; an existing one is used")
    parser.add_argument("--quick", action="store_true", help="20,000 events: does it run?")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        run_side(options.side, options.folder)
        return
    events = 20_000 if options.quick else options.events
    with tempfile.TemporaryDirectory() as name:
        folder = options.folder or Path(name)
        start = time.perf_counter()
        if not (folder / "interactions.parquet").exists():
            write_shop(folder, events)
        written = time.perf_counter() - start
        found = {side: measure(side, folder) for side in SIDES}
    if options.json:
        print(json.dumps({"events": events, "write_seconds": written, **found}, indent=2))
        return
    print(f"{events:,} events, written in {written:.1f} s")
    for side, row in found.items():
        counts = [f"{value:,} {key}" for key, value in row.items() if key not in MEASURED]
        rest = ", ".join(counts)
        print(f"{side:16} {row['seconds']:7.2f} s {row['peak_gib']:7.2f} GiB peak  {rest}")


if __name__ == "__main__":
    main()
