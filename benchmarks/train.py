"""Training speed: of the machine's matrix products, and beside what common implementations do.

    python benchmarks/train.py [DATA] [--picture cost.png] [--json]

(a) achieved FLOP/s of whole training steps, as the presets do them, over the FLOP/s of a plain
    float32 matrix product, in as many processes as `maskgr train` starts, and in one; `cpu` trains
    in two stages, each by itself;
(b) users a second beside a reference: every sequence padded to 120 tokens, `nn.TransformerEncoder`,
    logits over the whole vocabulary at every position;
(c) the cost against the length of the history and the number of items.

Everything is measured in one process, the sides taking turns, so that a busy machine slows all.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import resource
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from maskgr.config import PRESETS, DenseConfig, NetworkConfig
from maskgr.data.open import open_dataset
from maskgr.data.sequences import Sequences
from maskgr.data.splits import Holdout, Split, leave_out
from maskgr.devices import keep_freed_memory
from maskgr.models.maskgr import MaskGR
from maskgr.models.network import Part, build_network, flops_per_token
from maskgr.models.task import Task
from maskgr.nn.optimizer import build_optimizer, clip_gradients
from maskgr.training.batches import Batches, Place
from maskgr.training.distributed import MOST, World
from maskgr.training.fit import _Forward

SIZES = (256, 256, 256, 256, 6)  # the paper's, with a de-duplication digit
PADDED = 120
BUDGET = 16_384
STAGES: tuple[tuple[str, Part | None], ...] = (("cpu", "dense"), ("cpu", "digits"), ("paper", None))
ALONE = World(0, 1, torch.device("cpu"))
PROCESSES = min(os.cpu_count() or 1, MOST)
ROUNDS = 5


def matrix_speed(size: int = 2048, seconds: float = 1.0) -> float:
    """FLOP/s of float32 matrix products, sustained for a second: the speed of light here.

    Sustained, because a training step lasts seconds too: the best of a few short products would
    catch a moment of quiet on a shared machine that no step can.
    """
    a, b = torch.randn(size, size), torch.randn(size, size)
    spent, count = 0.0, 0
    while spent < seconds:
        spent += timed(torch.mm, a, b)
        count += 1
    return 2 * size**3 * count / spent


def timed(work: Callable[..., Any], *arguments: Any) -> float:
    start = time.perf_counter()
    work(*arguments)
    return time.perf_counter() - start


class Ours:
    """A training step as the loop does it."""

    def __init__(
        self,
        preset: str,
        digits: Tensor,
        part: Part | None = None,
        *,
        aware: bool | None = None,
        world: World = ALONE,
    ) -> None:
        config = PRESETS[preset]
        if aware is not None:  # the digits' loss alone
            objective = replace(config.objective, catalogue_aware=aware)
            objective = replace(objective, distil=0, copies=1)
            config = replace(config, objective=objective, dense=DenseConfig())
        self.world = world
        text = np.random.default_rng(0).standard_normal((len(digits), 256)).astype(np.float32)
        sizes = SIZES[: digits.shape[1]]
        sids: Any = SimpleNamespace(digits=digits.numpy(), codebook_sizes=sizes, embeddings=text)
        self.network = build_network(config, sids).train()
        self.optimizer = build_optimizer(self.network, 1e-3, 1e-3)
        model = MaskGR(self.network, sids, config)
        nobody = Holdout(np.empty(0, np.int64), Sequences.of([]), np.empty((0, 1), np.int32))
        split = Split(Sequences.of([]), nobody, nobody)
        self.task = Task(model, split, world, part)
        self.wrapped = world.wrap(_Forward(self.task))

    def step(self, batch: Sequences) -> None:
        pieces, tokens = self.task.prepare(batch, seed=0)
        self.optimizer.zero_grad()
        for number, piece in enumerate(pieces):
            last = number + 1 == len(pieces)
            apart = self.world.size > 1 and not last
            with self.wrapped.no_sync() if apart else contextlib.nullcontext():  # type: ignore[operator]
                (self.wrapped(piece) / tokens).backward()
        clip_gradients(self.network, 1.0)
        self.optimizer.step()


def worker(
    rank: int, size: int, port: int, preset: str, digits: Any, part: Part | None, pipe: Any
) -> None:
    """A process that does its share of each batch it is sent, with its share of the cores."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // size))
    keep_freed_memory()
    torch.manual_seed(0)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    here = World(rank, size, torch.device("cpu"))
    ours = Ours(preset, torch.from_numpy(digits), part, world=here)
    while (batch := pipe.recv()) is not None:
        ours.step(batch)
        pipe.send(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)
    dist.destroy_process_group()


class Together:
    """Processes that train together, or one with all cores."""

    def __init__(self, preset: str, digits: Tensor, part: Part | None, size: int) -> None:
        context = multiprocessing.get_context("spawn")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        pairs = [context.Pipe() for _ in range(size)]
        self.pipes = [own for own, _ in pairs]
        array = digits.numpy().copy()  # sending a tensor would move it under the feet of others
        self.processes = [
            context.Process(target=worker, args=(rank, size, port, preset, array, part, other))
            for rank, (_, other) in enumerate(pairs)
        ]
        for process in self.processes:
            process.start()
        self.peak_gib = 0.0

    def step(self, batch: Sequences) -> None:
        for pipe in self.pipes:
            pipe.send(batch)
        self.peak_gib = max(pipe.recv() for pipe in self.pipes)

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.send(None)
        for process in self.processes:
            process.join()


class Reference(nn.Module):
    """What common implementations do."""

    def __init__(self, config: NetworkConfig, digits: Tensor) -> None:
        super().__init__()
        vocabulary = sum(SIZES) + 2  # [MASK], [PAD]
        self.tokens = nn.Embedding(vocabulary, config.width)
        self.positions = nn.Embedding(PADDED, config.width)
        layer = nn.TransformerEncoderLayer(
            config.width,
            config.heads,
            config.hidden,
            config.dropout,
            activation="gelu",
            batch_first=True,
            norm_first=True,
        )
        self.encoder = nn.TransformerEncoder(layer, config.layers, enable_nested_tensor=False)
        self.digits = digits + torch.tensor(np.cumsum((0, *SIZES[:-1])))
        self.optimizer = torch.optim.AdamW(self.parameters())

    def step(self, batch: Sequences) -> None:
        tokens = torch.full((len(batch), PADDED), sum(SIZES) + 1)
        for row, items in enumerate(batch):
            flat = self.digits[torch.from_numpy(items).long()].flatten()[-PADDED:]
            tokens[row, : len(flat)] = flat
        padding = tokens == sum(SIZES) + 1
        level = 1 - torch.rand(len(batch), 1)
        masked = (torch.rand(tokens.shape) < level) & ~padding
        states = self.tokens(tokens.masked_fill(masked, sum(SIZES)))
        states = states + self.positions(torch.arange(PADDED))
        hidden = self.encoder(states, src_key_padding_mask=padding)
        logits = hidden @ self.tokens.weight.T  # (users, 120, vocabulary)
        losses = functional.cross_entropy(logits.flatten(0, 1), tokens.flatten(), reduction="none")
        loss = (losses.view_as(tokens) * masked / level).sum() / (~padding).sum()
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters(), 1.0)
        self.optimizer.step()


def histories(data: str) -> tuple[Sequences, Tensor]:
    """Training sequences of `data`, and digits of its items: random, as speed is the same."""
    dataset = open_dataset(data)
    rng = np.random.default_rng(0)
    digits = np.stack([rng.integers(size, size=len(dataset.items)) for size in SIZES], axis=1)
    return leave_out(dataset.histories).train, torch.from_numpy(digits)


def batches_of(sequences: Sequences, items: int) -> list[Sequences]:
    """Of so many items, one to warm up and the rounds."""
    stream = Batches(sequences, 21, items).from_place(Place())
    return [next(stream)[1] for _ in range(ROUNDS + 1)]


def efficiency(
    preset: str, part: Part | None, sequences: Sequences, digits: Tensor
) -> dict[str, Any]:
    """(a) and the peak memory of a process that did the whole batch."""
    if PRESETS[preset].unique != "append":
        digits = digits[:, :4]
    m, objective = digits.shape[1], PRESETS[preset].objective
    ours = Ours(preset, digits, part)
    network, copies = ours.network, ours.task.copies
    one = Together(preset, digits, part, 1)
    together = Together(preset, digits, part, PROCESSES)
    ratios: dict[str, list[float]] = {"one": [], "together": []}
    tokens_per_second, budget = [], PRESETS[preset].loop.token_budget
    for number, batch in enumerate(batches_of(sequences, budget // ours.task.tokens_per_item)):
        light = matrix_speed()
        lengths = np.repeat(batch.lengths * m, copies)
        length = float((lengths**2).sum() / lengths.sum())
        flops = flops_per_token(
            network, length, part=part, taught=objective.distil > 0, copies=copies
        )
        for name, way in (("one", one), ("together", together)):
            seconds = timed(way.step, batch)
            if number:  # the first is for warming up
                ratios[name].append(flops * lengths.sum() / seconds / light)
        tokens_per_second.append(lengths.sum() / seconds)
    one.close()
    together.close()
    return {
        "preset": preset,
        "part": part,
        "parameters": sum(p.numel() for p in network.parameters()),
        "processes": PROCESSES,
        "tokens_per_second": float(np.median(tokens_per_second)),
        "share_of_matrix_product": float(np.median(ratios["together"])),
        "share_in_one_process": float(np.median(ratios["one"])),
        "peak_gib": one.peak_gib,
        "peak_gib_together": together.peak_gib,
    }


def against_reference(batches: list[Sequences], digits: Tensor) -> dict[str, float]:
    """(b) on the same users."""
    config = PRESETS["paper"].network
    ours, theirs = Ours("paper", digits), Reference(config, digits)
    few = [batch.select(np.arange(0, len(batch), 4)) for batch in batches]  # the padded are slow
    ours.step(few[0])
    theirs.step(few[0])
    own = theirs_seconds = users = 0.0
    for batch in few[1:]:
        own += timed(ours.step, batch)
        theirs_seconds += timed(theirs.step, batch)
        users += len(batch)
    return {
        "users_per_second": users / own,
        "reference_users_per_second": users / theirs_seconds,
        "ratio": theirs_seconds / own,
    }


def cost_by_length(lengths: list[int]) -> dict[int, float]:
    """(c) milliseconds a user for the digits, with the same number of tokens in every batch."""
    ours = Ours("cpu", random_digits(10_000), aware=False)
    costs = {}
    for length in lengths:
        users = max(1, BUDGET // (length * len(SIZES)))
        rng = np.random.default_rng(0)
        batch = Sequences.of([rng.integers(10_000, size=length) for _ in range(users)])
        ours.step(batch)
        costs[length] = 1e3 * min(timed(ours.step, batch) for _ in range(3)) / users
    return costs


def cost_by_items(counts: list[int], *, aware: bool) -> dict[int, float]:
    """(c) milliseconds a user, without and with the catalogue-aware likelihood."""
    costs = {}
    for count in counts:
        digits = random_digits(count)
        ours = Ours("cpu", digits, aware=aware)
        rng = np.random.default_rng(0)
        batch = Sequences.of([rng.integers(count, size=10) for _ in range(BUDGET // 50)])
        ours.step(batch)
        best = min(timed(ours.step, batch) for _ in range(3))
        costs[count] = 1e3 * best / len(batch)
    return costs


def random_digits(count: int) -> Tensor:
    rng = np.random.default_rng(0)
    return torch.from_numpy(np.stack([rng.integers(s, size=count) for s in SIZES], axis=1))


def draw(found: dict[str, Any], file: Path) -> None:
    from maskgr.figures import new_figure, save_png

    figure = new_figure(10, 4)
    left, right = figure.subplots(1, 2)
    left.plot(*zip(*found["by_length"].items(), strict=True), marker="o")
    left.set(xlabel="items of a history", ylabel="milliseconds a user", xscale="log", yscale="log")
    for name in ("by_items", "by_items_catalogue_aware"):
        label = "catalogue-aware" if name.endswith("aware") else "plain"
        right.plot(*zip(*found[name].items(), strict=True), marker="o", label=label)
    right.set(xlabel="items of the catalogue", ylabel="milliseconds a user", xscale="log")
    right.set_ylim(bottom=0)
    right.legend()
    save_png(figure, file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", nargs="?", default="synthetic", help="a dataset folder or source")
    parser.add_argument("--picture", type=Path, help="draw (c) to this PNG")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    sequences, digits = histories(options.data)
    torch.manual_seed(0)
    keep_freed_memory()
    found: dict[str, Any] = {
        "data": options.data,
        "stages": [efficiency(preset, part, sequences, digits) for preset, part in STAGES],
        "reference": against_reference(batches_of(sequences, BUDGET // len(SIZES)), digits),
        "by_length": cost_by_length([2, 5, 10, 20, 50, 100]),
        "by_items": cost_by_items([100, 10_000, 1_000_000], aware=False),
        "by_items_catalogue_aware": cost_by_items([100, 10_000, 1_000_000], aware=True),
    }
    if options.picture:
        draw(found, options.picture)
    if options.json:
        print(json.dumps(found, indent=2))
        return
    for row in found["stages"]:
        print(
            f"{row['preset']:5} {row['part'] or '':6} {row['parameters']:>10,} parameters "
            f"{row['tokens_per_second']:>9,.0f} tokens/s, "
            f"{row['share_of_matrix_product']:.2f} of a matrix product's FLOP/s in "
            f"{row['processes']} processes, {row['share_in_one_process']:.2f} in one, "
            f"peak {row['peak_gib']:.2f} GiB in one"
        )
    row = found["reference"]
    print(
        f"paper  {row['users_per_second']:,.0f} users/s, reference "
        f"{row['reference_users_per_second']:,.0f}: {row['ratio']:.1f} times"
    )
    for name in ("by_length", "by_items", "by_items_catalogue_aware"):
        costs = ", ".join(f"{key:,}: {value:.2f}" for key, value in found[name].items())
        print(f"milliseconds a user {name.replace('_', ' ')}: {costs}")


if __name__ == "__main__":
    main()
