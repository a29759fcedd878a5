"""Decoding speed of the paper's model and of ours.

    python benchmarks/decode.py [DATA] [--run RUN] [--users 64] [--items 1000000]
        [--digit-items 10000000] [--quick] [--json]

(a) The network of preset `paper` on histories of DATA, 10 beams, beside a reference that pads
    sequences to the longest, at most 120 tokens, and encodes them again for every beam and step;
    the beam search is the same, so the ratio is that of the networks' work;
(b) the model of preset `cpu` on the same histories: one request, and many users at once, in one
    step and digit by digit; and one step over a random catalogue of `--items`;
(c) one step over a random catalogue of `--digit-items`, whose vectors are sums of 16 digits'
    vectors and not written out.

Weights are random. RUN is a trained run of DATA: (b) is measured with it if it is a `maskgr`, and
recall with the frozen cache is compared with recall without if it is a `maskgr-paper`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from maskgr.data.sequences import Sequences
from maskgr.data.splits import Holdout
from maskgr.decoding.config import DecodingConfig
from maskgr.decoding.decoder import Decoder, Search
from maskgr.decoding.orders import ORDERS
from maskgr.devices import keep_freed_memory
from maskgr.evaluation.protocol import evaluate
from maskgr.evaluation.ranking import Query
from maskgr.models.maskgr.bias import Bias
from maskgr.models.maskgr.model import MaskGR
from maskgr.models.maskgr.paper import PaperMaskGR
from maskgr.models.neighbours import Neighbours
from maskgr.nn.item_vectors import DigitVectors
from maskgr.nn.scoring import best_items
from maskgr.recommender import Recommender
from maskgr.training.batches import by_length
from maskgr.training.fit import Trainable
from train import PaperReference, Problem, config_of, network_of

BEAMS = 10
TOP = 10
ROWS = 128  # padded sequences at once
REQUESTS = 10


class Padded:
    """The reference as a `maskgr.decoding.denoiser.Denoiser`."""

    items = 1

    def __init__(self, network: PaperReference, histories: Sequences) -> None:
        self.network = network.eval()
        self.codebook_sizes = tuple(network.sizes)
        levels = len(self.codebook_sizes)
        self.rows = functional.pad(network.pack(histories), (0, levels), value=network.pad)
        self.ends = torch.from_numpy(histories.lengths * len(self.codebook_sizes))

    @property
    def users(self) -> int:
        return len(self.rows)

    def first(self) -> list[Tensor]:
        user = torch.arange(self.users)
        shape = (self.users, 1, len(self.codebook_sizes))
        nothing = torch.zeros(shape, dtype=torch.int64)
        every = self(user, nothing, torch.zeros(shape).bool(), torch.ones(shape).bool())
        return [level.unsqueeze(1) for level in every]

    @torch.no_grad()
    def __call__(
        self, user: Tensor, digits: Tensor, revealed: Tensor, wanted: Tensor
    ) -> list[Tensor]:
        tokens, starts = self.rows[user], self.network.starts
        place = self.ends[user][:, None] + torch.arange(len(starts))
        target = torch.where(revealed, digits + starts, self.network.mask)[:, 0]
        tokens.scatter_(1, place, target)
        hidden = torch.cat([self.network.encode(part) for part in tokens.split(ROWS)])
        own = hidden.gather(1, place[:, :, None].expand(-1, -1, hidden.shape[2]))
        own = own @ self.network.tokens.weight.T  # (rows, levels, vocabulary)
        answers = []
        for level, (start, size) in enumerate(
            zip(starts.tolist(), self.codebook_sizes, strict=True)
        ):
            rows = own[wanted[:, 0, level], level, start : start + size]
            answers.append(rows.log_softmax(-1))
        return answers


def seconds_of(model: PaperMaskGR | MaskGR, histories: Sequences, **changes: Any) -> float:
    decoding = DecodingConfig(**{"beams": BEAMS, **changes})
    start = time.perf_counter()
    model.decode(Query(histories, TOP), decoding)
    return time.perf_counter() - start


def users_per_second(
    model: PaperMaskGR | MaskGR,
    histories: Sequences,
    name: str,
    values: Iterable[Any],
    **fixed: Any,
) -> dict[Any, float]:
    """As the setting `name` of decoding takes these values."""
    return {
        value: len(histories) / seconds_of(model, histories, **{name: value}, **fixed)
        for value in values
    }


def milliseconds(model: PaperMaskGR | MaskGR, histories: Sequences, **changes: Any) -> float:
    """Of one request, the median of ten after one to warm up."""
    requests = [histories.select(np.array([n])) for n in range(min(REQUESTS, len(histories)))]
    seconds_of(model, requests[0], **changes)
    return 1e3 * float(np.median([seconds_of(model, one, **changes) for one in requests]))


def paper(model: PaperMaskGR, histories: Sequences) -> dict[str, Any]:
    """(a)"""
    levels = model.levels
    rng, n_items = np.random.default_rng(0), len(model.codes)
    drawn = {n: [rng.integers(n_items, size=n) for _ in range(len(histories))] for n in (5, 20)}
    return {
        "reference": against_reference(model, histories),
        "frozen_users_per_second": {
            "beams": users_per_second(model, histories, "beams", (10, 20, 50), cache="frozen"),
            "steps": users_per_second(
                model, histories, "steps", range(1, levels + 1), cache="frozen"
            ),
            "order": users_per_second(model, histories, "order", ORDERS, cache="frozen"),
            "history": {
                n: len(rows) / seconds_of(model, Sequences.of(rows), cache="frozen")
                for n, rows in drawn.items()
            },
        },
        "request_milliseconds": {
            cache: milliseconds(model, histories, cache=cache) for cache in ("off", "frozen")
        },
    }


def against_reference(model: PaperMaskGR, histories: Sequences) -> dict[str, float]:
    reference = Padded(PaperReference(model.config, model.sids), by_length(histories))
    decoder = Decoder(model.index)
    few = histories.select(np.arange(min(4, len(histories))))
    for cache in ("off", "frozen"):
        seconds_of(model, few, cache=cache)
    start = time.perf_counter()
    decoder.next_items(reference, TOP, Search(BEAMS, "greedy", model.levels))
    theirs = time.perf_counter() - start
    found = {"reference_users_per_second": len(histories) / theirs}
    for cache in ("off", "frozen"):
        own = seconds_of(model, histories, cache=cache)
        found |= {f"{cache}_users_per_second": len(histories) / own, f"{cache}_ratio": theirs / own}
    return found


def ours(model: MaskGR, histories: Sequences) -> dict[str, Any]:
    """(b) with the preset's 20 beams."""
    steps = (1, model.levels)
    fixed = {"beams": model.decoding().beams}
    seconds_of(model, histories.select(np.arange(1)))
    return {
        "levels": model.levels,
        "request_milliseconds": {
            n: milliseconds(model, histories, steps=n, **fixed) for n in steps
        },
        "users_per_second": users_per_second(model, histories, "steps", steps, **fixed),
        "by_order": users_per_second(model, histories, "order", ORDERS, **fixed),
    }


def one_step(items: int, users: int, quick: bool) -> dict[str, float]:
    """(b) microseconds a user of one step over a random catalogue; semantic IDs play no part."""
    config = config_of("denoiser", quick, ["items=id"])
    model = network_of("denoiser", config, Problem.random(items)).eval()
    assert isinstance(model, MaskGR)
    rng = np.random.default_rng(0)
    histories = Sequences.of([rng.integers(items, size=10) for _ in range(users)])
    seconds_of(model, histories, steps=1)
    seconds = min(seconds_of(model, histories, steps=1) for _ in range(3))
    return {"items": items, "users": users, "microseconds_per_user": 1e6 * seconds / users}


def digit_step(items: int, users: int) -> dict[str, float]:
    """(c) microseconds a user of one step with digits' vectors, and their memory."""
    sizes, width = (256,) * 16, 256
    generator = torch.Generator().manual_seed(0)
    codes = torch.empty(items, len(sizes), dtype=torch.int16).random_(256, generator=generator)
    vectors = DigitVectors(width, codes, sizes)
    del codes
    table = vectors.table()
    queries = torch.randn(users, width, generator=generator)
    best_items(queries[:1], table, TOP)
    start = time.perf_counter()
    best_items(queries, table, TOP)
    seconds = time.perf_counter() - start
    held = vectors.codes.nbytes + vectors.digits.weight.nbytes
    return {
        "items": items,
        "users": users,
        "microseconds_per_user": 1e6 * seconds / users,
        "megabytes": held / 1e6,
        "megabytes_written_out": 4 * items * width / 1e6,
    }


def with_memory(model: Trainable, train: Sequences) -> MaskGR:
    """An untrained model with the neighbours and biases that a trained one has."""
    assert isinstance(model, MaskGR)
    model.neighbours = Neighbours.count(train, len(model.codes), model.own.neighbours)
    model.bias = Bias(repeat=1.0, follow=1.0)
    return model


def frozen_recall(recommender: Recommender, holdout: Holdout) -> dict[str, float]:
    """recall@10 of a trained run with each cache, on the same users."""
    found = {}
    for cache in ("off", "frozen"):
        ranker = recommender.ranker(recommender.decoding(cache=cache, beams=BEAMS))
        result = evaluate(ranker, holdout, len(recommender.items), protocols=("all",))
        found[cache] = result.metrics["all"]["recall@10"].mean
    return found


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    run = Recommender.load(options.run) if options.run else None
    config = config_of("paper", options.quick)
    problem = Problem.open(options.data, config, folder)
    test = problem.split.test
    histories = test.sample(options.users).histories.last(20)
    model = network_of("paper", config, problem).eval()
    assert isinstance(model, PaperMaskGR)
    found: dict[str, Any] = {"data": options.data, "paper": paper(model, histories)}
    if run is not None and isinstance(run.model, MaskGR):
        own = run.model
    else:
        config = config_of("denoiser", options.quick)
        problem = Problem.open(options.data, config, folder)
        own = with_memory(network_of("denoiser", config, problem).eval(), problem.split.train)
    found["ours"] = ours(own, histories)
    found["one_step"] = one_step(options.items, options.users, options.quick)
    found["digit_step"] = digit_step(options.digit_items, options.users)
    if run is not None and isinstance(run.model, PaperMaskGR):
        found["recall@10"] = frozen_recall(run, test.sample(options.recall_users))
    return found


def table(found: dict[str, Any]) -> str:
    row, own, large = found["paper"]["reference"], found["ours"], found["one_step"]
    digits = found["digit_step"]
    lines = [f"paper, reference: {row['reference_users_per_second']:.2f} users/s"]
    for cache in ("off", "frozen"):
        speed, ratio = row[f"{cache}_users_per_second"], row[f"{cache}_ratio"]
        lines.append(f"paper, cache {cache}: {speed:.2f} users/s, {ratio:.1f} times the reference")
    for name, values in found["paper"]["frozen_users_per_second"].items():
        lines.append(f"paper, users/s (frozen) by {name}: {_listed(values)}")
    lines.append(f"paper, one request, ms: {_listed(found['paper']['request_milliseconds'])}")
    lines += [
        f"ours, one request, ms by steps: {_listed(own['request_milliseconds'])}",
        f"ours, users/s by steps: {_listed(own['users_per_second'])}",
        f"ours, users/s by order, digit by digit: {_listed(own['by_order'])}",
        f"ours, one step, {large['items']:,} items: {large['microseconds_per_user']:,.0f} µs a "
        f"user, {large['users']} users at once",
        f"sums of 16 digits, one step, {digits['items']:,} items: "
        f"{digits['microseconds_per_user']:,.0f} µs a user; {digits['megabytes']:,.0f} MB, written "
        f"out {digits['megabytes_written_out']:,.0f} MB",
    ]
    if "recall@10" in found:
        caches = ", ".join(f"{name} {value:.4f}" for name, value in found["recall@10"].items())
        lines.append(f"recall@10 by cache: {caches}")
    return "\n".join(lines)


def _listed(values: dict[Any, float]) -> str:
    return ", ".join(f"{key}: {value:.1f}" for key, value in values.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("data", nargs="?", default="synthetic", help="a dataset folder or source")
    parser.add_argument("--run", help="a trained run of DATA")
    parser.add_argument("--users", type=int, default=64)
    parser.add_argument("--items", type=int, default=1_000_000, help="of the random catalogue")
    parser.add_argument("--digit-items", type=int, default=10_000_000, help="of (c)")
    parser.add_argument("--recall-users", type=int, default=1000)
    parser.add_argument("--quick", action="store_true", help="tiny presets: does it run?")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    if options.quick:
        options.users, options.items, options.recall_users = 4, 2000, 20
        options.digit_items = 2000
    keep_freed_memory()
    with TemporaryDirectory() as folder:
        found = measure(options, Path(folder))
    print(json.dumps(found, indent=2) if options.json else table(found))


if __name__ == "__main__":
    main()
