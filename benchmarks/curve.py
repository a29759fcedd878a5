"""The cost of a catalogue from ten thousand to ten million items, without training.

    python benchmarks/curve.py [--items 10000 100000 1000000 10000000] [--written 1000000]
        [--users 32] [--picture docs/images/scale.png] [--quick] [--json]

Costs do not depend on what was learned, so weights, vectors and digits are random. Three sides,
each size of each in a process of its own, so that its peak memory is its own:

- `index`: semantic IDs of four digits are made of vectors of 32 numbers: codebooks are fitted on a
  sample, every item gets its digits;
- `digits`: a recommender of preset `digits`, where an item is the sum of the vectors of its 16
  digits: one step of generation for one user and for `--users` at once, similar items by learned
  vectors and by IDs;
- `vectors`: the same with a vector of 256 numbers for every item, up to `--written` items.
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
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch

SIDES = ("index", "digits", "vectors")
WIDTH = 32  # of the vectors that IDs are made of
HISTORY = 10
REQUESTS = 5


def index(items: int, users: int) -> dict[str, float]:
    """Seconds to fit codebooks and to give every item its digits, and the bytes of both."""
    from maskgr.sids.config import QuantizerConfig
    from maskgr.sids.quantizers import fit_quantizer
    from maskgr.sids.uniqueness import collisions
    from maskgr.sids.vectors import chunks

    rng = np.random.default_rng(0)
    vectors = np.empty((items, WIDTH), dtype=np.float32)
    for part in chunks(items):
        vectors[part] = rng.standard_normal((part.stop - part.start, WIDTH), dtype=np.float32)
    start = time.perf_counter()
    quantizer = fit_quantizer(vectors, QuantizerConfig(components=0))
    fitted = time.perf_counter()
    digits = quantizer.encode(vectors)
    done = time.perf_counter()
    books = sum(tensor.nbytes for tensor in quantizer.state()[0].values())
    return {
        "fit_seconds": fitted - start,
        "encode_seconds": done - fitted,
        "digits_bytes": digits.nbytes,
        "codebooks_bytes": books,
        "unique_share": collisions(digits).unique_share,
    }


def digits(items: int, users: int) -> dict[str, float]:
    return asked(items, users, "digits")


def vectors(items: int, users: int) -> dict[str, float]:
    return asked(items, users, "cpu")


@torch.no_grad()
def asked(items: int, users: int, preset: str) -> dict[str, float]:
    """Milliseconds of an answer, and the bytes that the items take."""
    recommender = random_recommender(items, preset)
    rng = np.random.default_rng(1)
    rows = [rng.integers(items, size=HISTORY) for _ in range(users)]
    histories = [[f"item-{number}" for number in row] for row in rows]
    how = {"decoding": recommender.decoding(steps=1)}
    one = milliseconds(lambda n: recommender.recommend(histories[n % users], **how))
    start = time.perf_counter()
    answers = recommender.recommend(histories, **how)
    many = 1000 * (time.perf_counter() - start) / users
    assert all(len(row) == 10 for row in answers)
    vectors: Any = recommender.model.history.items
    if preset == "digits":  # up to a million items the sums are written out, for speed
        held = vectors.codes.nbytes + vectors.digits.weight.nbytes
    else:
        held = vectors.own.weight.nbytes
    return {
        "one_milliseconds": one,
        "many_milliseconds": many,
        "similar_vectors_milliseconds": milliseconds(
            lambda n: recommender.similar_items(histories[n % users][0])
        ),
        "similar_sids_milliseconds": milliseconds(
            lambda n: recommender.similar_items(histories[n % users][0], by="sids")
        ),
        "items_bytes": held,
    }


def milliseconds(answer: Callable[[int], object]) -> float:
    seconds = []
    for number in range(REQUESTS + 1):
        start = time.perf_counter()
        answer(number)
        seconds.append(time.perf_counter() - start)
    return 1000 * statistics.median(seconds[1:])


def random_recommender(items: int, preset: str) -> Any:
    """A recommender that was never trained."""
    from maskgr.models.base import train_config
    from maskgr.models.maskgr.model import MaskGR
    from maskgr.models.maskgr.stages import sasrec_config
    from maskgr.models.sasrec import SASRec
    from maskgr.recommender import Recommender
    from maskgr.sids.residual_kmeans import ResidualKMeans
    from maskgr.sids.semantic_ids import SemanticIds

    config = train_config(preset, ["repeat_bias=false", "neighbours=0"], device="cpu")
    levels, width = config.model.sids.quantizer.levels, config.model.transformer.width
    rng = np.random.default_rng(0)
    ids = pl.DataFrame({"n": np.arange(items)}).select(item_id=pl.format("item-{}", "n"))
    books = rng.standard_normal((levels, 256, WIDTH), dtype=np.float32)
    none = np.zeros((0, WIDTH), dtype=np.float32)
    sids = SemanticIds(
        items=ids,
        digits=rng.integers(256, size=(items, levels), dtype=np.int32),
        codebook_sizes=(256,) * levels,
        embeddings=np.zeros((items, 1), dtype=np.float32),
        quantizer=ResidualKMeans(books, books, none.sum(0), none, normalise=False),
        unique="share",
        encoder=config.model.sids.encoder,
    )
    torch.manual_seed(0)
    counts = np.ones(items, dtype=np.int64)
    vectors = None
    if preset == "digits":
        from maskgr.nn.item_vectors import DigitVectors

        vectors = DigitVectors(width, torch.from_numpy(sids.digits), sids.codebook_sizes)
    own = sasrec_config(config.model, "id")
    history = SASRec(own, counts, None, config.history_limit, vectors)
    model = MaskGR(config, sids, history).eval()
    return Recommender(model, ids, config, repeats=False)


def measure(side: str, items: int, users: int) -> dict[str, Any]:
    """The figures of one size, in a fresh process."""
    words = [sys.executable, __file__, "--side", side, "--items", str(items), "--users", str(users)]
    done = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def run_side(side: str, items: int, users: int) -> None:
    found = {"index": index, "digits": digits, "vectors": vectors}[side](items, users)
    unit = 2**30 if sys.platform == "darwin" else 2**20  # what ru_maxrss counts in
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
    print(json.dumps({"side": side, "items": items, "peak_gib": peak, **found}))


def table(rows: list[dict[str, Any]], users: int) -> str:
    names = {
        "items_bytes": "MB",
        "digits_bytes": "MB",
        "one_milliseconds": "ms, one user",
        "many_milliseconds": f"ms, {users} users",
        "similar_vectors_milliseconds": "similar, vectors",
        "similar_sids_milliseconds": "similar, IDs",
        "fit_seconds": "fit, s",
        "encode_seconds": "encode, s",
    }
    lines = []
    for side in SIDES:
        own = [row for row in rows if row["side"] == side]
        if not own:
            continue
        known = [name for name in names if name in own[0]]
        head = "".join(f"{names[name]:>18}" for name in known)
        lines.append(f"{side:8}{'items':>12}{'peak GiB':>10}{head}")
        for row in own:
            values = [row[name] / (1e6 if name.endswith("bytes") else 1) for name in known]
            cells = "".join(f"{value:18,.1f}" for value in values)
            lines.append(f"{'':8}{row['items']:12,}{row['peak_gib']:10.2f}{cells}")
    return "\n".join(lines)


def draw(rows: list[dict[str, Any]], users: int, file: Path) -> None:
    """Bytes, milliseconds and memory by the number of items, both axes logarithmic."""
    from maskgr.figures import new_figure, save_png

    figure = new_figure(13, 4.2)
    bytes_, times, memory = figure.subplots(1, 3)
    panels: list[tuple[Any, str, list[tuple[str, str, str, str]]]] = [
        (bytes_, "MB of items", [
            ("vectors", "items_bytes", "a vector of 256 numbers", "o-"),
            ("digits", "items_bytes", "16 digits and their vectors", "s--"),
            ("index", "digits_bytes", "semantic IDs of 4 digits", "^:"),
        ]),
        (times, "milliseconds", [
            ("vectors", "one_milliseconds", "vectors, one user", "o-"),
            ("vectors", "many_milliseconds", f"vectors, {users} at once, a user", "o:"),
            ("digits", "one_milliseconds", "digits, one user", "s--"),
            ("digits", "many_milliseconds", f"digits, {users} at once, a user", "s:"),
            ("digits", "similar_vectors_milliseconds", "similar by vectors (of digits)", "x-."),
            ("digits", "similar_sids_milliseconds", "similar by semantic IDs", "d-"),
        ]),
        (memory, "peak GiB of the process", [
            ("vectors", "peak_gib", "recommender of vectors", "o-"),
            ("digits", "peak_gib", "recommender of digits", "s--"),
            ("index", "peak_gib", "making semantic IDs", "^:"),
        ]),
    ]  # fmt: skip
    shades = ("black", "dimgray", "gray")
    for axes, title, lines in panels:
        for number, (side, name, label, style) in enumerate(lines):
            own = [row for row in rows if row["side"] == side]
            if own:
                scale = 1e6 if name.endswith("bytes") else 1
                x, y = [row["items"] for row in own], [row[name] / scale for row in own]
                axes.loglog(x, y, style, color=shades[number % 3], label=label, markersize=5)
        axes.set_xlabel("items")
        axes.set_ylabel(title)
        axes.grid(True, which="major", color="lightgray", linewidth=0.6)
        axes.legend(fontsize=8, frameon=False)
    save_png(figure, file)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    sizes = [10_000, 100_000, 1_000_000, 10_000_000]
    parser.add_argument("--items", type=int, nargs="+", default=sizes)
    parser.add_argument(
        "--written", type=int, default=1_000_000, help="items with vectors, at most"
    )
    parser.add_argument("--users", type=int, default=32, help="answered at once")
    parser.add_argument("--picture", type=Path, help="draw the curves to this PNG")
    parser.add_argument("--quick", action="store_true", help="small sizes: does it run?")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quick:
        options.items, options.users = [500, 2000], 8
    if options.side:
        run_side(options.side, options.items[0], options.users)
        return
    rows = []
    for side in SIDES:
        for items in sorted(options.items):
            if side != "vectors" or items <= options.written:
                print(f"{side}, {items:,} items …", file=sys.stderr)
                rows.append(measure(side, items, options.users))
    if options.picture:
        draw(rows, options.users, options.picture)
    print(json.dumps(rows, indent=2) if options.json else table(rows, options.users))


if __name__ == "__main__":
    main()
