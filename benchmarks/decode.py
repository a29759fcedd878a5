"""Decoding speed: beside a reference that encodes the whole history again for every beam and step.

    python benchmarks/decode.py [DATA] [--run RUN] [--users 64] [--json]

The `paper` network (untrained: speed does not depend on weights) on histories of DATA, 10 beams,
one digit a step. The reference pads every sequence to 120 tokens and computes all logits; the beam
search itself is the same, so the ratio is that of the networks' work. With RUN, a trained run of
DATA, recall with the frozen cache is compared with recall without.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from maskgr.config import PRESETS
from maskgr.data.open import open_dataset
from maskgr.data.sequences import Sequences
from maskgr.data.splits import Holdout, leave_out
from maskgr.decoding.catalogue import Catalogue
from maskgr.decoding.config import DecodingConfig
from maskgr.decoding.decoder import Decoder, Search
from maskgr.devices import keep_freed_memory
from maskgr.evaluation.protocol import evaluate
from maskgr.models.maskgr import MaskGR
from maskgr.models.network import Network
from maskgr.recommender import Recommender
from maskgr.training.batches import by_length
from train import PADDED, SIZES, Reference, random_digits

BEAMS = 10
ROWS = 128  # padded sequences at once


class Padded:
    """The reference as decoding asks for it."""

    items = 1
    codebook_sizes = SIZES

    def __init__(self, network: Reference, histories: Sequences) -> None:
        self.network = network.eval()
        self.pad, self.mask = sum(SIZES) + 1, sum(SIZES)
        self.starts = torch.tensor(np.cumsum((0, *SIZES[:-1])))
        self.rows = torch.full((len(histories), PADDED), self.pad)
        self.ends = torch.from_numpy(histories.lengths * len(SIZES))
        for row, items in zip(self.rows, histories, strict=True):
            flat = network.digits[torch.from_numpy(items).long()].flatten()
            row[: len(flat)] = flat

    @property
    def users(self) -> int:
        return len(self.rows)

    def first(self) -> list[Tensor]:
        user = torch.arange(self.users)
        shape = (self.users, 1, len(SIZES))
        nothing = torch.zeros(shape, dtype=torch.int64)
        every = self(user, nothing, torch.zeros(shape).bool(), torch.ones(shape).bool())
        return [level.unsqueeze(1) for level in every]

    @torch.no_grad()
    def __call__(
        self, user: Tensor, digits: Tensor, revealed: Tensor, wanted: Tensor
    ) -> list[Tensor]:
        tokens = self.rows[user]
        place = self.ends[user][:, None] + torch.arange(len(SIZES))
        target = torch.where(revealed, digits + self.starts, self.mask)[:, 0]
        tokens.scatter_(1, place, target)
        logits = torch.cat([self._logits(part) for part in tokens.split(ROWS)])
        own = logits.gather(1, place[:, :, None].expand(-1, -1, logits.shape[2]))
        answers = []
        for level, size in enumerate(SIZES):
            start = int(self.starts[level])
            rows = own[wanted[:, 0, level], level, start : start + size]
            answers.append(rows.log_softmax(-1))
        return answers

    def _logits(self, tokens: Tensor) -> Tensor:
        states = self.network.tokens(tokens) + self.network.positions(torch.arange(PADDED))
        hidden = self.network.encoder(states, src_key_padding_mask=tokens == self.pad)
        logits: Tensor = hidden @ self.network.tokens.weight.T
        return logits


def model_of(digits: Tensor, preset: str = "paper") -> MaskGR:
    sids = SimpleNamespace(digits=digits.numpy().astype(np.int32), codebook_sizes=SIZES)
    network = Network(PRESETS[preset].network, SIZES)
    return MaskGR(network, sids, PRESETS[preset])  # type: ignore[arg-type]


def seconds_of(model: MaskGR, histories: Sequences, **changes: Any) -> float:
    how = replace(DecodingConfig(beams=BEAMS), **changes)
    everything = np.ones(len(model.sids.digits), dtype=bool)
    start = time.perf_counter()
    model.rank(histories, BEAMS, everything, None, how)
    return time.perf_counter() - start


def against_reference(model: MaskGR, histories: Sequences) -> dict[str, float]:
    digits = torch.from_numpy(model.sids.digits).long()
    decoder = Decoder(Catalogue(digits, SIZES))
    reference = Padded(Reference(PRESETS["paper"].network, digits), by_length(histories))
    how = Search(BEAMS, "greedy", len(SIZES))
    few = histories.select(np.arange(4))
    for cache in ("off", "frozen"):
        seconds_of(model, few, cache=cache)
    start = time.perf_counter()
    decoder.next_items(reference, BEAMS, how)
    theirs = time.perf_counter() - start
    found = {"reference_users_per_second": len(histories) / theirs}
    for cache in ("off", "frozen"):
        own = seconds_of(model, histories, cache=cache)
        found |= {f"{cache}_users_per_second": len(histories) / own, f"{cache}_ratio": theirs / own}
    return found


def scaling(model: MaskGR, histories: Sequences) -> dict[str, dict[Any, float]]:
    """Users a second with the frozen cache, as one thing changes at a time."""
    users = len(histories)
    rng = np.random.default_rng(0)
    draws = {n: [rng.integers(1000, size=n) for _ in range(users)] for n in (5, 20, 50)}
    return {
        "beams": {
            b: users / seconds_of(model, histories, cache="frozen", beams=b) for b in (10, 20, 50)
        },
        "steps": {
            s: users / seconds_of(model, histories, cache="frozen", steps=s) for s in range(1, 6)
        },
        "history": {
            n: users / seconds_of(model, Sequences.of(rows), cache="frozen")
            for n, rows in draws.items()
        },
    }


def latency(model: MaskGR, histories: Sequences) -> dict[str, float]:
    """Milliseconds of one request, the median of ten."""
    one = [histories.select(np.array([n])) for n in range(10)]
    return {
        cache: 1e3 * float(np.median([seconds_of(model, h, cache=cache) for h in one]))
        for cache in ("off", "frozen")
    }


def frozen_recall(run: str, holdout: Holdout) -> dict[str, float]:
    """recall@10 of a trained run with each cache, on the same users."""
    recommender = Recommender.load(run)
    found = {}
    for cache in ("off", "frozen"):
        how = recommender.decoding(cache=cache, beams=BEAMS)
        result = evaluate(recommender, holdout, decoding=how, protocols=("all",))
        found[cache] = result.metrics["all"]["recall@10"].mean
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", nargs="?", default="synthetic", help="a dataset folder or source")
    parser.add_argument("--run", help="a trained run, to compare recall with and without the cache")
    parser.add_argument("--users", type=int, default=64)
    parser.add_argument("--recall-users", type=int, default=1000)
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    torch.manual_seed(0)
    keep_freed_memory()
    dataset = open_dataset(options.data)
    test = leave_out(dataset.histories).test
    histories = test.sample(options.users).histories.last(20)
    model = model_of(random_digits(len(dataset.items)))
    found: dict[str, Any] = {
        "data": options.data,
        "reference": against_reference(model, histories),
        "scaling": scaling(model, histories),
        "latency_ms": latency(model, histories),
    }
    if options.run:
        found["recall@10"] = frozen_recall(options.run, test.sample(options.recall_users))
    if options.json:
        print(json.dumps(found, indent=2))
        return
    row = found["reference"]
    print(f"reference {row['reference_users_per_second']:.2f} users/s")
    for cache in ("off", "frozen"):
        speed, ratio = row[f"{cache}_users_per_second"], row[f"{cache}_ratio"]
        print(f"{cache:9} {speed:.2f} users/s: {ratio:.1f} times")
    for name, values in found["scaling"].items():
        speeds = ", ".join(f"{key}: {value:.1f}" for key, value in values.items())
        print(f"users/s (frozen) by {name}: {speeds}")
    print("one request: " + ", ".join(f"{k} {v:.0f} ms" for k, v in found["latency_ms"].items()))
    if options.run:
        print("recall@10: " + ", ".join(f"{k} {v:.4f}" for k, v in found["recall@10"].items()))


if __name__ == "__main__":
    main()
