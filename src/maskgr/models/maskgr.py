"""MaskGR itself: the network with its semantic IDs, as a model that is trained and ranks items."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
import polars as pl
import torch
from torch import Tensor

from maskgr.config import DecodingConfig, TrainConfig
from maskgr.data.dataset import Dataset
from maskgr.data.sequences import Sequences
from maskgr.data.splits import Split
from maskgr.devices import pick_device
from maskgr.diffusion.decoding import Decoder, Ranking, Search
from maskgr.diffusion.layout import Layout
from maskgr.diffusion.sampling import sample
from maskgr.errors import ArtefactError, RequestError
from maskgr.items.catalogue import Catalogue
from maskgr.items.semantic_ids import SemanticIds
from maskgr.models import retrieval, stages
from maskgr.models.followers import Followers
from maskgr.models.history import Cache, Histories
from maskgr.models.network import Network, build_network, load_network, save_network
from maskgr.models.registry import Ranked, Workspace
from maskgr.models.retrieval import Asked, Dense, Pool, Weights

RANK_TOKENS = 65_536  # of the histories that are encoded at once
NETWORK, ABOUT = "network.safetensors", "retrieval.json"
FOLLOWERS = "followers.safetensors"


@dataclass(eq=False)
class MaskGR:
    """The item numbers of `sids` are those of the dataset."""

    shares_work: ClassVar[bool] = True
    network: Network
    sids: SemanticIds
    config: TrainConfig
    weights: Weights = field(default_factory=Weights)
    followers: Followers | None = None
    trained: int = 0  # items when it was trained; those behind them were added; 0: all

    @classmethod
    def train(cls, data: Dataset, split: Split, config: TrainConfig, work: Workspace) -> MaskGR:
        return stages.train(cls, data, split, config, work)

    def batch(self, sequences: Sequences) -> tuple[Tensor, Layout]:
        """(items,) the numbers of sequences, shortest first, and the layout of their digits."""
        lengths = (sequences.lengths * self.network.digits).tolist()
        numbers = torch.from_numpy(sequences.values).to(self.device).long()
        return numbers, Layout.of(lengths, self.device)

    def portions(self, sequences: Sequences) -> Iterator[npt.NDArray[np.int64]]:
        """Rows of similar length, as many at once as the token budget has room for."""
        order = np.argsort(sequences.lengths, kind="stable")
        room = RANK_TOKENS // self.network.digits
        filled = np.cumsum(sequences.lengths[order] + 1) // room
        yield from np.split(order, np.flatnonzero(np.diff(filled)) + 1)

    def with_weights(self, weights: Weights) -> Self:
        """The same model, with nothing computed anew."""
        other = replace(self, weights=weights)
        other.catalogue, other.digits = self.catalogue, self.digits
        other._decoders = self._decoders
        other.dense = replace(self.dense, weights=weights)
        return other

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
        """The best items in the way that `decoding.retrieval` names (`maskgr.models.retrieval`)."""
        decoding = decoding or self.config.decoding
        kind = self.retrieval(decoding)
        ranked = np.full((len(histories), top), -1, dtype=np.int32)
        scores = np.full((len(histories), top), -np.inf, dtype=np.float32)
        invalid = 0.0
        decoder = None if kind == "dense" else self._decoder(allowed, decoding.constrained)
        how, seed = self._how(decoding), decoding.seed
        for rows, asked in self._asked(histories, allowed, excluded, decoding):
            if decoder is None:
                items, values = self.dense.rank(asked, top)
            elif kind == "generative":
                repeat = self.weights.repeat_beams * self.network.repeats
                found = retrieval.generative(decoder, asked, how, top, seed, repeat)
                items, values = found.items.cpu().numpy(), found.scores.cpu().numpy()
                invalid += found.invalid_share * len(rows) / len(histories)
            elif kind == "unified":
                items, values = retrieval.unified(self.dense, decoder, asked, how, top, seed)
            else:
                both = self._pool(decoder, asked, how, top, seed)
                items, values = both.ranked(self.weights.fusion, top)
            ranked[rows, : items.shape[1]] = items
            scores[rows, : items.shape[1]] = values
        return Ranked(ranked, scores, invalid)

    def pools(
        self,
        histories: Sequences,
        top: int,
        allowed: npt.NDArray[np.bool_],
        excluded: Sequences | None,
    ) -> Iterator[tuple[npt.NDArray[np.int64], Pool]]:
        """Rows of `histories`, some at a time, with the candidates that `fused` chooses from."""
        decoding = self.config.decoding
        decoder, how = self._decoder(allowed, decoding.constrained), self._how(decoding)
        for rows, asked in self._asked(histories, allowed, excluded, decoding):
            yield rows, self._pool(decoder, asked, how, top, decoding.seed)

    def _pool(self, decoder: Decoder, asked: Asked, how: Search, top: int, seed: int) -> Pool:
        most = min(max(top, how.beams), len(asked.allowed))
        return retrieval.pool(self.dense, decoder, asked, how, most, seed, self.digits)

    def retrieval(self, decoding: DecodingConfig) -> str:
        """Which of the four ways."""
        kind = decoding.retrieval
        if kind == "auto" and self.network.dense:
            return "fused" if self.weights.fusion else "dense"
        if kind == "auto":
            return "generative"
        if kind != "generative" and not self.network.dense:
            raise RequestError(
                f"{kind} retrieval needs a dense head, and this run has none; train with "
                "--set dense.table=learned, or use generative retrieval"
            )
        return kind

    def _how(self, decoding: DecodingConfig, items: int = 1) -> Search:
        steps = decoding.steps or items * self.network.digits
        return Search(decoding.beams, decoding.order, steps)

    def _asked(
        self,
        histories: Sequences,
        allowed: npt.NDArray[np.bool_],
        excluded: Sequences | None,
        decoding: DecodingConfig,
        items: int = 1,
    ) -> Iterator[tuple[npt.NDArray[np.int64], Asked]]:
        """Rows of `histories`, as many at a time as there is room for."""
        for rows in self.portions(histories):
            seen = histories.select(rows)
            own = Histories(
                self.network, seen, self.digits, items=items, cache=self._cache(decoding)
            )
            barred = None if excluded is None else excluded.select(rows)
            yield rows, Asked(own, seen, allowed, barred)

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
        """Rows of `histories`, some at a time, with what unmasking found for them: the next item,
        or sessions of several `items`, in which one comes once unless `repeats`."""
        decoding = decoding or self.config.decoding
        decoder = self._decoder(allowed, decoding.constrained)
        generator = torch.Generator().manual_seed(decoding.seed)
        for rows, asked in self._asked(histories, allowed, excluded, decoding, items):
            found = decoder.sessions(
                asked.own,
                min(top, int(allowed.sum())) if items == 1 else top,
                self._how(decoding, items),
                excluded=retrieval.exclusions(decoder, asked),
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
        decoder = self._decoder(allowed, True)
        for rows, asked in self._asked(histories, allowed, excluded, self.config.decoding):
            found = sample(
                asked.own,
                decoder.catalogue,
                count=count,
                steps=steps,
                temperature=temperature,
                generator=generator,
                excluded=retrieval.exclusions(decoder, asked),
            )
            drawn[rows] = found.items[:, :, 0].cpu().numpy()
        return drawn

    def _decoder(self, allowed: npt.NDArray[np.bool_], constrained: bool) -> Decoder:
        if not allowed.all():
            few = self.catalogue.restrict(torch.from_numpy(allowed).to(self.device))
            return self._decoder_of(few, constrained)
        if constrained not in self._decoders:
            self._decoders[constrained] = self._decoder_of(self.catalogue, constrained)
        return self._decoders[constrained]

    @cached_property
    def _decoders(self) -> dict[bool, Decoder]:
        """Of the whole catalogue: what they learn of it serves all requests."""
        return {}

    def _decoder_of(self, catalogue: Catalogue, constrained: bool) -> Decoder:
        aware = self.config.objective.catalogue_aware and constrained
        return Decoder(
            catalogue, constrained=constrained, renormalise=self._at_training if aware else None
        )

    def _cache(self, decoding: DecodingConfig) -> Cache:
        if decoding.cache == "auto":
            return "off" if self.config.network.attention == "full" else "frozen"
        return decoding.cache

    @cached_property
    def _at_training(self) -> Catalogue:
        if self.trained in (0, len(self.catalogue)):
            return self.catalogue
        known = torch.arange(len(self.catalogue), device=self.device) < self.trained
        return self.catalogue.restrict(known)

    @cached_property
    def digits(self) -> Tensor:
        """(items, m) of the catalogue."""
        return torch.from_numpy(self.sids.digits).to(self.device).long()

    @cached_property
    def dense(self) -> Dense:
        return Dense.of(self.network, self.digits, self.followers, self.weights)

    def forget(self) -> None:
        """What was computed from the weights, after any of them has changed."""
        self.__dict__.pop("dense", None)

    @cached_property
    def catalogue(self) -> Catalogue:
        return Catalogue(self.sids.digits, self.sids.codebook_sizes).to(self.device)

    def with_items(self, items: pl.DataFrame, embeddings: npt.NDArray[Any] | None = None) -> MaskGR:
        """The same model with new items behind its own, by their text: nothing is trained again.

        They get semantic IDs from the codebooks, and vectors from digits and text."""
        sids = self.sids.encode_new(items, embeddings=embeddings)
        network = build_network(self.config, sids)
        state = self.network.state_dict()
        own = "items.own.weight"
        if own in state:  # zero is where every item's own part began
            state[own] = torch.cat(
                [state[own], state[own].new_zeros((len(items), state[own].shape[1]))]
            )
        network.load_state_dict(state)
        return MaskGR(
            network.to(self.device).eval(),
            sids,
            self.config,
            self.weights,
            None if self.followers is None else self.followers.more(len(items)),
            self.trained or len(self.sids.digits),
        )

    def save(self, folder: Path) -> None:
        save_network(self.network, folder / NETWORK)
        self.sids.save(folder / "sids")
        if self.followers is not None:
            self.followers.save(folder / FOLLOWERS)
        about = {**asdict(self.weights), "trained": self.trained}
        (folder / ABOUT).write_text(json.dumps(about) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: Path, config: TrainConfig) -> Self:
        sids = SemanticIds.load(folder / "sids")
        network = build_network(config, sids)
        load_network(network, folder / NETWORK)
        try:
            about = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
            trained = int(about.pop("trained"))
            weights = Weights(**{f.name: float(about[f.name]) for f in fields(Weights)})
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ArtefactError(f"{folder / ABOUT} is damaged ({error}); train again") from error
        network = network.to(pick_device(config.loop.device)).eval()
        followers = None
        if config.dense.followers and network.dense:
            followers = Followers.load(folder / FOLLOWERS, len(sids.digits))
        return cls(network, sids, config, weights, followers, trained)
