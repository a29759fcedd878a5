"""Recommendations by an ONNX export and `examples/onnx_recommend.py`, beside torch.

    python benchmarks/export.py [RUN] [--items 12000] [--users 64] [--rounds 7] [--quick] [--json]

The model of preset `cpu` with random weights, over a random catalogue, or the trained RUN. One
request and many users at once, in 1, in 2 and in as many steps as there are digits; both sides get
the same item IDs, take turns, and have one thread each. The largest difference of two scores at the
same rank is printed: it should stay near 1e-5.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import polars as pl
import torch

from decode import with_memory
from maskgr.recommender import Recommender
from maskgr.serving.export import export_onnx
from train import Problem, config_of, network_of

EXAMPLE = Path(__file__).parents[1] / "examples" / "onnx_recommend.py"
TOP = 10
LENGTH = 10  # items of a history


def random_recommender(items: int, quick: bool) -> Recommender:
    config = config_of("denoiser", quick, ["device=cpu"])
    problem = Problem.random(items)
    model = with_memory(network_of("denoiser", config, problem).eval(), problem.split.train)
    ids = pl.DataFrame({"item_id": [f"item-{number}" for number in range(items)]})
    return Recommender(model, ids, config, repeats=False)


def seconds(work: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    found = work()
    return time.perf_counter() - start, found


def compare(
    recommender: Recommender, model: Any, rows: list[list[Any]], steps: int, rounds: int
) -> dict[str, float]:
    decoding = None if model.config["steps"] == steps else recommender.decoding(steps=steps)

    def by_torch() -> Any:
        return recommender.recommend(rows, TOP, decoding=decoding)

    def by_onnx() -> Any:
        return model.recommend(rows, TOP, steps=steps)

    by_torch(), by_onnx()
    times = [(seconds(by_torch), seconds(by_onnx)) for _ in range(rounds)]
    theirs, ours = (scores(times[0][side][1]) for side in (0, 1))
    torch_seconds, onnx_seconds = (
        statistics.median(turn[side][0] for turn in times) for side in (0, 1)
    )
    return {
        "users": len(rows),
        "steps": steps,
        "torch_milliseconds": 1e3 * torch_seconds,
        "onnx_milliseconds": 1e3 * onnx_seconds,
        "torch_over_onnx": statistics.median(a[0] / b[0] for a, b in times),
        "largest_difference": float(np.abs(theirs - ours).max()),
    }


def scores(found: list[Any]) -> np.ndarray:
    return np.array([score for row in found for _, score in row])


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    if options.run:
        recommender = Recommender.load(options.run)
    else:
        recommender = random_recommender(options.items, options.quick)
    taken, _ = seconds(lambda: export_onnx(recommender, folder / "export"))
    model = runpy.run_path(str(EXAMPLE))["Model"](folder / "export", threads=1)
    rng, ids = np.random.default_rng(0), recommender.items["item_id"].to_list()
    drawn = rng.integers(len(ids), size=(options.users, LENGTH)).tolist()
    rows = [[ids[item] for item in row] for row in drawn]
    cases = [
        compare(recommender, model, part, steps, options.rounds)
        for part in (rows[:1], rows)
        for steps in sorted({1, min(2, len(model.sizes)), len(model.sizes)})
    ]
    return {"items": len(ids), "export_seconds": taken, "cases": cases}


def table(found: dict[str, Any]) -> str:
    lines = [
        f"{found['items']:,} items; exported in {found['export_seconds']:.1f} s",
        f"{'users':>6}{'steps':>7}{'torch, ms':>12}{'onnx, ms':>12}{'torch / onnx':>14}"
        f"{'difference':>12}",
    ]
    for row in found["cases"]:
        lines.append(
            f"{row['users']:6}{row['steps']:7}{row['torch_milliseconds']:12.2f}"
            f"{row['onnx_milliseconds']:12.2f}{row['torch_over_onnx']:14.2f}"
            f"{row['largest_difference']:12.1e}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", nargs="?", help="a trained run of maskgr or sasrec")
    parser.add_argument("--items", type=int, default=12_000, help="of the random catalogue")
    parser.add_argument("--users", type=int, default=64, help="at once")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="tiny presets: does it run?")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    if options.quick:
        options.items, options.users, options.rounds = 500, 4, 1
    if os.environ.get("OPENBLAS_NUM_THREADS") != "1":  # NumPy reads it when it is imported
        alone = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
        os.execve(sys.executable, [sys.executable, *sys.argv], alone)
    torch.set_num_threads(1)
    with TemporaryDirectory() as folder:
        found = measure(options, Path(folder))
    print(json.dumps(found, indent=2) if options.json else table(found))


if __name__ == "__main__":
    main()
