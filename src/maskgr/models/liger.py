"""LIGER (Yang et al., 2024): TIGER with dense retrieval.

The tokens of a history carry their item's text beside the digit. The encoder's state at the last
token of a history is a dense query, compared by cosine with the items' texts, mapped by the same
small network. Generated items, together with all items that no history of the training has, are
ranked by that cosine.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from maskgr.data.sequences import Counts
from maskgr.decoding.config import DecodingConfig, Retrieval
from maskgr.decoding.decoder import Ranking
from maskgr.decoding.denoiser import Denoiser
from maskgr.evaluation.ranking import Query
from maskgr.models.base import TrainConfig, query_filters
from maskgr.models.generative import without_gaps
from maskgr.models.tiger import (
    CPU,
    CPU_FIT,
    CPU_SIDS,
    PUBLISHED,
    PUBLISHED_FIT,
    PUBLISHED_SIDS,
    TINY,
    TINY_FIT,
    TINY_SIDS,
    Encoded,
    LeftToRight,
    TargetItems,
    Tiger,
    TigerConfig,
)
from maskgr.nn.scoring import best_items
from maskgr.nn.softmax import catalogue_cross_entropy, log_normaliser
from maskgr.nn.transformer import Dropout
from maskgr.settings import require_numbers
from maskgr.sids.semantic_ids import SemanticIds

TEMPERATURE = 0.07  # of the softmax over cosines, as published


@dataclass(frozen=True)
class LigerConfig(TigerConfig):
    """TIGER with text in its tokens and a dense query beside its digits."""

    text_hidden: int = 256
    """Entries between the two maps from an item's text to its vector."""

    def __post_init__(self) -> None:
        require_numbers(self, text_hidden=(1, 1_000_000))


class TextVectors(nn.Module):
    """A vector for every item, made of its text: a part of its tokens, and what it is found by."""

    embeddings: Tensor  # (items, any)
    mean: Tensor  # (any,) of the embeddings: what all texts have in common
    scale: Tensor  # () their standard deviation

    def __init__(self, width: int, hidden: int, embeddings: Tensor, dropout: float) -> None:
        super().__init__()
        embeddings = embeddings.float()
        self.register_buffer("embeddings", embeddings, persistent=False)
        self.register_buffer("mean", embeddings.mean(0))
        self.register_buffer("scale", embeddings.var(0, correction=0).mean().sqrt().clamp(min=1e-9))
        self.maps = nn.Sequential(
            nn.Linear(embeddings.shape[1], hidden),
            nn.LayerNorm(hidden),
            nn.GELU(),
            Dropout(dropout),
            nn.Linear(hidden, width),
        )

    def forward(self, numbers: Tensor | None = None) -> Tensor:
        """(items, width) of the items `numbers` (items,), or of the whole catalogue."""
        known = self.embeddings if numbers is None else self.embeddings.index_select(0, numbers)
        vectors: Tensor = self.maps((known - self.mean) / self.scale)
        return vectors


class Liger(Tiger):
    """TIGER with the dense part."""

    about: ClassVar = "tiger with text in its tokens and dense retrieval"
    Config: ClassVar[type[Any]] = LigerConfig
    piece_tokens = None  # each piece would compute the vectors of the whole catalogue
    retrievals: ClassVar[tuple[Retrieval, ...]] = ("unified", "generative", "dense")

    def __init__(self, config: TrainConfig, sids: SemanticIds, counts: Counts) -> None:
        super().__init__(config, sids, counts)
        own, width = config.model, self.network.width
        self.text = TextVectors(
            width, own.text_hidden, torch.from_numpy(sids.embeddings), self.network.dropout
        )
        self.item_position = nn.Embedding(config.history_limit, width)
        self.digit_position = nn.Embedding(self.levels, width)
        for position in (self.item_position, self.digit_position):
            nn.init.normal_(position.weight, std=0.02)
        self.input_norm = nn.LayerNorm(width)
        self._table: Tensor | None = None  # (items, width) while in evaluation mode

    def train(self, mode: bool = True) -> Self:
        self._table = None
        return super().train(mode)

    # The network

    def embed_items(self, numbers: Tensor, places: Tensor) -> Tensor:
        digits = super().embed_items(numbers, places)  # (items, levels, width)
        by_item = self.text(numbers) + self.item_position(places)  # (items, width)
        out: Tensor = self.input_norm(digits + by_item[:, None] + self.digit_position.weight)
        return out

    def table(self) -> Tensor:
        """(items, width) unit vectors of the catalogue; kept until `train` or `eval`."""
        if self._table is not None and not torch.is_grad_enabled():
            return self._table
        vectors = functional.normalize(self.text(), dim=1)
        if not (self.training or torch.is_grad_enabled()):
            self._table = vectors
        return vectors

    @torch.no_grad()
    def item_vectors(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        """What its dense retrieval compares: the mapped texts."""
        if self.training:
            self.eval()
        return self.table()[torch.from_numpy(numbers).to(self.device)].float().cpu().numpy()

    def queries(self, encoded: Encoded, ends: Tensor) -> Tensor:
        """(rows, width) of the tokens `ends` (rows,): products with the table are logits."""
        return functional.normalize(encoded.states.index_select(0, ends), dim=1) / TEMPERATURE

    # Training

    def loss(self, encoded: Encoded, targets: TargetItems) -> Tensor:
        """() both cross-entropies, of digits and of items. The step divides by the digits, and the
        two means count alike: so that of the items has a factor."""
        ends = _ends(encoded)
        if self.network.attention == "causal":  # a query at every item's last token
            ends = (encoded.layout.positions % self.levels == 0).nonzero().squeeze(1)
        queries = self.queries(encoded, ends)
        by_item = catalogue_cross_entropy(
            queries, self.table(), targets.numbers, weights=targets.weights
        )
        return super().loss(encoded, targets) + self.levels * by_item

    # Retrieval

    def retrieve(
        self, own: Denoiser, query: Query, decoding: DecodingConfig, *, trace: bool
    ) -> Ranking:
        kind, top = decoding.retrieval, query.top
        if kind == "generative":
            return self.search(own, query, decoding, trace=trace)
        assert isinstance(own, LeftToRight)
        queries = self.queries(own.encoded, _ends(own.encoded))
        if kind == "dense":
            return Ranking(*self._nearest(queries, query), None, None)
        # All beams are ranked anew, however few are asked for.
        query = replace(query, top=max(top, decoding.beams))
        found = self.search(own, query, decoding, trace=trace)
        items, scores = self._united(queries, found.items, query, decoding.beams)
        return replace(found, items=items[:, :top], scores=scores[:, :top])

    def _united(
        self, queries: Tensor, found: Tensor, query: Query, beams: int
    ) -> tuple[Tensor, Tensor]:
        """The first `beams` of the generated items `found` (users, any) and all items that were
        never trained on, ranked by their cosine; the other generated items come behind."""
        cold = torch.from_numpy(self.counts == 0).to(self.device)
        # One more, for which `found` has -1. A cold item is among the cold ones: not twice.
        known = functional.pad(~cold, (0, 1))
        warm = found.masked_fill(~known[found], -1)
        scores = self._log_probs(queries, warm)
        new, new_scores = self._nearest(queries, query, cold)
        head = torch.cat([warm[:, :beams], new], 1)
        head_scores = torch.cat([scores[:, :beams], new_scores], 1)
        head_scores, order = head_scores.sort(dim=1, descending=True, stable=True)
        items = torch.cat([head.gather(1, order), warm[:, beams:]], 1)
        scores = torch.cat([head_scores, scores[:, beams:]], 1)
        items, scores = without_gaps(items, scores, query.top)
        return items, scores.cummin(1).values  # whatever comes behind scores no higher

    def _nearest(
        self, queries: Tensor, query: Query, among: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """(users, top) the items of the highest cosine, of all or `among` (items,) some."""
        allowed = query_filters(query, self.device).allowed
        if among is not None:
            allowed = among if allowed is None else allowed & among
        return best_items(
            queries, self.table(), query.top, allowed=allowed, excluded=query.excluded
        )

    def _log_probs(self, queries: Tensor, items: Tensor) -> Tensor:
        """(users, any) of `items` under the softmax over all cosines; -inf where an item is -1."""
        scores = torch.einsum("uw,utw->ut", queries, self.table()[items.clamp(min=0)])
        scores -= log_normaliser(queries, self.table())[:, None]
        return scores.masked_fill(items < 0, -torch.inf)


def _ends(encoded: Encoded) -> Tensor:
    """(sequences,) the last token of each history."""
    lengths = [length for count, length in encoded.layout.groups for _ in range(count)]
    return (torch.tensor(lengths).cumsum(0) - 1).to(encoded.states.device)


Liger.presets = {
    "tiny": TrainConfig("liger", LigerConfig(TINY_SIDS, TINY, text_hidden=64), TINY_FIT),
    # Compact, as tiger's. A step maps the texts of the whole catalogue, so its batch is larger.
    "cpu": TrainConfig("liger", LigerConfig(CPU_SIDS, CPU), replace(CPU_FIT, token_budget=3200)),
    # TIGER's network, as far as is known. The published map of texts has two hidden layers.
    "published": TrainConfig("liger", LigerConfig(PUBLISHED_SIDS, PUBLISHED), PUBLISHED_FIT),
}
