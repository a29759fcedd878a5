"""What models that generate semantic IDs have in common: digits, beam search, items and files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
import polars as pl
import torch
from torch import Tensor
from torch.nn import functional

from maskgr.data.sequences import Sequences
from maskgr.data.splits import Holdout
from maskgr.decoding.beams import Step
from maskgr.decoding.config import DecodingConfig
from maskgr.decoding.decoder import Decoder, Ranking, Search
from maskgr.decoding.denoiser import Denoiser
from maskgr.decoding.matching import CodeIndex
from maskgr.decoding.orders import history_seeds
from maskgr.devices import pick_device
from maskgr.evaluation.ranking import Query, Ranked
from maskgr.models.base import TrainConfig, Training, query_filters
from maskgr.models.items import semantic_ids
from maskgr.models.retrieval import portions, validation_recall
from maskgr.nn.digit_tokens import DigitTokens
from maskgr.nn.weights import COUNTS, load_counts, load_weights, save_weights
from maskgr.sids.semantic_ids import SemanticIds
from maskgr.training.fit import Trainable

WEIGHTS = "network.safetensors"


class Generative(Trainable):
    """A network with its semantic IDs, which finds items by beam search over their digits."""

    needs: ClassVar = "item text or embeddings"
    supports_ddp: ClassVar = True
    uses_sids: ClassVar = True
    presets: ClassVar[Mapping[str, TrainConfig]]

    def __init__(
        self, config: TrainConfig, sids: SemanticIds, counts: npt.NDArray[np.int64]
    ) -> None:
        """`counts` (items,): training events of each item; they rank items that share an ID."""
        super().__init__()
        self.config, self.sids, self.counts = config, sids, counts
        self.codes: Tensor  # (items, levels)
        self.register_buffer("codes", torch.from_numpy(sids.digits).long(), persistent=False)

    @property
    def levels(self) -> int:
        return len(self.sids.codebook_sizes)

    @property
    def tokens_per_item(self) -> int:  # type: ignore[override]
        return self.levels

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @cached_property
    def index(self) -> CodeIndex:
        return CodeIndex(self.codes, self.sids.codebook_sizes)

    @classmethod
    def learn(cls, training: Training) -> Self:
        sids = semantic_ids(training)
        torch.manual_seed(training.config.seed)
        model = cls(training.config, sids, training.counts)
        training.fit(model)
        return model.eval()

    def validate(self, holdout: Holdout) -> dict[str, float]:
        return validation_recall(self.rank, holdout, len(self.codes))

    # Retrieval

    def decoding(self) -> DecodingConfig:
        own: DecodingConfig = self.config.model.decoding
        return own

    def resolved(self, decoding: DecodingConfig) -> DecodingConfig:
        """See `maskgr.models.base.Decodes`."""
        raise NotImplementedError

    def denoiser(self, histories: Sequences, decoding: DecodingConfig) -> Denoiser:
        """The network's answers for `histories`, which are short enough and come shortest first."""
        raise NotImplementedError

    def rank(self, query: Query) -> Ranked:
        return self.decode(query, self.decoding())

    def decode(self, query: Query, decoding: DecodingConfig) -> Ranked:
        return self.trace(query, decoding, steps=False)[0]

    @torch.no_grad()
    def trace(
        self, query: Query, decoding: DecodingConfig, *, steps: bool = True
    ) -> tuple[Ranked, list[list[Step]]]:
        if self.training:
            self.eval()
        decoding = self.resolved(decoding)
        users, limit = len(query.histories), self.config.history_limit
        items = np.full((users, query.top), -1, dtype=np.int32)
        scores = np.full((users, query.top), -np.inf, dtype=np.float32)
        traces: list[list[Step]] = [[] for _ in range(users)]
        invalid = []
        for rows in portions(query.histories, limit):
            part = query.select(rows)
            found = self.retrieve(
                self.denoiser(part.histories.last(limit), decoding), part, decoding, trace=steps
            )
            items[rows] = found.items[:, : query.top].cpu().numpy()
            scores[rows] = found.scores[:, : query.top].cpu().numpy()
            for row, own in zip(rows, found.traces or (), strict=False):
                traces[row] = own
            if found.invalid_share is not None:
                invalid.append(found.invalid_share * len(rows))
        return Ranked(items, scores, sum(invalid) / users if invalid else None), traces

    def retrieve(
        self, own: Denoiser, query: Query, decoding: DecodingConfig, *, trace: bool
    ) -> Ranking:
        """The answer to a query as `decoding` (resolved) says; at least `top` results."""
        return self.search(own, query, decoding, trace=trace)

    def search(
        self, own: Denoiser, query: Query, decoding: DecodingConfig, *, trace: bool
    ) -> Ranking:
        """The next items by beam search.

        The first `beams` results are those of a search with so many beams, whatever `top` is: a
        metric at K must not depend on which other K are asked for.
        """
        found = self._search(own, query, decoding, min(query.top, decoding.beams), trace)
        if query.top <= decoding.beams:
            return found
        wider = replace(decoding, beams=query.top)
        more = self._search(own, query, wider, query.top, trace=False)
        known = (more.items[:, :, None] == found.items[:, None, :]).any(2)
        items = torch.cat([found.items, more.items.masked_fill(known, -1)], 1)
        scores = torch.cat([found.scores, more.scores.masked_fill(known, -torch.inf)], 1)
        items, scores = without_gaps(items, scores, query.top)
        return replace(found, items=items, scores=scores)

    def _search(
        self, own: Denoiser, query: Query, decoding: DecodingConfig, top: int, trace: bool
    ) -> Ranking:
        available = len(self.codes) if query.allowed is None else int(query.allowed.sum())
        found = self.searcher(decoding.constrained).next_items(
            own,
            min(top, available),
            Search(decoding.beams, decoding.order, decoding.steps),
            **self.request(query),
            trace=trace,
        )
        missing = (0, top - found.items.shape[1])
        items = functional.pad(found.items, missing, value=-1)
        return replace(
            found, items=items, scores=functional.pad(found.scores, missing, value=-torch.inf)
        )

    def request(self, query: Query) -> dict[str, Any]:
        """What a search needs to know of a query beside its histories."""
        seeds = history_seeds(query.histories, self.config.seed)
        return {"filters": query_filters(query, self.device), "seeds": seeds}

    def searcher(self, constrained: bool) -> Decoder:
        return Decoder(
            self.index,
            constrained=constrained,
            renormalise=self.catalogue_aware and constrained,
            priority=torch.from_numpy(self.counts),
        )

    @property
    def catalogue_aware(self) -> bool:
        """Whether the network was trained to share the mass among the codes that items have."""
        return False

    # Items and files

    def semantic_ids(self) -> SemanticIds:
        return self.sids

    @torch.no_grad()
    def item_vectors(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        """The embeddings of an item's digits, side by side."""
        codes = self.codes[torch.from_numpy(numbers).to(self.device)]
        tokens = self.digit_tokens()
        return tokens.embed(tokens.numbers(codes)).flatten(1).float().cpu().numpy()

    def digit_tokens(self) -> DigitTokens:
        """The embeddings of digits."""
        raise NotImplementedError

    def with_items(self, items: pl.DataFrame, embeddings: npt.NDArray[Any] | None) -> Self:
        """New items get semantic IDs from the fitted codebooks; nothing is trained again."""
        sids = self.sids.encode_new(items, embeddings=embeddings, device=self.device.type)
        counts = np.concatenate([self.counts, np.zeros(len(items), dtype=np.int64)])
        model = type(self)(self.config, sids, counts)
        model.load_state_dict(self.state_dict())
        return model.to(self.device).eval()

    def save(self, folder: Path) -> None:
        save_weights(self, folder / WEIGHTS)
        self.sids.save(folder / "sids")
        np.save(folder / COUNTS, self.counts)

    @classmethod
    def load(cls, folder: Path, config: TrainConfig) -> Self:
        model = cls(config, SemanticIds.load(folder / "sids"), load_counts(folder))
        load_weights(model, folder / WEIGHTS)
        return model.to(pick_device(config.device)).eval()


def without_gaps(items: Tensor, scores: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """(users, top) the first results (users, any), those of -1 left out; -1 where no more are."""
    order = (items < 0).to(torch.int8).argsort(dim=1, stable=True)
    return items.gather(1, order)[:, :top], scores.gather(1, order)[:, :top]
