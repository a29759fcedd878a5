"""What the training loop asks of MaskGR: batches with their noise, the loss, validation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from maskgr.artefact import write_file
from maskgr.data.sequences import Sequences
from maskgr.data.splits import Split
from maskgr.decoding.config import DecodingConfig
from maskgr.evaluation.metrics import recall
from maskgr.models.causal import repeat_runs
from maskgr.models.distillation import DenseTeacher
from maskgr.models.maskgr.noise import Noise
from maskgr.models.maskgr.objective import masked_loss, masked_rows, negative_elbo, validation_bound
from maskgr.models.network import Part, load_network, save_network
from maskgr.nn.layout import Layout
from maskgr.nn.softmax import (
    Bonus,
    NegativeSampler,
    catalogue_cross_entropy,
    sampled_cross_entropy,
)
from maskgr.training.batches import by_length
from maskgr.training.distributed import World

if TYPE_CHECKING:
    from maskgr.models.maskgr import MaskGR

BEST = "best.network.safetensors"
# A batch goes through the network in pieces whose intermediate results stay near the CPU: faster
# than all at once, and a fraction of the memory. While a dense head learns, a batch stays whole:
# each piece would compute the whole catalogue's vectors again.
PIECE_TOKENS = 2048


@dataclass(frozen=True, eq=False)
class Piece:
    """Some sequences of a batch, with their noise."""

    batch: Sequences
    noise: Noise  # of as many copies of each sequence as are masked
    negatives: Tensor | None  # (drawn,) items that stand for the catalogue
    uniform: Tensor | None  # (copies of items,) what decides which are taught


@dataclass(eq=False)
class Task:
    """What the training loop asks of MaskGR (see `maskgr.training.fit.Task`)."""

    model: MaskGR
    split: Split
    world: World
    part: Part | None = None  # what is trained; None is all

    def __post_init__(self) -> None:
        config = self.model.config
        self.network: nn.Module = self.model.network
        self.model.network.learn_only(self.part)
        self.copies = 1 if self.part == "dense" else config.objective.copies
        self.catalogue = self.model.catalogue if config.objective.catalogue_aware else None
        self.digits = self.model.digits
        self.validation = self.split.validation
        self.frozen_table: Tensor | None = None  # (items, width) while digits learn alone
        self.sampler = None
        if self.model.network.dense and config.dense.negatives:
            taken = np.bincount(self.split.train.values, minlength=len(self.digits))
            self.sampler = NegativeSampler(torch.from_numpy(taken), config.dense.negatives)
        self.sample = self.validation.sample(config.loop.validation_users, config.seed)

    def prepare(self, batch: Sequences, seed: int) -> tuple[list[Piece], float]:
        # Noise is drawn on the CPU for the whole batch, alike in every process, on every device.
        digits = self.model.network.digits
        lengths = np.repeat(batch.lengths * digits, self.copies)
        layout = Layout.of(lengths.tolist())
        generator = torch.Generator().manual_seed(seed)
        noise = self.model.network.draw_noise(layout, self.model.config.objective, generator)
        share = np.arange(self.world.rank, len(batch), self.world.size)
        fixed = not self.model.network.dense or self.part == "digits"
        small = self.model.device.type == "cpu" and fixed
        limit = PIECE_TOKENS if small else len(layout.sequences)
        filled = (np.cumsum(batch.lengths[share] * self.tokens_per_item) - 1) // limit
        parts = np.split(share, np.flatnonzero(np.diff(filled)) + 1)
        drawn = self.sampler.draw(generator) if self.sampler else None
        uniform = None
        if self.model.config.objective.distil:
            uniform = torch.rand(len(layout.sequences) // digits, generator=generator)
        pieces = []
        for part in parts:
            copies = part[:, None] * self.copies + np.arange(self.copies)
            tokens = _tokens(layout, copies.ravel())
            own = None if uniform is None else uniform[tokens[::digits]]
            pieces.append(Piece(batch.select(part), noise.part(tokens), drawn, own))
        return pieces, float(noise.tokens) / self.copies

    def loss(self, piece: Piece) -> Tensor:
        network, device = self.model.network, self.model.device
        zero = torch.zeros((), device=device)
        if not len(piece.batch):  # more processes than sequences
            return 0 * sum((p.sum() for p in network.parameters() if p.requires_grad), zero)
        layout = Layout.of((piece.batch.lengths * network.digits).tolist(), device)
        noise = piece.noise.to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            numbers = torch.from_numpy(piece.batch.values).to(device).long()
            digits = self.digits[numbers]
            if network.causal:
                return self._causal_loss(piece, numbers, layout, noise)
            loss, states = negative_elbo(network, digits, layout, noise, self.catalogue, numbers)
            if states.queries is None:
                return loss.total
            asked = numbers[states.predicted]
            return loss.total + self._dense_loss(piece, states.queries, asked, self._choice(piece))

    def _causal_loss(self, piece: Piece, numbers: Tensor, layout: Layout, noise: Noise) -> Tensor:
        """Of the part that is trained; every item is asked for, so all of them have queries."""
        network, device = self.model.network, numbers.device
        total = torch.zeros((), device=device)
        past = network.remember(self.digits[numbers], layout, numbers)
        queries = network.queries(past) if network.dense else None
        choice = self._choice(piece)
        if queries is not None and self.part != "digits":
            total = total + self._dense_loss(piece, queries, numbers, choice)
        if self.part == "dense":
            return total
        lengths = torch.from_numpy(piece.batch.lengths)
        owners = repeat_runs(lengths, self.copies).to(device)  # (copies of items,)
        repeated = (lengths * network.digits).repeat_interleave(self.copies)
        copied = Layout.of(repeated.tolist(), device)
        digits, lesson = self.digits[numbers[owners]], None
        if queries is not None and choice is not None and piece.uniform is not None:
            share = self.model.config.objective.distil
            teacher = DenseTeacher(share, queries, *choice, self.model.catalogue)
            revealed = ~noise.masked.view_as(digits)
            digits, lesson = teacher.teach(numbers, owners, piece.uniform.to(device), revealed)
        past = past.repeated(self.copies, copied, network.digits, network.unit)
        rows, _ = masked_rows(noise.masked, network.digits)
        states = network.predict(past, digits, noise.masked, copied, rows)
        loss = masked_loss(network, states, digits, noise, self.catalogue, lesson)
        return total + loss.total / self.copies

    def _choice(self, piece: Piece) -> tuple[Tensor, Bonus | None] | None:
        """What the dense head chooses from: the catalogue's vectors (items, width), and what the
        scores of items get that came before in a sequence; nothing if some stand for all."""
        network = self.model.network
        if not network.dense or piece.negatives is not None:
            return None
        bonus, repeat = None, network.head.repeat_bias
        if repeat is not None:
            rows, items = _had_before(piece.batch, self.model.device)
            bonus = Bonus(rows, items, repeat.expand(len(rows)))
        if self.part != "digits":
            return network.table(self.digits), bonus
        if self.frozen_table is None:
            with torch.no_grad():
                self.frozen_table = network.table(self.digits)
        return self.frozen_table, bonus

    def _dense_loss(
        self,
        piece: Piece,
        queries: Tensor,
        targets: Tensor,
        choice: tuple[Tensor, Bonus | None] | None,
    ) -> Tensor:
        """The summed cross-entropy of the items `targets` (rows,), asked for by `queries` (rows,
        width), among all of the catalogue, or among those drawn to stand for it."""
        network, weight = self.model.network, self.model.config.dense.weight
        if choice is not None:
            table, bonus = choice
            return weight * catalogue_cross_entropy(queries, table, targets, bonus=bonus)
        assert piece.negatives is not None
        assert self.sampler is not None
        drawn = piece.negatives.to(targets.device)
        return weight * sampled_cross_entropy(
            queries,
            network.table(self.digits[targets], targets),
            network.table(self.digits[drawn], drawn),
            log_q_negatives=self.sampler.log_q(drawn),
            hits=targets[:, None] == drawn,
        )

    @property
    def tokens_per_item(self) -> int:
        return self.model.network.digits * self.copies

    def tokens(self, batch: Sequences) -> int:
        return len(batch.values) * self.tokens_per_item

    def validate(self, *, everyone: bool) -> dict[str, float]:
        asked = self.validation if everyone else self.sample
        own = np.arange(self.world.rank, len(asked.users), self.world.size)
        recent = asked.histories.select(own).last(self.model.config.history_limit)
        allowed = np.ones(len(self.model.sids.digits), dtype=bool)
        # One step scores every item exactly: quick, and it tells better networks from worse.
        quick = DecodingConfig(steps=1, retrieval="generative")
        top = min(10, len(allowed))
        if self.part != "digits":
            self.model.forget()
        found = {}
        if self.part != "dense":
            found["generative_recall@10"] = self.model.rank(recent, top, allowed, None, quick).items
        if self.model.network.dense:
            quick = replace(quick, retrieval="dense")
            found["dense_recall@10"] = self.model.rank(recent, top, allowed, None, quick).items
        result = {
            name: self._share(ranked, asked.targets[own], len(asked.users))
            for name, ranked in found.items()
        }
        result["recall@10"] = sum(result.values()) / len(result)
        if self.part != "dense" and not everyone:
            result["bound"] = validation_bound(
                self.model.network, self._held_out(), self.model.config.seed, self.catalogue
            )
        return result

    def score(self, found: dict[str, float]) -> float:
        # The digits alone improve by less at a time than the recall of a sample of users varies.
        return -found["bound"] if self.part == "digits" else found["recall@10"]

    def _share(
        self, ranked: npt.NDArray[np.int32], targets: npt.NDArray[np.int32], users: int
    ) -> float:
        """recall@10 over all processes' users."""
        hits = torch.tensor(float(recall(ranked, targets, 10).sum()), device=self.world.device)
        return float(self.world.total(hits)) / users

    def _held_out(self) -> Iterator[tuple[Tensor, Tensor, Layout]]:
        """The sample's histories with their targets, in portions."""
        pairs = zip(self.sample.histories, self.sample.targets, strict=True)
        joined = Sequences.of([np.concatenate(pair) for pair in pairs])
        joined = by_length(joined.last(self.model.config.history_limit + 1))
        for part in self.model.portions(joined):
            numbers, layout = self.model.batch(by_length(joined.select(part)))
            yield self.digits[numbers], numbers, layout

    def keep(self, run: Path) -> None:
        with write_file(run / BEST) as draft:
            save_network(self.model.network, draft)

    def restore(self, run: Path) -> None:
        load_network(self.model.network, run / BEST)


def _tokens(layout: Layout, part: npt.NDArray[np.int64]) -> Tensor:
    """(tokens of the batch,) whether they are of the sequences `part`."""
    chosen = torch.zeros(int(layout.sequences[-1]) + 1, dtype=torch.bool)
    chosen[torch.from_numpy(part)] = True
    return chosen[layout.sequences]


def _had_before(batch: Sequences, device: torch.device) -> tuple[Tensor, Tensor]:
    """(pairs,) twice: each item of the batch, by its place there, with every item before it in its
    sequence, once."""
    places = batch.places
    later = np.repeat(np.arange(len(places)), places)
    ends = np.cumsum(places)
    within = np.arange(len(later)) - np.repeat(ends - places, places)
    earlier = batch.values[later - places[later] + within].astype(np.int64)
    if batch.repeats().any():
        size = int(batch.values.max()) + 1
        later, earlier = np.divmod(np.unique(later * size + earlier), size)
    return torch.from_numpy(later).to(device), torch.from_numpy(earlier).to(device)
