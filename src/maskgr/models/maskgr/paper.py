"""MaskGR as the paper has it: the bidirectional encoder, equation 3, beams, and the dense head."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
import polars as pl
import torch
from torch import Tensor

from maskgr.data.sequences import Sequences
from maskgr.data.splits import Holdout
from maskgr.decoding.beams import Step
from maskgr.decoding.config import DecodingConfig, Retrieval
from maskgr.decoding.decoder import Decoder, Ranking, Search
from maskgr.decoding.matching import CodeIndex
from maskgr.decoding.orders import history_seeds
from maskgr.decoding.sampling import sample
from maskgr.devices import pick_device
from maskgr.errors import RequestError
from maskgr.evaluation.metrics import recall
from maskgr.evaluation.ranking import Query, Ranked
from maskgr.models.base import TrainConfig, Training, query_filters
from maskgr.models.items import semantic_ids
from maskgr.models.maskgr.config import NetworkConfig, PaperConfig
from maskgr.models.maskgr.history import Histories
from maskgr.models.maskgr.network import Network
from maskgr.models.maskgr.noise import Noise, draw_noise, mask_last_item, stratified_levels
from maskgr.models.maskgr.objective import negative_elbo
from maskgr.nn.scoring import best_items
from maskgr.nn.softmax import catalogue_cross_entropy, log_normaliser
from maskgr.nn.transformer import Layout
from maskgr.nn.weights import COUNTS, load_counts, load_weights, save_weights
from maskgr.sids.config import QuantizerConfig, SidsConfig
from maskgr.sids.semantic_ids import SemanticIds
from maskgr.training.batches import by_length
from maskgr.training.fit import Batch, FitConfig, Trainable

RANK_TOKENS = 65_536  # tokens of the histories that are encoded at once
WEIGHTS = "network.safetensors"


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


class PaperMaskGR(Trainable):
    """The network with its semantic IDs: it is trained by `fit` and ranks items."""

    about: ClassVar = "the paper's MaskGR: bidirectional masked diffusion, independent digits"
    needs: ClassVar = "item text or embeddings"
    Config: ClassVar[type[Any]] = PaperConfig
    supports_ddp: ClassVar = True
    uses_sids: ClassVar = True
    presets: ClassVar[Mapping[str, TrainConfig]]
    piece_tokens = 2048  # hidden states of this many tokens stay near a CPU

    def __init__(
        self, config: TrainConfig, sids: SemanticIds, counts: npt.NDArray[np.int64]
    ) -> None:
        """`counts` (items,): training events of each item; they rank items that share an ID."""
        super().__init__()
        own: PaperConfig = config.model
        self.config, self.own, self.sids, self.counts = config, own, sids, counts
        embeddings = torch.from_numpy(sids.embeddings) if own.dense.head else None
        self.network = Network(own.network, sids.codebook_sizes, own.dense, embeddings)
        self.codes: Tensor
        self.register_buffer("codes", torch.from_numpy(sids.digits).long(), persistent=False)

    @property
    def levels(self) -> int:
        return self.network.n_levels

    @property
    def tokens_per_item(self) -> int:  # type: ignore[override]
        return self.levels

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @cached_property
    def index(self) -> CodeIndex:
        return CodeIndex(self.codes, self.sids.codebook_sizes)

    # Training

    def prepare(self, sequences: Sequences, generator: torch.Generator) -> MaskedBatch:
        layout = Layout.of((sequences.lengths * self.levels).tolist())
        noise = draw_noise(layout.sequences, self.levels, self.own.objective, generator)
        return MaskedBatch(sequences, float(noise.tokens), noise, self.levels)

    def forward(self, batch: MaskedBatch) -> Tensor:
        if not len(batch.sequences):  # more processes than sequences
            return 0 * sum((p.sum() for p in self.parameters()), self.network.bias.sum())
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
        for rows in self._portions(joined):
            part = joined.select(rows)
            layout = Layout.of((part.lengths * self.levels).tolist())
            levels = stratified_levels(len(part), generator)
            masked, noise = mask_last_item(levels, layout.sequences, self.levels, generator)
            own = Noise(masked, noise[layout.sequences], masked.sum())
            nats += float(self._loss(part, own))
        return nats / len(joined)

    @classmethod
    def learn(cls, training: Training) -> Self:
        sids = semantic_ids(training)
        torch.manual_seed(training.config.seed)
        model = cls(training.config, sids, training.counts)
        training.fit(model)
        return model.eval()

    # Retrieval

    def decoding(self) -> DecodingConfig:
        return self.own.decoding

    def rank(self, query: Query) -> Ranked:
        return self.decode(query, self.decoding())

    def decode(self, query: Query, decoding: DecodingConfig) -> Ranked:
        return self.trace(query, decoding, steps=False)[0]

    @torch.no_grad()
    def trace(
        self, query: Query, decoding: DecodingConfig, *, steps: bool = True
    ) -> tuple[Ranked, list[list[Step]]]:
        self.eval()
        decoding = self.resolved(decoding)
        kind = decoding.retrieval
        users = len(query.histories)
        items = np.full((users, query.top), -1, dtype=np.int32)
        scores = np.full((users, query.top), -np.inf, dtype=np.float32)
        traces: list[list[Step]] = [[] for _ in range(users)]
        invalid: list[tuple[float, int]] = []
        for rows in self._portions(query.histories.last(self.config.history_limit)):
            part = query.select(rows)
            own = self._histories(part, decoding)
            if kind == "dense":
                found, values = self._dense(own, part)
            else:
                if kind == "unified":  # all beams are ranked anew, however few are asked for
                    part = replace(part, top=max(query.top, decoding.beams))
                ranking = self._search(own, part, decoding, trace=steps)
                found, values = ranking.items, ranking.scores
                if kind == "unified":
                    found, values = self._by_dense_score(own, found, decoding.beams)
                if ranking.invalid_share is not None:
                    invalid.append((ranking.invalid_share, len(rows)))
                for row, own_steps in zip(rows, ranking.traces or (), strict=False):
                    traces[row] = own_steps
            items[rows] = found[:, : query.top].cpu().numpy()
            scores[rows] = values[:, : query.top].cpu().numpy()
        share = sum(s * n for s, n in invalid) / sum(n for _, n in invalid) if invalid else None
        return Ranked(items, scores, share), traces

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

    def _portions(self, histories: Sequences) -> Iterator[npt.NDArray[np.int64]]:
        """Rows of similar length, shortest first, as many at once as memory has room for."""
        order = np.argsort(histories.lengths, kind="stable")
        filled = np.cumsum(histories.lengths[order] + 1) // (RANK_TOKENS // self.levels)
        if len(order):
            yield from np.split(order, np.flatnonzero(np.diff(filled)) + 1)

    def _histories(self, query: Query, decoding: DecodingConfig, items: int = 1) -> Histories:
        cache = self.resolved(decoding).cache
        assert cache != "auto"
        recent = query.histories.last(self.config.history_limit)
        return Histories(self.network, recent, self.codes, items=items, cache=cache)

    def _search(
        self, own: Histories, query: Query, decoding: DecodingConfig, *, trace: bool
    ) -> Ranking:
        """The next items by unmasking their digits.

        The first `beams` results are those of a search with so many beams, whatever `top` is: a
        metric at K must not depend on which other K are asked for.
        """
        found = self._next_items(own, query, decoding, min(query.top, decoding.beams), trace)
        if query.top <= decoding.beams:
            return found
        wider = replace(decoding, beams=query.top)
        more = self._next_items(own, query, wider, query.top, trace=False)
        known = (more.items[:, :, None] == found.items[:, None, :]).any(2)
        behind = more.items.masked_fill(known, -1)
        order = (behind < 0).to(torch.int8).argsort(dim=1, stable=True)
        items = torch.cat([found.items, behind.gather(1, order)], 1)[:, : query.top]
        others = more.scores.masked_fill(known, -torch.inf).gather(1, order)
        scores = torch.cat([found.scores, others], 1)[:, : query.top]
        return replace(found, items=items, scores=scores)

    def _next_items(
        self, own: Histories, query: Query, decoding: DecodingConfig, top: int, trace: bool
    ) -> Ranking:
        decoder = self._decoder(decoding.constrained)
        available = len(self.codes) if query.allowed is None else int(query.allowed.sum())
        found = decoder.next_items(
            own,
            min(top, available),
            self._how(decoding),
            **self._request(query),
            trace=trace,
        )
        missing = top - found.items.shape[1]
        if missing:
            pad = torch.nn.functional.pad
            found = replace(
                found,
                items=pad(found.items, (0, missing), value=-1),
                scores=pad(found.scores, (0, missing), value=-torch.inf),
            )
        return found

    def _how(self, decoding: DecodingConfig, items: int = 1) -> Search:
        return Search(decoding.beams, decoding.order, decoding.steps or items * self.levels)

    def _request(self, query: Query) -> dict[str, Any]:
        """What a search needs to know of a query beside its histories."""
        seeds = history_seeds(query.histories, self.config.seed)
        return {"filters": query_filters(query, self.device), "seeds": seeds}

    def _decoder(self, constrained: bool) -> Decoder:
        return Decoder(
            self.index,
            constrained=constrained,
            renormalise=self.own.objective.catalogue_aware and constrained,
            priority=torch.from_numpy(self.counts),
        )

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

    def sessions(
        self, query: Query, items: int, decoding: DecodingConfig, *, repeats: bool
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        self.eval()
        sets = np.full((len(query.histories), query.top, items), -1, dtype=np.int64)
        scores = np.full(sets.shape[:2], -np.inf, dtype=np.float32)
        decoder = self._decoder(decoding.constrained)
        for rows in self._portions(query.histories.last(self.config.history_limit)):
            part = query.select(rows)
            found = decoder.sessions(
                self._histories(part, decoding, items),
                query.top,
                self._how(decoding, items),
                **self._request(part),
                repeats=repeats,
            )
            sets[rows], scores[rows] = found.items.cpu().numpy(), found.scores.cpu().numpy()
        return sets, scores

    def sample(
        self, query: Query, *, steps: int, temperature: float, seed: int
    ) -> npt.NDArray[np.int64]:
        self.eval()
        drawn = np.full((len(query.histories), query.top), -1, dtype=np.int64)
        generator = torch.Generator(self.device).manual_seed(seed)
        for rows in self._portions(query.histories.last(self.config.history_limit)):
            part = query.select(rows)
            found = sample(
                self._histories(part, self.decoding()),
                self.index,
                count=query.top,
                steps=steps or self.levels,
                temperature=temperature,
                generator=generator,
                filters=query_filters(part, self.device),
            )
            drawn[rows] = found.items[:, :, 0].cpu().numpy()
        return drawn

    # Items and files

    def with_items(self, items: pl.DataFrame, embeddings: npt.NDArray[Any] | None) -> PaperMaskGR:
        """New items get semantic IDs from the fitted codebooks; nothing is trained again."""
        sids = self.sids.encode_new(items, embeddings=embeddings, device=self.device.type)
        counts = np.concatenate([self.counts, np.zeros(len(items), dtype=np.int64)])
        model = PaperMaskGR(self.config, sids, counts)
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
