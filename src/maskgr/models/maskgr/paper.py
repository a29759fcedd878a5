"""MaskGR as the paper has it: the bidirectional encoder, equation 3, beams, and the dense head."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from maskgr.data.sequences import Sequences
from maskgr.data.splits import Holdout
from maskgr.decoding.config import DecodingConfig, Retrieval
from maskgr.decoding.decoder import Ranking, Search
from maskgr.decoding.denoiser import Denoiser
from maskgr.decoding.sampling import sample
from maskgr.errors import RequestError
from maskgr.evaluation.metrics import recall
from maskgr.evaluation.ranking import Query
from maskgr.models.base import TrainConfig, query_filters
from maskgr.models.generative import Generative
from maskgr.models.maskgr.config import NetworkConfig, PaperConfig
from maskgr.models.maskgr.history import Histories
from maskgr.models.maskgr.network import Network
from maskgr.models.maskgr.noise import Noise, draw_noise, mask_last_item, stratified_levels
from maskgr.models.maskgr.objective import negative_elbo
from maskgr.models.retrieval import portions
from maskgr.nn.digit_tokens import DigitTokens
from maskgr.nn.scoring import best_items
from maskgr.nn.softmax import catalogue_cross_entropy, log_normaliser
from maskgr.nn.transformer import Layout
from maskgr.sids.config import QuantizerConfig, SidsConfig
from maskgr.sids.semantic_ids import SemanticIds
from maskgr.training.batches import by_length
from maskgr.training.fit import Batch, FitConfig


@dataclass(frozen=True, eq=False)
class MaskedBatch(Batch):
    """Sequences with their noise."""

    noise: Noise
    n_levels: int

    def part(self, rows: np.ndarray) -> MaskedBatch:
        chosen = np.zeros(len(self.sequences), dtype=bool)
        chosen[rows] = True
        tokens = np.repeat(chosen, self.sequences.lengths * self.n_levels)
        noise = self.noise.part(torch.from_numpy(tokens))
        return replace(self, sequences=self.sequences.select(rows), noise=noise)


class PaperMaskGR(Generative):
    """The network with its semantic IDs: it is trained by `fit` and ranks items."""

    about: ClassVar = "the paper's MaskGR: bidirectional masked diffusion, independent digits"
    Config: ClassVar[type[Any]] = PaperConfig
    piece_tokens: int | None = 2048  # hidden states of this many tokens stay near a CPU

    def __init__(
        self, config: TrainConfig, sids: SemanticIds, counts: npt.NDArray[np.int64]
    ) -> None:
        super().__init__(config, sids, counts)
        own: PaperConfig = config.model
        self.own = own
        embeddings = torch.from_numpy(sids.embeddings) if own.dense.head else None
        self.network = Network(own.network, sids.codebook_sizes, own.dense, embeddings)

    # Training

    def prepare(self, sequences: Sequences, generator: torch.Generator) -> MaskedBatch:
        layout = Layout.of((sequences.lengths * self.levels).tolist())
        noise = draw_noise(layout.sequences, self.levels, self.own.objective, generator)
        return MaskedBatch(sequences, float(noise.tokens), noise, self.levels)

    def forward(self, batch: MaskedBatch) -> Tensor:
        if not len(batch.sequences):  # more processes than sequences
            return 0 * sum((p.sum() for p in self.parameters()), self.network.tokens.bias.sum())
        return self._loss(batch.sequences, batch.noise)

    def _loss(self, sequences: Sequences, noise: Noise) -> Tensor:
        """() equation 3 summed over the batch, and the dense head's cross-entropy."""
        layout = Layout.of((sequences.lengths * self.levels).tolist(), self.device)
        numbers = torch.from_numpy(sequences.values).to(self.device).long()
        index = self.index if self.own.objective.catalogue_aware else None
        loss, denoised = negative_elbo(
            self.network, self.codes[numbers], layout, noise.to(self.device), numbers, index
        )
        if denoised.queries is None or denoised.predicted is None or not self.training:
            return loss
        assert self.network.head is not None
        targets = numbers[denoised.predicted]
        return loss + catalogue_cross_entropy(denoised.queries, self.network.head.table, targets)

    def validate(self, holdout: Holdout) -> dict[str, float]:
        """One step scores every item exactly: quick, and it tells better networks from worse."""
        ways: list[Retrieval] = ["generative"]
        if self.network.head is not None:
            ways.append("dense")
        query = Query(holdout.histories, min(10, len(self.codes)))
        hits = [
            recall(
                self.decode(query, DecodingConfig(retrieval=way, steps=1)).items,
                holdout.targets,
                10,
            ).mean()
            for way in ways
        ]
        return {"recall@10": float(np.mean(hits)), "bound": self.bound(holdout)}

    @torch.no_grad()
    def bound(self, holdout: Holdout) -> float:
        """Nats an item: the negative ELBO of the held-out items alone, given clean histories.

        The masks are the same for the same seed, so values of one run can be compared.
        """
        self.eval()
        pairs = zip(holdout.histories, holdout.targets[:, 0], strict=True)
        joined = Sequences.of([np.append(history, target) for history, target in pairs])
        joined = by_length(joined.last(self.config.history_limit + 1))
        generator, nats = torch.Generator().manual_seed(self.config.seed), 0.0
        for rows in portions(joined, self.config.history_limit + 1):
            part = joined.select(rows)
            layout = Layout.of((part.lengths * self.levels).tolist())
            levels = stratified_levels(len(part), generator)
            masked, noise = mask_last_item(levels, layout.sequences, self.levels, generator)
            own = Noise(masked, noise[layout.sequences], masked.sum())
            nats += float(self._loss(part, own))
        return nats / len(joined)

    def digit_tokens(self) -> DigitTokens:
        return self.network.tokens

    # Retrieval

    def resolved(self, decoding: DecodingConfig) -> DecodingConfig:
        kind, cache = decoding.retrieval, decoding.cache
        for name in ("guidance", "remask"):
            if getattr(decoding, name):
                raise RequestError(f"maskgr-paper has no {name}; leave --{name} out, or use maskgr")
        if kind == "auto":
            kind = "unified" if self.network.head is not None else "generative"
        if cache == "auto":
            cache = "off" if self.own.network.attention == "full" else "frozen"
        if kind != "generative" and self.network.head is None:
            raise RequestError(
                f"{kind} retrieval needs a dense head, and this run has none; train with "
                "--set dense.head=true, or use generative retrieval"
            )
        steps = decoding.steps or self.levels
        return replace(decoding, retrieval=kind, cache=cache, steps=steps)

    def denoiser(self, histories: Sequences, decoding: DecodingConfig, items: int = 1) -> Histories:
        assert decoding.cache != "auto"
        return Histories(self.network, histories, self.codes, items=items, cache=decoding.cache)

    def retrieve(
        self, own: Denoiser, query: Query, decoding: DecodingConfig, *, trace: bool
    ) -> Ranking:
        if decoding.retrieval == "generative":
            return self.search(own, query, decoding, trace=trace)
        assert isinstance(own, Histories)
        if decoding.retrieval == "dense":
            return Ranking(*self._dense(own, query), None, None)
        # All beams are ranked anew, however few are asked for.
        query = replace(query, top=max(query.top, decoding.beams))
        found = self.search(own, query, decoding, trace=trace)
        items, scores = self._by_dense_score(own, found.items, decoding.beams)
        return replace(found, items=items, scores=scores)

    @property
    def catalogue_aware(self) -> bool:
        return self.own.objective.catalogue_aware

    def _dense(self, own: Histories, query: Query) -> tuple[Tensor, Tensor]:
        """Nearest items to the predicted embedding."""
        assert self.network.head is not None
        allowed, table = query_filters(query, self.device).allowed, self.network.head.table
        return best_items(own.queries(), table, query.top, allowed=allowed, excluded=query.excluded)

    def _by_dense_score(self, own: Histories, items: Tensor, beams: int) -> tuple[Tensor, Tensor]:
        """The first `beams` items (users, top) ranked anew by their dense log-probability."""
        assert self.network.head is not None
        table, queries = self.network.head.table, own.queries()
        total = log_normaliser(queries, table)
        scores = torch.einsum("ud,utd->ut", queries, table[items.clamp(min=0)]) - total[:, None]
        scores = scores.masked_fill(items < 0, -torch.inf)
        head, order = scores[:, :beams].sort(dim=1, descending=True, stable=True)
        first = items[:, :beams].gather(1, order)
        return torch.cat([first, items[:, beams:]], 1), torch.cat([head, scores[:, beams:]], 1)

    @torch.no_grad()
    def sessions(
        self, query: Query, items: int, decoding: DecodingConfig, *, repeats: bool
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        self.eval()
        limit = self.config.history_limit
        sets = np.full((len(query.histories), query.top, items), -1, dtype=np.int64)
        scores = np.full(sets.shape[:2], -np.inf, dtype=np.float32)
        how = Search(decoding.beams, decoding.order, decoding.steps or items * self.levels)
        for rows in portions(query.histories, limit):
            part = query.select(rows)
            own = self.denoiser(part.histories.last(limit), self.resolved(decoding), items)
            found = self.searcher(decoding.constrained).sessions(
                own, query.top, how, **self.request(part), repeats=repeats
            )
            sets[rows], scores[rows] = found.items.cpu().numpy(), found.scores.cpu().numpy()
        return sets, scores

    @torch.no_grad()
    def sample(
        self, query: Query, *, steps: int, temperature: float, seed: int
    ) -> npt.NDArray[np.int64]:
        self.eval()
        limit = self.config.history_limit
        drawn = np.full((len(query.histories), query.top), -1, dtype=np.int64)
        generator = torch.Generator(self.device).manual_seed(seed)
        for rows in portions(query.histories, limit):
            part = query.select(rows)
            found = sample(
                self.denoiser(part.histories.last(limit), self.resolved(self.decoding())),
                self.index,
                count=query.top,
                steps=steps or self.levels,
                temperature=temperature,
                generator=generator,
                filters=query_filters(part, self.device),
            )
            drawn[rows] = found.items[:, :, 0].cpu().numpy()
        return drawn


PaperMaskGR.presets = {
    # Seconds to minutes: for tests.
    "tiny-paper": TrainConfig(
        "maskgr-paper",
        PaperConfig(
            sids=SidsConfig(quantizer=QuantizerConfig(levels=3, codes=64)),
            network=NetworkConfig(layers=2, width=64, heads=2, hidden=256),
        ),
        FitConfig(steps=600, token_budget=8192, learning_rate=3e-3, validations=6),
    ),
    # As published: Section 4.1 and the appendix. Its batch of 8,192 histories is 17 budgets.
    "paper": TrainConfig(
        "maskgr-paper",
        PaperConfig(
            sids=SidsConfig(quantizer=QuantizerConfig(components=0)),
            network=NetworkConfig(
                layers=8, width=128, heads=8, hidden=3072, dropout=0.25, logits="vocabulary"
            ),
        ),
        FitConfig(steps=20_000, accumulate=17, learning_rate=5e-3, ema=0.0),
    ),
}
