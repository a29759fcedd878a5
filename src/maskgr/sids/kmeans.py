"""K-means on faiss, run to convergence, with every code used."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import faiss
import numpy as np
import numpy.typing as npt

from maskgr.sids.vectors import Floats, distinct_rows

RESTARTS = 3  # runs from different starting points, of which the best is kept
# Converged: ten more iterations lower the objective by less than a ten-thousandth.
ITERATIONS = 10
TOLERANCE = 1e-4
ROUNDS = 30
# Multiplications per iteration, below which threads wait for one another longer than they work.
SMALL = 200_000_000


def k_means(points: Floats, codes: int, *, seed: int, restarts: int = RESTARTS) -> Floats:
    """(codes, d) centroids: the best of `restarts` runs from different points.

    Every code is nearest to some point, provided that there are as many different points.
    """
    points = np.ascontiguousarray(points)
    runs = []
    with _threads(points.size * codes):
        for stream in np.random.default_rng(seed).spawn(restarts):
            first = distinct_rows(points, stream.permutation(len(points)), codes)
            start = points[np.resize(first, codes)]  # repeats only if too few are different
            runs.append(_converge(points, start))
        _, centroids = min(runs, key=lambda run: run[0])
        return _use_every_code(points, centroids)


def nearest(points: Floats, centroids: Floats) -> npt.NDArray[np.int32]:
    """(n,) the closest centroid of each point."""
    _, codes = faiss.knn(np.ascontiguousarray(points), np.ascontiguousarray(centroids), 1)
    return np.asarray(codes[:, 0], dtype=np.int32)


@contextlib.contextmanager
def _threads(work: int) -> Iterator[None]:
    before = faiss.omp_get_max_threads()
    if work < SMALL:
        faiss.omp_set_num_threads(1)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(before)


def _converge(points: Floats, centroids: Floats) -> tuple[float, Floats]:
    """The objective and the centroids of k-means started from `centroids`."""
    objective = np.inf
    for _ in range(ROUNDS):
        run = faiss.Kmeans(
            points.shape[1],
            len(centroids),
            niter=ITERATIONS,
            min_points_per_centroid=1,  # silences a warning
            max_points_per_centroid=len(points),  # the caller has sampled already
        )
        run.train(points, init_centroids=centroids)
        before, objective = objective, float(np.asarray(run.obj)[-1])
        centroids = np.asarray(run.centroids)
        if objective >= before * (1 - TOLERANCE):
            break
    return objective, centroids


def _use_every_code(points: Floats, centroids: Floats) -> Floats:
    """Moves each code that no point is nearest to onto a point far from its own centroid.

    A code moved onto a point keeps that point from then on, so this ends after at most as many
    rounds as there are codes.
    """
    centroids = centroids.copy()
    for _ in range(len(centroids)):
        codes = nearest(points, centroids)
        unused = np.flatnonzero(np.bincount(codes, minlength=len(centroids)) == 0)
        if not len(unused):
            break
        distances = np.square(points - centroids[codes]).sum(axis=1)
        apart = np.flatnonzero(distances > 0)
        farthest = apart[np.argsort(-distances[apart], kind="stable")]
        seeds = distinct_rows(points, farthest, len(unused))
        if not seeds:
            break
        centroids[unused[: len(seeds)]] = points[seeds]
    return centroids
