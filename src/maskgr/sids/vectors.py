"""The vectors that quantisers work on: checked, as float32, of unit length if asked for."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from maskgr.errors import DataError

Floats = npt.NDArray[np.float32]
Digits = npt.NDArray[np.int32]

# Subtracting float32 vectors of length 1 leaves noise of about 1e-7; scaled up to length 1 that
# noise would be quantised as if it meant something.
NOISE = 1e-6
CHUNK = 65_536
SAMPLE = 256  # vectors per code, at most, that codebooks are fitted on; all are then assigned


def prepare(vectors: npt.ArrayLike, *, normalise: bool, first: int = 0) -> Floats:
    """(n, d) a checked float32 copy of the vectors; with `normalise`, every row has length 1.

    `first`: the number of the first row, where they are a part of many.

    Only the direction of a text embedding has a meaning, so text is normalised. The length of a
    learned vector has a meaning too (it takes part in the dot product that ranks items).
    """
    rows = np.array(vectors, dtype=np.float32)  # a copy, worked on in place
    assert rows.ndim == 2, rows.shape
    assert rows.size, rows.shape
    peaks = np.maximum(rows.max(axis=1), -rows.min(axis=1))  # (n,)
    _refuse_rows(~np.isfinite(peaks), "has a NaN or infinite value; fix or drop that item", first)
    if normalise:
        _refuse_rows(
            peaks == 0,
            "is all zeros, which has no direction; give that item a text or drop it",
            first,
        )
        rows /= peaks[:, None]  # first, or squares of very large or small values leave float32
        rows /= np.sqrt(np.einsum("nd,nd->n", rows, rows))[:, None]
    return rows


def unit(residuals: Floats) -> Floats:
    """Rows scaled to length 1; rows that are only rounding noise become zeros."""
    lengths = np.sqrt(np.einsum("nd,nd->n", residuals, residuals))
    scale = np.where(lengths > NOISE, 1 / np.maximum(lengths, NOISE), 0).astype(np.float32)
    return residuals * scale[:, None]


def fillable_codes(rows: Floats, codes: int) -> int:
    """The codes of a codebook, or fewer, with a warning, where fewer rows are different."""
    distinct = len(distinct_rows(rows, np.arange(len(rows)), codes))
    if distinct < codes:
        warnings.warn(
            f"{len(rows):,} items have {distinct:,} different embeddings, too few for {codes:,} "
            f"codes a level; semantic IDs have {distinct:,}",
            stacklevel=2,
        )
    return distinct


def distinct_rows(rows: Floats, order: npt.NDArray[np.integer], limit: int) -> list[int]:
    """The first `limit` indices in `order` whose rows differ from all before them."""
    seen: set[bytes] = set()
    found: list[int] = []
    for index in order.tolist():
        if len(found) == limit:
            break
        key = rows[index].tobytes()
        if key not in seen:
            seen.add(key)
            found.append(index)
    return found


def sample_rows(count: int, codes: int, seed: int) -> npt.NDArray[np.int64]:
    """At most `codes * SAMPLE` of `count` row numbers, in ascending order."""
    limit = codes * SAMPLE
    if count <= limit:
        return np.arange(count)
    return np.sort(np.random.default_rng(seed).choice(count, limit, replace=False))


def code_means(rows: Floats, digits: npt.NDArray[np.integer], codes: int) -> Floats:
    """(codes, k) the mean of the `rows` (n, k) of each code, zero for a code that nothing has."""
    from scipy.sparse import csr_array  # type: ignore[import-untyped]

    sums = np.zeros((codes, rows.shape[1]))
    for part in chunks(len(rows)):
        own = digits[part]
        members = csr_array(
            (np.ones(len(own)), (own, np.arange(len(own)))), shape=(codes, len(own))
        )
        sums += members @ rows[part]
    counts = np.bincount(digits, minlength=codes)
    means: Floats = (sums / np.maximum(counts, 1)[:, None]).astype(np.float32)
    return means


def chunks(count: int) -> Iterator[slice]:
    """Slices that cover `count` rows, so that temporary arrays stay small."""
    return (slice(start, min(start + CHUNK, count)) for start in range(0, count, CHUNK))


def prepared_parts(vectors: npt.ArrayLike, *, normalise: bool) -> Iterator[tuple[slice, Floats]]:
    """`prepare` part by part, for those who need no copy of all vectors."""
    rows = np.asarray(vectors)
    for part in chunks(len(rows)):
        yield part, prepare(rows[part], normalise=normalise, first=part.start)


def _refuse_rows(bad: npt.NDArray[np.bool_], problem: str, first: int) -> None:
    if not bad.any():
        return
    others = int(bad.sum()) - 1
    also = f" ({others} more rows too)" if others else ""
    raise DataError(f"row {first + int(bad.argmax())} of the embeddings{also} {problem}")
