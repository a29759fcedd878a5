"""Residual k-means against faiss doing the same k-means alone: time and peak memory.

    python benchmarks/residual_kmeans.py [--items 1000000] [--dimensions 256] [--quick] [--json]

`maskgr` fits the quantiser and encodes all vectors. `faiss` does the bare work: for each level
`faiss.Kmeans` with the same sample, restarts and number of iterations on the normalised
residuals, then one search that assigns all vectors, and the subtraction. Each runs in a process
of its own, so that one's peak memory does not hide in the other's.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from typing import Any

import faiss
import numpy as np

from maskgr.sids.config import QuantizerConfig
from maskgr.sids.kmeans import RESTARTS
from maskgr.sids.quantizers import fit_quantizer
from maskgr.sids.vectors import SAMPLE


def main() -> None:
    options = parse()
    if options.child:
        print(json.dumps(CHILDREN[options.child](options)))
        return
    ours = run("maskgr", options, None)
    theirs = run("faiss", options, ours["iterations"])
    report = {
        "items": options.items,
        "dimensions": options.dimensions,
        "levels": options.levels,
        "codes": options.codes,
        "components": options.components,
        "maskgr": ours,
        "faiss": theirs,
        "time_ratio": ours["fit_seconds"] / theirs["fit_seconds"],
        "memory_ratio": ours["peak_bytes"] / theirs["peak_bytes"],
    }
    print(json.dumps(report, indent=2) if options.json else table(report))


def parse() -> argparse.Namespace:
    config = QuantizerConfig()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--items", type=int, default=1_000_000)
    parser.add_argument("--dimensions", type=int, default=256)
    parser.add_argument("--levels", type=int, default=config.levels)
    parser.add_argument("--codes", type=int, default=config.codes)
    parser.add_argument("--components", type=int, default=0, help="0: all dimensions, as faiss")
    parser.add_argument("--quick", action="store_true", help="5,000 vectors: does it run?")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--child", choices=list(CHILDREN), help=argparse.SUPPRESS)
    parser.add_argument("--iterations", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quick:
        options.items, options.dimensions, options.codes = 5000, 32, 16
    return options


def run(child: str, options: argparse.Namespace, iterations: list[int] | None) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", child]
    for name in ("items", "dimensions", "levels", "codes", "components"):
        command += [f"--{name}", str(getattr(options, name))]
    if iterations:
        command += ["--iterations", json.dumps(iterations)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def fit_maskgr(options: argparse.Namespace) -> dict[str, Any]:
    counts = count_iterations()
    config = QuantizerConfig(
        levels=options.levels,
        codes=options.codes,
        components=options.components,
    )
    vectors = clustered_vectors(options)
    start = time.perf_counter()
    quantizer = fit_quantizer(vectors, config)
    fitted = time.perf_counter()
    quantizer.encode(vectors)
    encoded = time.perf_counter()
    per_run = split_iterations(counts, options.levels)
    return measured(fitted - start, per_run) | {"encode_seconds": encoded - fitted}


def fit_faiss(options: argparse.Namespace) -> dict[str, Any]:
    vectors = clustered_vectors(options)
    iterations = json.loads(options.iterations)
    start = time.perf_counter()
    residuals = vectors.copy()
    for niter in iterations:
        points = residuals.copy()
        faiss.normalize_L2(points)
        kmeans = faiss.Kmeans(
            options.dimensions,
            options.codes,
            niter=niter,
            nredo=RESTARTS,
            max_points_per_centroid=SAMPLE,
            min_points_per_centroid=1,
        )
        kmeans.train(points)
        _, digits = kmeans.assign(points)
        residuals = points - kmeans.centroids[digits]
    return measured(time.perf_counter() - start, iterations)


CHILDREN = {"maskgr": fit_maskgr, "faiss": fit_faiss}


def clustered_vectors(options: argparse.Namespace) -> np.ndarray:
    """(items, dimensions): 1,000 random centres with noise around them."""
    generator = np.random.default_rng(0)
    centres = generator.standard_normal((1000, options.dimensions), dtype=np.float32)
    vectors = generator.standard_normal((options.items, options.dimensions), dtype=np.float32)
    for start in range(0, options.items, 65_536):
        part = vectors[start : start + 65_536]
        part += centres[generator.integers(1000, size=len(part))]
    return vectors


def count_iterations() -> list[tuple[int, bool]]:
    """From now on, faiss notes here the iterations of every `train` and whether it went on."""
    counts: list[tuple[int, bool]] = []
    train = faiss.Kmeans.train
    ends: list[np.ndarray] = []

    def noted(self: Any, x: np.ndarray, weights: Any = None, init_centroids: Any = None) -> Any:
        result = train(self, x, weights, init_centroids)
        continues = bool(ends) and init_centroids is ends[-1]
        counts.append((len(self.obj), continues))
        ends[:] = [self.centroids]
        return result

    faiss.Kmeans.train = noted
    return counts


def split_iterations(counts: list[tuple[int, bool]], levels: int) -> list[int]:
    """The mean number of iterations of a restart, by level."""
    runs: list[int] = []
    for iterations, continues in counts:
        if continues:
            runs[-1] += iterations
        else:
            runs.append(iterations)
    means = np.array(runs).reshape(levels, RESTARTS).mean(axis=1)
    return [round(mean) for mean in means]


def measured(seconds: float, iterations: list[int]) -> dict[str, Any]:
    unit = 1 if sys.platform == "darwin" else 1024  # what ru_maxrss counts in
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return {"fit_seconds": seconds, "peak_bytes": peak, "iterations": iterations}


def table(report: dict[str, Any]) -> str:
    lines = [
        f"{report['items']:,} × {report['dimensions']} vectors, "
        f"{report['levels']} levels × {report['codes']} codes",
        f"{'':8}{'fit, s':>10}{'peak, GB':>10}  iterations a restart, by level",
    ]
    for name in ("maskgr", "faiss"):
        row = report[name]
        lines.append(
            f"{name:8}{row['fit_seconds']:10.1f}{row['peak_bytes'] / 1e9:10.2f}  "
            f"{', '.join(map(str, row['iterations']))}"
        )
    lines += [
        f"maskgr then encodes all vectors in {report['maskgr']['encode_seconds']:.1f} s",
        f"time ratio   {report['time_ratio']:.2f}",
        f"memory ratio {report['memory_ratio']:.2f}",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
