import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from maskgr.sids.kmeans import k_means, nearest
from maskgr.sids.vectors import sample_rows


def brute_force(points, centroids):
    return np.square(points[:, None].astype(float) - centroids[None]).sum(axis=2).argmin(axis=1)


def test_nearest_is_the_brute_force_answer():
    generator = np.random.default_rng(0)
    points = generator.standard_normal((500, 7), dtype=np.float32)
    centroids = generator.standard_normal((20, 7), dtype=np.float32)
    assert (nearest(points, centroids) == brute_force(points, centroids)).all()


def test_clear_clusters_are_found():
    generator = np.random.default_rng(1)
    centres = np.array([[0, 0], [10, 0], [0, 10], [10, 10]], np.float32)
    points = np.repeat(centres, 50, axis=0) + generator.normal(0, 0.1, (200, 2)).astype(np.float32)
    found = k_means(points, 4, restarts=5, seed=0)
    assert np.allclose(found[nearest(centres, found)], centres, atol=0.1)


def test_centroids_are_the_means_of_their_points():
    points = np.random.default_rng(2).standard_normal((400, 3), dtype=np.float32)
    centroids = k_means(points, 5, restarts=1, seed=0)
    codes = nearest(points, centroids)
    means = np.stack([points[codes == code].mean(axis=0) for code in range(5)])
    assert np.allclose(centroids, means, atol=0.05)  # Lloyd's fixed point


def test_more_restarts_are_never_worse():
    points = np.random.default_rng(3).standard_normal((300, 8), dtype=np.float32)

    def cost(restarts):
        centroids = k_means(points, 16, restarts=restarts, seed=4)
        return np.square(points - centroids[nearest(points, centroids)]).sum()

    assert cost(6) <= cost(1) * (1 + 1e-6)


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 12), st.integers(0, 30), st.integers(0, 200), st.integers(0, 1000))
def test_every_code_is_used_when_there_are_as_many_distinct_points(codes, more, repeats, seed):
    generator = np.random.default_rng(seed)
    distinct = generator.integers(-9, 9, (codes + more, 4)).astype(np.float32)
    distinct[:, 0] = np.arange(codes + more)  # makes them different
    points = np.concatenate([distinct, np.repeat(distinct[:1], repeats, axis=0)])
    centroids = k_means(points, codes, restarts=1, seed=seed)
    assert len(np.unique(nearest(points, centroids))) == codes


def test_codebook_is_filled_when_distinct_points_are_fewer_than_codes():
    points = np.repeat(np.eye(3, dtype=np.float32), 5, axis=0)
    centroids = k_means(points, 6, restarts=1, seed=0)
    assert centroids.shape == (6, 3)
    assert np.allclose(centroids[nearest(points, centroids)], points, atol=1e-2)


def test_same_seed_same_centroids():
    points = np.random.default_rng(5).standard_normal((3000, 32), dtype=np.float32)
    runs = [k_means(points, 64, restarts=2, seed=7) for _ in range(2)]
    assert (runs[0] == runs[1]).all()


def test_sample_is_limited_distinct_and_in_order(monkeypatch):
    monkeypatch.setattr("maskgr.sids.vectors.SAMPLE", 5)
    assert sample_rows(9, 2, 0).tolist() == list(range(9))
    rows = sample_rows(1000, 2, 0)
    assert len(set(rows.tolist())) == 10
    assert (np.diff(rows) > 0).all()
    assert (rows == sample_rows(1000, 2, 0)).all()
