"""Training speed: as a share of the machine's matrix products, and beside common implementations.

    python benchmarks/train.py [DATA] [--picture cost.png] [--quick] [--json]

(a) FLOP/s of whole training steps of each preset's network over the FLOP/s of a plain float32
    matrix product, in as many processes as `maskgr train` starts, and in one. `maskgr` trains two
    networks, the history's encoder and the denoiser. Operations are those that torch counts in
    matrix products and attention;
(b) users a second beside a reference: sequences padded to the longest of their batch,
    `nn.TransformerEncoder`, logits where there is a loss (masked tokens, or real positions);
(c) the cost against the length of the history and the number of items.

The sides take turns in one run, so that a busy machine slows all of them.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from maskgr.data.open import open_dataset
from maskgr.data.sequences import Sequences
from maskgr.data.splits import Split, leave_out
from maskgr.devices import keep_freed_memory
from maskgr.models.base import TrainConfig, train_config
from maskgr.models.maskgr.model import MaskGR
from maskgr.models.maskgr.paper import PaperMaskGR
from maskgr.models.maskgr.stages import sasrec_config
from maskgr.models.sasrec import SASRec
from maskgr.nn.transformer import TransformerConfig
from maskgr.sids.semantic_ids import SemanticIds
from maskgr.training.batches import Batches, Place
from maskgr.training.distributed import MOST, World
from maskgr.training.fit import State, Trainable, Trainer
from maskgr.training.log import RunLog
from maskgr.training.workspace import Workspace

STAGES = {  # name -> model, preset, preset of a quick run
    "history": ("maskgr", "cpu", "tiny"),
    "denoiser": ("maskgr", "cpu", "tiny"),
    "sasrec": ("sasrec", "cpu", "tiny"),
    "paper": ("maskgr-paper", "paper", "tiny-paper"),
}
LONGEST = 120  # tokens of the reference's sequences, as in the authors' code
ALONE = World(0, 1, torch.device("cpu"))
PROCESSES = min(os.cpu_count() or 1, MOST)
ROUNDS = 5
# Operations that torch does not count by itself, and others with the same number of operations.
aten = torch.ops.aten
ALIKE = {
    aten.addmm_: aten.addmm,
    aten._scaled_dot_product_flash_attention_for_cpu: aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        aten._scaled_dot_product_flash_attention_backward
    ),
}
flop_registry.update({operation: flop_registry[other] for operation, other in ALIKE.items()})


@dataclass(frozen=True, eq=False)
class Problem:
    """The data of a training, and the semantic IDs of its items."""

    split: Split
    sids: Any  # SemanticIds, or the three of its fields that networks read

    @classmethod
    def open(cls, data: str, config: TrainConfig, folder: Path) -> Problem:
        """The dataset `data` with IDs of its items' text, which are made once in `folder`."""
        dataset, ids = open_dataset(data), folder / config.name
        if not ids.exists():
            SemanticIds.make(dataset, getattr(config.model, "sids", None)).save(ids)
        return cls(leave_out(dataset.histories, config.leave_out), SemanticIds.load(ids))

    @classmethod
    def random(cls, items: int, users: int = 100, length: int = 10) -> Problem:
        rng = np.random.default_rng(0)
        histories = Sequences.of([rng.integers(items, size=length + 2) for _ in range(users)])
        sids = SimpleNamespace(
            digits=rng.integers(256, size=(items, 4), dtype=np.int32),
            codebook_sizes=(256,) * 4,
            embeddings=rng.standard_normal((items, 256), dtype=np.float32),
        )
        return cls(leave_out(histories), sids)


def config_of(stage: str, quick: bool, settings: Sequence[str] = ()) -> TrainConfig:
    model, preset, small = STAGES[stage]
    return train_config(small if quick else preset, settings, model=model)


def network_of(stage: str, config: TrainConfig, problem: Problem) -> Trainable:
    """The network that a stage trains, with random weights: speed does not depend on them."""
    torch.manual_seed(0)
    counts = np.bincount(problem.split.train.values, minlength=len(problem.sids.digits))
    if stage == "paper":
        return PaperMaskGR(config, problem.sids, counts)
    if stage == "sasrec":
        return SASRec(config.model, counts, None, config.history_limit)
    source = "text" if config.model.items == "auto" else config.model.items
    text = None if source == "id" else torch.from_numpy(problem.sids.embeddings)
    history = SASRec(sasrec_config(config.model, source), counts, text, config.history_limit)
    return history if stage == "history" else MaskGR(config, problem.sids, history)


class Ours:
    """Training steps as `maskgr.training.fit` takes them."""

    def __init__(
        self, stage: str, config: TrainConfig, problem: Problem, world: World = ALONE
    ) -> None:
        network = network_of(stage, config, problem)
        self.budget = config.fit.token_budget // network.tokens_per_item
        self.trainer = Trainer(
            network,
            problem.split,
            Batches(problem.split.train, config.history_limit + 1, self.budget),
            config.fit,
            Workspace(Path("unused"), world),
            RunLog(Path("unused"), World(1, 1, world.device)).__enter__(),
            State(total=1000),
        )

    def step(self, batch: Sequences) -> None:
        self.trainer._step([(Place(), batch)])

    def batches(self, rounds: int) -> list[Sequences]:
        """One to warm up, and the rounds."""
        stream = self.trainer.batches.from_place(Place())
        return [next(stream)[1] for _ in range(rounds + 1)]

    def flops_per_item(self, batch: Sequences) -> float:
        with FlopCounterMode(display=False) as counter:
            self.step(batch)
        return counter.get_total_flops() / len(batch.values)


def worker(rank: int, size: int, port: int, options: dict[str, Any], pipe: Any) -> None:
    """A process that computes its share of each batch it is sent, with its share of the cores."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // size))
    keep_freed_memory()
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    config = config_of(options["stage"], options["quick"])
    problem = Problem.open(options["data"], config, options["folder"])
    ours = Ours(options["stage"], config, problem, World(rank, size, torch.device("cpu")))
    while (batch := pipe.recv()) is not None:
        ours.step(batch)
        pipe.send(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)
    dist.destroy_process_group()


class Together:
    """Processes that train together, or one with all cores."""

    def __init__(self, size: int, **options: Any) -> None:
        context = multiprocessing.get_context("spawn")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        pairs = [context.Pipe() for _ in range(size)]
        self.pipes = [own for own, _ in pairs]
        self.processes = [
            context.Process(target=worker, args=(rank, size, port, options, other))
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


def matrix_speed(size: int, seconds: float) -> float:
    """FLOP/s of float32 matrix products, sustained for as long as a training step lasts: the best
    of a few short products would catch a quiet moment of a shared machine that no step can."""
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


def efficiency(stage: str, data: str, folder: Path, quick: bool) -> dict[str, Any]:
    """(a) and the peak memory of a process that computes whole batches."""
    config = config_of(stage, quick)
    ours = Ours(stage, config, Problem.open(data, config, folder))
    first, *batches = ours.batches(1 if quick else ROUNDS)
    flops = ours.flops_per_item(first)
    options = {"stage": stage, "data": data, "folder": folder, "quick": quick}
    ways = {"one": Together(1, **options), "together": Together(PROCESSES, **options)}
    shares: dict[str, list[float]] = {name: [] for name in ways}
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    for way in ways.values():
        way.step(first)
    for batch in batches:
        light = matrix_speed(*((256, 0.01) if quick else (2048, 1.0)))
        for name, way in ways.items():
            speed = len(batch.values) / timed(way.step, batch)
            speeds[name].append(speed)
            shares[name].append(flops * speed / light)
    for way in ways.values():
        way.close()
    trained = [p for p in ours.trainer.network.parameters() if p.requires_grad]
    return {
        "stage": stage,
        "model": config.name,
        "parameters": sum(p.numel() for p in trained),
        "processes": PROCESSES,
        "megaflops_per_item": flops / 1e6,
        "items_per_second": float(np.median(speeds["together"])),
        "users_per_second": float(np.median(speeds["together"]))
        * np.mean([len(b) / len(b.values) for b in batches]),
        "share_of_matrix_product": float(np.median(shares["together"])),
        "share_in_one_process": float(np.median(shares["one"])),
        "peak_gib": ways["one"].peak_gib,
        "peak_gib_together": ways["together"].peak_gib,
    }


def torch_encoder(config: TransformerConfig) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(
        config.width,
        config.heads,
        config.hidden,
        config.dropout,
        activation="gelu",
        batch_first=True,
        norm_first=True,
    )
    return nn.TransformerEncoder(layer, config.layers, enable_nested_tensor=False)


def padded_rows(rows: Sequence[Tensor], most: int, padding: int) -> Tensor:
    """(rows, length) the last `most` of each, padded behind to the longest."""
    return nn.utils.rnn.pad_sequence([row[-most:] for row in rows], True, padding)


class Reference(nn.Module):
    """A common implementation of a training step, with padding."""

    optimizer: torch.optim.Optimizer

    def optimise(self, loss: Tensor) -> None:
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters(), 1.0)
        self.optimizer.step()


class PaperReference(Reference):
    """The paper's network and objective."""

    def __init__(self, config: TrainConfig, sids: Any) -> None:
        super().__init__()
        network, sizes = config.model.network, sids.codebook_sizes
        self.sizes = sizes
        self.mask, self.pad = sum(sizes), sum(sizes) + 1
        self.starts = torch.tensor(np.cumsum((0, *sizes[:-1])))
        self.codes = torch.from_numpy(sids.digits).long() + self.starts  # (items, levels) tokens
        self.tokens = nn.Embedding(self.pad + 1, network.width)
        self.positions = nn.Embedding(LONGEST, network.width)
        self.encoder = torch_encoder(network)
        self.optimizer = torch.optim.AdamW(self.parameters())

    def pack(self, histories: Sequences) -> Tensor:
        """(users, length) tokens."""
        rows = [self.codes[torch.from_numpy(items).long()].flatten() for items in histories]
        return padded_rows(rows, LONGEST, self.pad)

    def encode(self, tokens: Tensor) -> Tensor:
        """(users, length, width) hidden states of `tokens` (users, length)."""
        states = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        hidden: Tensor = self.encoder(states, src_key_padding_mask=tokens == self.pad)
        return hidden

    def step(self, batch: Sequences) -> None:
        tokens = self.pack(batch)
        real = tokens != self.pad
        level = (1 - torch.rand(len(batch), 1)).expand_as(tokens)
        masked = (torch.rand(tokens.shape) < level) & real
        hidden = self.encode(tokens.masked_fill(masked, self.mask))[masked]
        logits = hidden @ self.tokens.weight.T  # (masked tokens, vocabulary)
        losses = functional.cross_entropy(logits, tokens[masked], reduction="none")
        self.optimise((losses / level[masked]).sum() / real.sum())


class SASRecReference(Reference):
    """SASRec with cross-entropy over all items."""

    def __init__(self, config: TrainConfig, n_items: int) -> None:
        super().__init__()
        network = config.model.transformer
        self.length, self.pad = config.history_limit, n_items
        self.items = nn.Embedding(n_items + 1, network.width)
        self.positions = nn.Embedding(self.length, network.width)
        self.encoder = torch_encoder(network)
        self.optimizer = torch.optim.AdamW(self.parameters())

    def step(self, batch: Sequences) -> None:
        rows = [torch.from_numpy(items).long() for items in batch if len(items) > 1]
        inputs = padded_rows([row[:-1] for row in rows], self.length, self.pad)
        targets = padded_rows([row[1:] for row in rows], self.length, self.pad)
        length, real = inputs.shape[1], inputs != self.pad
        states = self.items(inputs) + self.positions.weight[:length]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        hidden = self.encoder(states, mask=mask, is_causal=True)[real]
        logits = hidden @ self.items.weight.T  # (targets, items + 1)
        self.optimise(functional.cross_entropy(logits, targets[real]))


def against_reference(stage: str, data: str, folder: Path, quick: bool) -> dict[str, Any]:
    """(b) on the same users."""
    config = config_of(stage, quick)
    problem = Problem.open(data, config, folder)
    ours = Ours(stage, config, problem)
    theirs: PaperReference | SASRecReference = (
        PaperReference(config, problem.sids)
        if stage == "paper"
        else SASRecReference(config, len(problem.sids.digits))
    )
    batches = ours.batches(1 if quick else ROUNDS)
    ours.step(batches[0])
    theirs.step(batches[0])
    own = other = users = 0.0
    for batch in batches[1:]:
        own += timed(ours.step, batch)
        other += timed(theirs.step, batch)
        users += len(batch)
    return {
        "stage": stage,
        "users_per_second": users / own,
        "reference_users_per_second": users / other,
        "ratio": other / own,
    }


def cost_by_length(lengths: list[int], quick: bool) -> dict[str, dict[int, float]]:
    """(c) milliseconds a user, with the same number of items in every batch."""
    found: dict[str, dict[int, float]] = {}
    for stage in ("history", "denoiser"):
        config = config_of(stage, quick, [f"history_limit={max(lengths)}"])
        problem = Problem.random(1000 if quick else 10_000)
        ours = Ours(stage, config, problem)
        found[stage] = {n: cost(ours, problem, ours.budget // n, n, quick) for n in lengths}
    return found


def cost_by_items(counts: list[int], quick: bool) -> dict[str, dict[int, float]]:
    """(c) milliseconds a user with histories of 10 items."""
    found: dict[str, dict[int, float]] = {}
    sampled = ["loss=sampled", "repeat_bias=false"]
    for name, stage, settings in (
        ("history", "history", []),
        ("history, sampled softmax", "history", sampled),
        ("denoiser", "denoiser", []),
    ):
        config = config_of(stage, quick, settings)
        found[name] = {}
        for count in counts:
            problem = Problem.random(count)
            ours = Ours(stage, config, problem)
            found[name][count] = cost(ours, problem, ours.budget // 10, 10, quick)
    return found


def cost(ours: Ours, problem: Problem, users: int, length: int, quick: bool) -> float:
    """Milliseconds a user: the best of three steps after one to warm up."""
    rng, n_items = np.random.default_rng(0), len(problem.sids.digits)
    batch = Sequences.of([rng.integers(n_items, size=length) for _ in range(max(1, users))])
    ours.step(batch)
    return 1e3 * min(timed(ours.step, batch) for _ in range(1 if quick else 3)) / len(batch)


def draw(found: dict[str, Any], file: Path) -> None:
    from maskgr.figures import new_figure, save_png

    figure = new_figure(10, 4)
    names = {"by_length": "items of a history", "by_items": "items of the catalogue"}
    for axes, (name, label) in zip(figure.subplots(1, 2), names.items(), strict=True):
        for stage, costs in found[name].items():
            axes.plot(*zip(*costs.items(), strict=True), marker="o", label=stage)
        axes.set(xlabel=label, ylabel="milliseconds a user", xscale="log", yscale="log")
        axes.legend()
    save_png(figure, file)


def measure(data: str, folder: Path, quick: bool) -> dict[str, Any]:
    return {
        "data": data,
        "stages": [efficiency(stage, data, folder, quick) for stage in STAGES],
        "references": [against_reference(s, data, folder, quick) for s in ("sasrec", "paper")],
        "by_length": cost_by_length([2, 5] if quick else [2, 5, 10, 20, 50, 100], quick),
        "by_items": cost_by_items([300, 1000] if quick else [1000, 10_000, 100_000], quick),
    }


def table(found: dict[str, Any]) -> str:
    lines = [
        f"{row['stage']:8} {row['parameters']:>10,} parameters {row['users_per_second']:>7,.0f} "
        f"users/s {row['items_per_second']:>7,.0f} items/s {row['megaflops_per_item']:>7,.1f} "
        f"MFLOP an item, {row['share_of_matrix_product']:.2f} of a matrix product's FLOP/s in "
        f"{row['processes']} processes, {row['share_in_one_process']:.2f} in one, peak "
        f"{row['peak_gib']:.2f} GiB in one"
        for row in found["stages"]
    ]
    lines += [
        f"{row['stage']:8} {row['users_per_second']:,.0f} users/s, reference "
        f"{row['reference_users_per_second']:,.0f}: {row['ratio']:.1f} times"
        for row in found["references"]
    ]
    for name in ("by_length", "by_items"):
        for stage, costs in found[name].items():
            values = ", ".join(f"{key:,}: {value:.2f}" for key, value in costs.items())
            lines.append(f"milliseconds a user {name.replace('_', ' ')}, {stage}: {values}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("data", nargs="?", default="synthetic", help="a dataset folder or source")
    parser.add_argument("--picture", type=Path, help="draw (c) to this PNG")
    parser.add_argument("--quick", action="store_true", help="tiny presets: does it run?")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    keep_freed_memory()
    with TemporaryDirectory() as folder:
        found = measure(options.data, Path(folder), options.quick)
    if options.picture:
        draw(found, options.picture)
    print(json.dumps(found, indent=2) if options.json else table(found))


if __name__ == "__main__":
    main()
