"""MaskGR: a SASRec that encodes histories and items, and a denoiser that generates with it.

Training has two parts. The history's encoder and the items' vectors are those of a SASRec, trained
as it is. Semantic IDs are then made of the vectors, in the space where a distance is a difference
of scores. The denoiser learns to ask again once some digits are known; what the history asks with
nothing revealed stays what it is, so one step of generation is exactly dense retrieval.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
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
from maskgr.decoding.config import DecodingConfig
from maskgr.decoding.joint import beam_search, sample_items
from maskgr.decoding.matching import CodeIndex, log_sums, pair_energies
from maskgr.decoding.orders import fixed_priorities, history_seeds
from maskgr.decoding.schedule import schedule
from maskgr.devices import pick_device
from maskgr.errors import ArtefactError, RequestError
from maskgr.evaluation.metrics import recall
from maskgr.evaluation.ranking import Query, Ranked
from maskgr.models.base import TrainConfig, Training, query_filters
from maskgr.models.maskgr.bias import USERS, Bias, choose_bias
from maskgr.models.maskgr.config import MaskGRConfig
from maskgr.models.maskgr.denoiser import Denoiser, HistoryMemory
from maskgr.models.maskgr.noise import mask_last_item, stratified_levels
from maskgr.models.maskgr.paper import semantic_ids
from maskgr.models.neighbours import Neighbours
from maskgr.models.sasrec import (
    SASRec,
    SASRecConfig,
    earlier_items,
    item_text,
    portions,
    without_last,
)
from maskgr.nn.scoring import best_items
from maskgr.nn.softmax import Bonus
from maskgr.nn.transformer import TransformerConfig
from maskgr.nn.weights import COUNTS, load_counts, load_weights, save_weights
from maskgr.sids.config import QuantizerConfig, SidsConfig
from maskgr.sids.item_text import ItemText
from maskgr.sids.semantic_ids import SemanticIds
from maskgr.training.batches import by_length
from maskgr.training.fit import Batch, FitConfig, Trainable

WEIGHTS, BIAS = "network.safetensors", "bias.json"
QUERY_USERS = 4096  # users whose queries say which directions of item vectors matter


@dataclass(frozen=True, eq=False)
class RevealedBatch(Batch):
    """Sequences, and which digits of each item are revealed."""

    revealed: Tensor  # (items, levels) bool

    def part(self, rows: np.ndarray) -> RevealedBatch:
        chosen = np.zeros(len(self.sequences), dtype=bool)
        chosen[rows] = True
        items = torch.from_numpy(np.repeat(chosen, self.sequences.lengths))
        sequences = self.sequences.select(rows)
        return replace(self, sequences=sequences, revealed=self.revealed[items])


class MaskGR(Trainable):
    """The trained SASRec with its semantic IDs and the denoiser; `fit` trains the denoiser."""

    about: ClassVar = "masked diffusion over semantic IDs, normalised over the catalogue"
    needs: ClassVar = "item text or embeddings"
    Config: ClassVar[type[Any]] = MaskGRConfig
    supports_ddp: ClassVar = True
    uses_sids: ClassVar = True
    presets: ClassVar[Mapping[str, TrainConfig]]

    def __init__(
        self,
        config: TrainConfig,
        sids: SemanticIds,
        history: SASRec,
        neighbours: Neighbours | None = None,
        bias: Bias | None = None,
    ) -> None:
        super().__init__()
        own: MaskGRConfig = config.model
        self.config, self.own, self.sids = config, own, sids
        self.neighbours, self.bias = neighbours, bias or Bias()
        self.history = history.requires_grad_(False).eval()
        self.denoiser = Denoiser(own.transformer, sids.codebook_sizes)
        self.codes: Tensor
        self.register_buffer("codes", torch.from_numpy(sids.digits).long(), persistent=False)
        self.index = CodeIndex(self.codes, sids.codebook_sizes)

    @property
    def levels(self) -> int:
        return len(self.sids.codebook_sizes)

    @property
    def device(self) -> torch.device:
        return self.history.device

    def to(self, *arguments: Any, **options: Any) -> Self:
        moved = super().to(*arguments, **options)
        self.history.eval()  # drops the table that it kept
        self.index = CodeIndex(self.codes, self.sids.codebook_sizes)
        return moved

    def train(self, mode: bool = True) -> Self:
        self.training = mode
        self.denoiser.train(mode)  # not the history: no dropout there, and it keeps its table
        return self

    # Training of the denoiser

    def prepare(self, sequences: Sequences, generator: torch.Generator) -> RevealedBatch:
        """Masks digits of each item as equation 3 does, by a noise level of its own."""
        items = len(sequences.values)
        owners = torch.arange(items).repeat_interleave(self.levels)
        levels = stratified_levels(items, generator)
        masked, _ = mask_last_item(levels, owners, self.levels, generator)
        return RevealedBatch(sequences, float(items), ~masked.view(items, self.levels))

    def forward(self, batch: RevealedBatch) -> Tensor:
        """() the sum of -log p(item | history, revealed digits) over the items of which some
        digits are revealed: the exact joint of what is masked."""
        targets = torch.from_numpy(batch.sequences.values).to(self.device).long()
        revealed = batch.revealed.to(self.device)
        if not len(batch.sequences):  # more processes than sequences
            return 0 * sum((p.sum() for p in self.denoiser.parameters()), targets.sum())
        with torch.no_grad():
            hidden, layout = self.history.encode(without_last(batch.sequences))
            queries = self.history.queries(hidden)
            table = self.history.table()
            bonus = self.history.repeat_bonus(*earlier_items(batch.sequences))
        queries = queries + self.denoiser(hidden, layout, self.codes[targets], revealed)
        rows = revealed.any(1).nonzero().squeeze(1)
        found = self.index.matching(self.codes[targets[rows]], revealed[rows])
        owners = rows[found.owners]
        energies = pair_energies(queries, table, owners, found.items)
        if bonus is not None:
            energies = energies + bonus.at(owners, found.items)
        true = (found.items == targets[owners]).nonzero().squeeze(1)
        return log_sums(found.owners, energies, len(rows)).sum() - energies[true].sum()

    def validate(self, holdout: Holdout) -> dict[str, float]:
        """Digit by digit: one step does not depend on the denoiser."""
        query = Query(holdout.histories, min(10, len(self.codes)))
        found = self.decode(query, replace(self.own.decoding, steps=0)).items
        return {"recall@10": float(recall(found, holdout.targets, 10).mean())}

    @classmethod
    def learn(cls, training: Training) -> Self:
        config, work = training.config, training.work
        own: MaskGRConfig = config.model
        text = item_text(training, own.sids.encoder)
        first, second = _shares(config.fit, own.denoiser_share)
        torch.manual_seed(config.seed)
        embeddings = torch.from_numpy(text.embeddings) if own.text else None
        history = SASRec(_history_config(own), training.counts, embeddings, config.history_limit)
        training.fit(history, first, work=work.stage("history"), label="history")
        history.eval()
        given = training.sids is not None
        sids = semantic_ids(training) if given else _learned_ids(training, history, text)
        neighbours = None
        if own.neighbours:
            n_items = len(training.data.items)
            neighbours = Neighbours.count(training.split.train, n_items, own.neighbours)
        torch.manual_seed(config.seed)
        model = cls(config, sids, history, neighbours)
        model.denoiser.start_from(history.table(), model.codes)
        training.fit(model, second, label="denoiser")
        model.eval()
        if work.world.writes:
            model.bias = model.choose_bias(training.split.validation.sample(USERS, config.seed))
        return model

    def choose_bias(self, holdout: Holdout) -> Bias:
        def rank(query: Query, bias: Bias) -> Ranked:
            self.bias = bias
            return self.decode(query, DecodingConfig(steps=1))

        return choose_bias(
            rank,
            holdout,
            repeats=self.history.repeat_value != 0,
            neighbours=self.neighbours is not None,
            top=min(10, len(self.codes)),
        )

    # Generation

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
        decoding = self.resolved(decoding)
        self.eval()
        users = len(query.histories)
        items = np.full((users, query.top), -1, dtype=np.int32)
        scores = np.full((users, query.top), -np.inf, dtype=np.float32)
        traces: list[list[Step]] = [[] for _ in range(users)]
        for rows in portions(query.histories, self.config.history_limit):
            found, values, own = self._decode(query.select(rows), decoding, trace=steps)
            items[rows], scores[rows] = found.cpu().numpy(), values.cpu().numpy()
            for row, trace in zip(rows, own, strict=False):
                traces[row] = trace
        return Ranked(items, scores), traces

    def resolved(self, decoding: DecodingConfig) -> DecodingConfig:
        if decoding.retrieval not in ("auto", "generative"):
            raise RequestError(
                f"maskgr has no {decoding.retrieval} retrieval of its own; generation in one step "
                "(--steps 1) is its dense retrieval"
            )
        if not decoding.constrained:
            raise RequestError(
                "maskgr generates real items only; leave --unconstrained out, or train maskgr-paper"
            )
        if decoding.cache == "off":
            raise RequestError("maskgr encodes a history once, exactly; leave --cache out")
        steps = decoding.steps or self.levels
        return replace(decoding, retrieval="generative", steps=steps, cache="frozen")

    def _decode(
        self, query: Query, decoding: DecodingConfig, *, trace: bool
    ) -> tuple[Tensor, Tensor, list[list[Step]]]:
        """(users, top) items and scores of users whose histories ascend in length."""
        own = Histories(self, query.histories)
        counts = schedule(self.levels, decoding.steps)
        one_step = self._one_step(own, query)
        if len(counts) == 1:
            return *one_step, []
        seeds = history_seeds(query.histories, self.config.seed).to(self.device)
        found = beam_search(
            own,
            self.index,
            counts,
            decoding.beams,
            priorities=fixed_priorities(decoding.order, seeds, self.levels),
            filters=query_filters(query, self.device),
            trace=trace,
        )
        items, scores = _extended(found.items, found.scores, *one_step)
        return items[:, : query.top], scores[:, : query.top], found.steps

    def _one_step(self, own: Histories, query: Query) -> tuple[Tensor, Tensor]:
        return best_items(
            own.first(),
            own.table,
            query.top,
            allowed=query_filters(query, self.device).allowed,
            excluded=query.excluded,
            bonus=own.bonus,
        )

    @torch.no_grad()
    def sample(
        self, query: Query, *, steps: int, temperature: float, seed: int
    ) -> npt.NDArray[np.int64]:
        self.eval()
        drawn = np.full((len(query.histories), query.top), -1, dtype=np.int64)
        generator = torch.Generator(self.device).manual_seed(seed)
        for rows in portions(query.histories, self.config.history_limit):
            part = query.select(rows)
            found = sample_items(
                Histories(self, part.histories),
                self.index,
                query.top,
                steps=steps or self.levels,
                temperature=temperature,
                filters=query_filters(part, self.device),
                generator=generator,
            )
            drawn[rows] = found.cpu().numpy()
        return drawn

    # Items and files

    def with_items(self, items: pl.DataFrame, embeddings: npt.NDArray[Any] | None) -> MaskGR:
        """New items by their text: vectors, and semantic IDs from the fitted codebooks."""
        if not self.own.text:
            raise RequestError(
                "this maskgr was trained without text and knows nothing of new items; train one "
                "with text=true"
            )
        device = self.device.type
        sids = self.sids.encode_new(items, embeddings=embeddings, device=device)
        history = self.history.grown(torch.from_numpy(sids.embeddings))
        neighbours = None if self.neighbours is None else self.neighbours.with_items(items, None)
        model = MaskGR(self.config, sids, history, neighbours, self.bias)
        model.denoiser.load_state_dict(self.denoiser.state_dict())
        return model.to(self.device).eval()

    def save(self, folder: Path) -> None:
        save_weights(self, folder / WEIGHTS)
        self.sids.save(folder / "sids")
        np.save(folder / COUNTS, self.history.counts)
        if self.neighbours is not None:
            self.neighbours.save(folder)
        (folder / BIAS).write_text(json.dumps(asdict(self.bias)) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: Path, config: TrainConfig) -> Self:
        own: MaskGRConfig = config.model
        sids = SemanticIds.load(folder / "sids")
        try:
            values = json.loads((folder / BIAS).read_text(encoding="utf-8"))
            bias = Bias(**{f.name: float(values[f.name]) for f in fields(Bias)})
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ArtefactError(f"{folder / BIAS} is damaged ({error}); train again") from error
        embeddings = torch.from_numpy(sids.embeddings) if own.text else None
        counts = load_counts(folder)
        history = SASRec(_history_config(own), counts, embeddings, config.history_limit)
        neighbours = Neighbours.load(folder) if own.neighbours else None
        model = cls(config, sids, history, neighbours, bias)
        load_weights(model, folder / WEIGHTS)
        return model.to(pick_device(config.device)).eval()


class Histories:
    """A batch of histories as a `maskgr.decoding.joint.EnergyDenoiser`."""

    def __init__(self, model: MaskGR, histories: Sequences) -> None:
        """`histories`: whole, in ascending order of what the model sees of them."""
        hidden, layout = model.history.encode(histories.last(model.config.history_limit))
        self.memory = HistoryMemory(model.denoiser, hidden, layout)
        self.queries = model.history.queries(self.memory.last)  # (users, width)
        self.table = model.history.table()
        self.bonus: Bonus | None = model.bias.bonus(model.history, model.neighbours, histories)

    @property
    def users(self) -> int:
        return len(self.queries)

    def first(self) -> Tensor:
        return self.queries

    def __call__(self, user: Tensor, codes: Tensor, revealed: Tensor) -> Tensor:
        return self.queries[user] + self.memory.change(user, codes, revealed)


def _extended(
    items: Tensor, scores: Tensor, more: Tensor, more_scores: Tensor
) -> tuple[Tensor, Tensor]:
    """The results of a search (users, beams), and behind them the one-step results (users, top)
    that are not among them: a search of few beams answers for any `top`."""
    known = (more[:, :, None] == items[:, None, :]).any(2) | (more < 0)
    together = torch.cat([items, more.masked_fill(known, -1)], 1)
    values = torch.cat([scores, more_scores.masked_fill(known, -torch.inf)], 1)
    order = (together < 0).to(torch.int8).argsort(dim=1, stable=True)
    return together.gather(1, order), values.gather(1, order)


def _shares(config: FitConfig, share: float) -> tuple[FitConfig, FitConfig]:
    """The budgets of the history's encoder and of the denoiser."""
    steps = max(1, round(share * config.steps))
    return (
        replace(config, steps=max(1, config.steps - steps), minutes=(1 - share) * config.minutes),
        replace(config, steps=steps, minutes=share * config.minutes),
    )


def _history_config(own: MaskGRConfig) -> SASRecConfig:
    return SASRecConfig(own.transformer, own.loss, own.negatives, own.text, own.repeat_bias)


def _learned_ids(training: Training, history: SASRec, text: ItemText) -> SemanticIds:
    """Semantic IDs made of what the SASRec learned about the items."""
    config, work = training.config, training.work

    def make(folder: Path) -> None:
        sids = SemanticIds.from_learned(
            training.data.items,
            score_space(history, training.split.train, config),
            text,
            config.model.sids,
            seed=config.seed,
            device=config.device,
            progress=work.progress,
        )
        sids.save(folder)

    return SemanticIds.load(work.once("sids", make))


@torch.no_grad()
def score_space(history: SASRec, train: Sequences, config: TrainConfig) -> npt.NDArray[np.float32]:
    """(items, width) item vectors, rotated and scaled such that a squared distance is the mean
    squared difference of two items' scores.

    No query ever asks about much of what vectors say; digits are not to be spent on it.
    """
    rng = np.random.default_rng(config.seed)
    users = rng.permutation(np.flatnonzero(train.lengths))[:QUERY_USERS]
    histories = by_length(train.select(users).last(config.history_limit))
    asked = []
    for rows in portions(histories, config.history_limit):
        hidden, _ = history.encode(histories.select(rows))
        asked.append(history.queries(hidden).double().cpu().numpy())
    queries = np.concatenate(asked)
    values, directions = np.linalg.eigh(queries.T @ queries / len(queries))
    vectors = history.table().double().cpu().numpy()
    stretched = vectors @ (directions * np.sqrt(values.clip(min=0)))
    return np.ascontiguousarray(stretched, dtype=np.float32)


MaskGR.presets = {
    # Seconds to minutes: for tests and the demo.
    "tiny": TrainConfig(
        "maskgr",
        MaskGRConfig(
            TransformerConfig(layers=2, width=64, heads=2, hidden=256),
            sids=SidsConfig(quantizer=QuantizerConfig(levels=3, codes=64), unique="share"),
        ),
        FitConfig(steps=600, token_budget=2048, learning_rate=3e-3, validations=6),
    ),
    # A laptop, over lunch.
    "cpu": TrainConfig(
        "maskgr",
        MaskGRConfig(
            TransformerConfig(layers=2, width=256, heads=4, hidden=512, dropout=0.3),
            sids=SidsConfig(unique="share"),
        ),
        FitConfig(minutes=30, token_budget=1600, learning_rate=2e-3),
    ),
}
