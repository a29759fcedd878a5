"""Ingest + 5-core + split of generated interactions, beside plain polars doing only read and sort.

    python benchmarks/ingest.py [--interactions 20000000] [--quick] [--json]

Each side runs in a process of its own, so that its peak memory is its own. The claim is the ratio:
both sides read the same Parquet file on the same machine in the same run.
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

ITEMS_PER_USER = 20


def write_log(folder: Path, interactions: int) -> None:
    """String IDs, skewed popularity, random times: nothing is sorted in advance."""
    rng = np.random.default_rng(0)
    users = max(1, interactions // ITEMS_PER_USER)
    items = max(10, users // 10)
    user = rng.integers(users, size=interactions)
    item = (items * rng.random(interactions) ** 3).astype(np.int64)  # a few items take most
    times = rng.integers(10**9, 2 * 10**9, interactions)
    pl.DataFrame({"user_id": user, "item_id": item, "timestamp": times}).with_columns(
        pl.format("user-{}", pl.col("user_id")).alias("user_id"),
        pl.format("item-{}", pl.col("item_id")).alias("item_id"),
    ).write_parquet(folder / "interactions.parquet")


def plain_polars(folder: Path) -> None:
    pl.read_parquet(folder / "interactions.parquet").sort("user_id", "timestamp")


def ours(folder: Path) -> None:
    from maskgr.data.config import DataConfig
    from maskgr.data.dataset import Dataset
    from maskgr.data.splits import leave_out

    leave_out(Dataset.load(folder, config=DataConfig(k_core=5)).histories)


SIDES = {"polars read + sort": plain_polars, "maskgr ingest + 5-core + split": ours}


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
    SIDES[side](folder)
    seconds = time.perf_counter() - start
    gigabytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(json.dumps({"seconds": seconds, "peak_gib": gigabytes}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--interactions", type=int, default=20_000_000)
    parser.add_argument("--quick", action="store_true", help="20,000 interactions: does it run?")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        run_side(options.side, options.folder)
        return
    if options.quick:
        options.interactions = 20_000
    with tempfile.TemporaryDirectory() as name:
        write_log(Path(name), options.interactions)
        found = {side: measure(side, Path(name)) for side in SIDES}
    base, own = found.values()
    ratios = {key: own[key] / base[key] for key in base}
    if options.json:
        answer = {"interactions": options.interactions, **found, "ratio": ratios}
        print(json.dumps(answer, indent=2))
        return
    print(f"{options.interactions:,} interactions")
    for side, row in found.items():
        print(f"{side:32} {row['seconds']:7.2f} s {row['peak_gib']:7.2f} GiB peak")
    print(f"{'ratio':32} {ratios['seconds']:7.2f}   {ratios['peak_gib']:7.2f}")


if __name__ == "__main__":
    main()
