"""MaskGR itself: the network with its semantic IDs, as a model that is trained and ranks items."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from maskgr.artefact import is_artefact, write_file
from maskgr.config import DecodingConfig, TrainConfig
from maskgr.data.dataset import Dataset
from maskgr.data.sequences import Sequences
from maskgr.data.splits import Holdout, Split
from maskgr.devices import pick_device
from maskgr.diffusion.decoding import Decoder, Ranking, Search
from maskgr.diffusion.layout import Layout
from maskgr.diffusion.noise import Noise, draw_noise
from maskgr.diffusion.objective import negative_elbo, validation_bound
from maskgr.diffusion.sampling import sample
from maskgr.errors import ArtefactError, RequestError
from maskgr.evaluation.metrics import recall
from maskgr.items.catalogue import Catalogue
from maskgr.items.semantic_ids import SemanticIds
from maskgr.models.history import Cache, Histories
from maskgr.models.network import Network, flops_per_token
from maskgr.models.registry import Ranked, Workspace
from maskgr.training.batches import Batches, by_length
from maskgr.training.distributed import World, world
from maskgr.training.log import RunLog
from maskgr.training.loop import Trainer
from maskgr.training.picture import draw

RANK_TOKENS = 65_536  # of the histories that are encoded at once
# A batch goes through the network in pieces whose intermediate results stay near the CPU: faster
# than all at once, and a fraction of the memory.
PIECE_TOKENS = 2048
NETWORK = "network.safetensors"


@dataclass(eq=False)
class MaskGR:
    """The item numbers of `sids` are those of the dataset."""

    network: Network
    sids: SemanticIds
    config: TrainConfig

    @classmethod
    def train(cls, data: Dataset, split: Split, config: TrainConfig, work: Workspace) -> Self:
        with world(config.loop.device) as here:
            sids = _semantic_ids(data, config, work, here)
            torch.manual_seed(config.seed)
            network = Network(config.network, sids.codebook_sizes).to(here.device)
            model = cls(network, sids, config)
            budget = config.loop.token_budget // network.digits
            batches = Batches(split.train, config.history_limit + 1, budget, config.seed)
            task = Task(model, split.validation, here)
            with RunLog(work.run, writes=here.writes, progress=work.progress) as log:
                trainer = Trainer(task, batches, config.loop, work.run, here, log)
                if work.resume:
                    trainer.resume()
                if here.writes:
                    print(_about(model, batches), file=sys.stderr)
                found = trainer.train()
            if here.writes:
                print(
                    f"validation recall@10 of the best network, all users, one-step decoding: "
                    f"{found['recall@10']:.2%}",
                    file=sys.stderr,
                )
                _draw(work.run)
        return model

    @property
    def device(self) -> torch.device:
        return self.network.bias.device

    def rank(
        self,
        histories: Sequences,
        top: int,
        allowed: npt.NDArray[np.bool_],
        excluded: Sequences | None,
        decoding: DecodingConfig | None = None,
    ) -> Ranked:
        """Beam search over the digits of the allowed items (`maskgr.diffusion.decoding`)."""
        ranked = np.full((len(histories), top), -1, dtype=np.int32)
        scores = np.full((len(histories), top), -np.inf, dtype=np.float32)
        invalid = 0.0
        for rows, found in self.search(histories, top, allowed, excluded, decoding):
            depth = found.items.shape[1]
            ranked[rows, :depth] = found.items.cpu().numpy()
            scores[rows, :depth] = found.scores.cpu().numpy()
            invalid += found.invalid_share * len(rows) / len(histories)
        return Ranked(ranked, scores, invalid)

    def search(
        self,
        histories: Sequences,
        top: int,
        allowed: npt.NDArray[np.bool_],
        excluded: Sequences | None,
        decoding: DecodingConfig | None = None,
        *,
        items: int = 1,
        repeats: bool = False,
        trace: bool = False,
    ) -> Iterator[tuple[npt.NDArray[np.int64], Ranking]]:
        """Rows of `histories`, some at a time, with what was found for them: the next item, or
        sessions of several `items`, in which one comes once unless `repeats`."""
        decoding = decoding or self.config.decoding
        steps = decoding.steps or items * self.network.digits
        how = Search(decoding.beams, decoding.order, steps)
        decoder = self._decoder(allowed, decoding.constrained)
        generator = torch.Generator().manual_seed(decoding.seed)
        digits = torch.from_numpy(self.sids.digits).to(self.device).long()
        for rows in _portions(histories, self.network.digits):
            own = Histories(
                self.network,
                histories.select(rows),
                digits,
                items=items,
                cache=self._cache(decoding),
            )
            barred = None if excluded is None else _padded(excluded.select(rows), self.device)
            exclusions = None if barred is None else decoder.catalogue.exclusions(barred)
            found = decoder.sessions(
                own,
                min(top, int(allowed.sum())) if items == 1 else top,
                how,
                excluded=exclusions,
                repeats=repeats,
                generator=generator,
                trace=trace,
            )
            if items == 1:
                found = replace(found, items=found.items.squeeze(2))
            yield rows, found

    def sample(
        self,
        histories: Sequences,
        count: int,
        allowed: npt.NDArray[np.bool_],
        excluded: Sequences | None,
        *,
        steps: int,
        temperature: float,
        seed: int,
    ) -> npt.NDArray[np.int64]:
        """(histories, count) next items drawn, not searched (`maskgr.diffusion.sampling`)."""
        drawn = np.full((len(histories), count), -1, dtype=np.int64)
        generator = torch.Generator(self.device).manual_seed(seed)
        catalogue = self._decoder(allowed, True).catalogue
        digits = torch.from_numpy(self.sids.digits).to(self.device).long()
        cache = self._cache(self.config.decoding)
        for rows in _portions(histories, self.network.digits):
            own = Histories(self.network, histories.select(rows), digits, items=1, cache=cache)
            barred = None if excluded is None else _padded(excluded.select(rows), self.device)
            found = sample(
                own,
                catalogue,
                count=count,
                steps=steps,
                temperature=temperature,
                generator=generator,
                excluded=None if barred is None else catalogue.exclusions(barred),
            )
            drawn[rows] = found.items[:, :, 0].cpu().numpy()
        return drawn

    def _decoder(self, allowed: npt.NDArray[np.bool_], constrained: bool) -> Decoder:
        aware = self.config.objective.catalogue_aware and constrained
        catalogue = self.catalogue
        if not allowed.all():
            catalogue = catalogue.restrict(torch.from_numpy(allowed).to(self.device))
        return Decoder(
            catalogue, constrained=constrained, renormalise=self.catalogue if aware else None
        )

    def _cache(self, decoding: DecodingConfig) -> Cache:
        if decoding.cache == "auto":
            return "off" if self.config.network.attention == "full" else "frozen"
        return decoding.cache

    @cached_property
    def catalogue(self) -> Catalogue:
        return Catalogue(self.sids.digits, self.sids.codebook_sizes).to(self.device)

    def _digits(self, histories: Sequences) -> Tensor:
        """(items, digits) of all the histories, end to end."""
        digits = self.sids.digits[histories.values]
        return torch.from_numpy(digits).to(self.device).long()

    def save(self, folder: Path) -> None:
        save_file(_tensors(self.network), folder / NETWORK)
        self.sids.save(folder / "sids")

    @classmethod
    def load(cls, folder: Path, config: TrainConfig) -> Self:
        sids = SemanticIds.load(folder / "sids")
        network = Network(config.network, sids.codebook_sizes)
        _load(network, folder / NETWORK)
        return cls(network.to(pick_device(config.loop.device)).eval(), sids, config)


@dataclass(frozen=True, eq=False)
class Piece:
    """Some sequences of a batch, with their noise."""

    batch: Sequences
    noise: Noise


@dataclass(eq=False)
class Task:
    """What the training loop asks of MaskGR (see `maskgr.training.loop.Task`)."""

    model: MaskGR
    validation: Holdout
    world: World

    def __post_init__(self) -> None:
        config = self.model.config
        self.network: nn.Module = self.model.network
        self.catalogue = self.model.catalogue if config.objective.catalogue_aware else None
        self.sample = self.validation.sample(config.loop.validation_users, config.seed)

    def prepare(self, batch: Sequences, seed: int) -> tuple[list[Piece], float]:
        # Noise is drawn on the CPU for the whole batch, alike in every process, on every device.
        digits = self.model.network.digits
        layout = Layout.of((batch.lengths * digits).tolist())
        generator = torch.Generator().manual_seed(seed)
        noise = draw_noise(layout.sequences, digits, self.model.config.objective, generator)
        share = np.arange(self.world.rank, len(batch), self.world.size)
        limit = PIECE_TOKENS if self.model.device.type == "cpu" else len(layout.sequences)
        filled = np.cumsum(batch.lengths[share] * digits) // limit
        parts = np.split(share, np.flatnonzero(np.diff(filled)) + 1)
        pieces = [Piece(batch.select(part), _part(noise, layout, part)) for part in parts]
        return pieces, float(noise.tokens)

    def loss(self, piece: Piece) -> Tensor:
        network, device = self.model.network, self.model.device
        if not len(piece.batch):  # more processes than sequences
            return network.bias.sum() * 0
        layout = Layout.of((piece.batch.lengths * network.digits).tolist(), device)
        noise = piece.noise.to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            digits = self.model._digits(piece.batch)
            return negative_elbo(network, digits, layout, noise, self.catalogue).total

    def tokens(self, batch: Sequences) -> int:
        return len(batch.values) * self.model.network.digits

    def validate(self, *, everyone: bool) -> dict[str, float]:
        asked = self.validation if everyone else self.sample
        own = np.arange(self.world.rank, len(asked.users), self.world.size)
        recent = asked.histories.select(own).last(self.model.config.history_limit)
        targets = asked.targets[own]
        allowed = np.ones(len(self.model.sids.digits), dtype=bool)
        # One step scores every item exactly: quick, and it tells better networks from worse.
        quick = DecodingConfig(steps=1)
        ranked = self.model.rank(recent, min(10, len(allowed)), allowed, None, quick).items
        hits = torch.tensor(float(recall(ranked, targets, 10).sum()), device=self.world.device)
        found = {"recall@10": float(self.world.total(hits)) / len(asked.users)}
        if not everyone:
            found["bound"] = validation_bound(
                self.model.network, self._held_out(), self.model.config.seed, self.catalogue
            )
        return found

    def _held_out(self) -> Iterator[tuple[Tensor, Layout]]:
        """The sample's histories with their targets, in portions."""
        pairs = zip(self.sample.histories, self.sample.targets, strict=True)
        joined = Sequences.of([np.concatenate(pair) for pair in pairs])
        joined = by_length(joined.last(self.model.config.history_limit + 1))
        for part in _portions(joined, self.model.network.digits):
            portion = by_length(joined.select(part))
            lengths = (portion.lengths * self.model.network.digits).tolist()
            yield self.model._digits(portion), Layout.of(lengths, self.model.device)

    def keep(self, run: Path) -> None:
        with write_file(run / f"best.{NETWORK}") as draft:
            save_file(_tensors(self.model.network), draft)

    def restore(self, run: Path) -> None:
        _load(self.model.network, run / f"best.{NETWORK}")


def _about(model: MaskGR, batches: Batches) -> str:
    network = model.network
    lengths = batches.windows(0).lengths * network.digits
    length = float((lengths**2).sum() / lengths.sum())  # of the sequence that a token is in
    flops = flops_per_token(network.config, network.sizes, length)
    return (
        f"{sum(p.numel() for p in network.parameters()):,} parameters, {flops / 1e6:.1f} million "
        f"floating-point operations a token, on {model.device}"
    )


def _draw(run: Path) -> None:
    try:
        draw(run)
    except RequestError as error:
        print(f"note: {error}", file=sys.stderr)  # a run without a picture is still a run


def _semantic_ids(data: Dataset, config: TrainConfig, work: Workspace, here: World) -> SemanticIds:
    """Given, or made by one process and kept in the run, where the others find them."""
    folder = work.run / "sids"
    if here.writes and not (work.resume and is_artefact(folder)):
        sids = work.sids or SemanticIds.make(
            data,
            encoder=config.encoder,
            quantizer=config.quantizer,
            unique=config.unique,
            progress=work.progress,
        )
        sids.save(folder)
    here.wait()
    sids = SemanticIds.load(folder)
    if not sids.items["item_id"].equals(data.item_ids):
        raise ArtefactError(
            "the semantic IDs were made for other items than the dataset's; make them again"
        )
    return sids


def _part(noise: Noise, layout: Layout, part: npt.NDArray[np.int64]) -> Noise:
    """The noise of the sequences `part` of the batch."""
    chosen = torch.zeros(len(noise.levels), dtype=torch.bool)
    chosen[torch.from_numpy(part)] = True
    return Noise(noise.masked[chosen[layout.sequences]], noise.levels[chosen], noise.tokens)


def _portions(sequences: Sequences, digits: int) -> Iterator[npt.NDArray[np.int64]]:
    """Rows of similar length, as many at once as the token budget has room for."""
    order = np.argsort(sequences.lengths, kind="stable")
    room = RANK_TOKENS // digits
    filled = np.cumsum(sequences.lengths[order] + 1) // room
    yield from np.split(order, np.flatnonzero(np.diff(filled)) + 1)


def _padded(sequences: Sequences, device: torch.device) -> Tensor:
    """(sequences, longest) the values, -1 behind the last."""
    rows = torch.full((len(sequences), int(sequences.lengths.max(initial=1))), -1)
    rows[torch.from_numpy(sequences.owners), torch.from_numpy(sequences.places)] = torch.from_numpy(
        sequences.values
    ).long()
    return rows.to(device)


def _tensors(network: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().cpu().contiguous() for name, p in network.named_parameters()}


def _load(network: nn.Module, file: Path) -> None:
    try:
        network.load_state_dict(load_file(file))
    except (OSError, SafetensorError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise ArtefactError(f"{file} cannot be used ({reason}); train again") from error
