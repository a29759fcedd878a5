"""MaskGR: a SASRec that encodes histories and items, and a denoiser that generates with it.

Training has stages. The history's encoder and the items' vectors are those of a SASRec, trained as
it is. Semantic IDs are then made of the vectors, in the space where a distance is a difference of
scores. The denoiser learns to ask again once some digits are known; what the history asks with
nothing revealed stays what it is, so one step of generation is exactly dense retrieval. (Training
history and denoiser together lost recall, in one step and in several.) How much of what it learned
counts is chosen on validation, as the biases are.

With `vectors=digits` items are the sums of their digits' vectors from then on, in the history, too,
and everything is trained end to end: no item has a vector of its own, as in the paper.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
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
from maskgr.decoding.config import DecodingConfig
from maskgr.decoding.joint import beam_search, sample_items
from maskgr.decoding.matching import CodeIndex, Matches, log_sums, pair_energies
from maskgr.decoding.orders import fixed_priorities, history_seeds
from maskgr.decoding.schedule import schedule
from maskgr.devices import pick_device
from maskgr.errors import ArtefactError, RequestError
from maskgr.evaluation.metrics import recall
from maskgr.evaluation.ranking import Query, Ranked
from maskgr.models.base import TrainConfig, Training, query_filters
from maskgr.models.graphs import Exported
from maskgr.models.items import item_text, semantic_ids
from maskgr.models.maskgr.bias import USERS, Bias, Shortlist, choose_bias
from maskgr.models.maskgr.config import MaskGRConfig
from maskgr.models.maskgr.denoiser import (
    CHANGE_STEPS,
    CHANGE_USERS,
    Denoiser,
    choose_change,
    fit_codes,
)
from maskgr.models.maskgr.graphs import exported
from maskgr.models.maskgr.noise import RevealedBatch, draw_revealed
from maskgr.models.maskgr.presets import PRESETS
from maskgr.models.maskgr.queries import Histories
from maskgr.models.maskgr.stages import learned_ids, sasrec_config, shares, train_history
from maskgr.models.neighbours import Neighbours
from maskgr.models.retrieval import portions
from maskgr.models.sasrec import SASRec, earlier_items
from maskgr.nn.item_vectors import DigitVectors
from maskgr.nn.scoring import best_items
from maskgr.nn.softmax import Bonus, weighted_sum
from maskgr.nn.transformer import Layout
from maskgr.nn.weights import COUNTS, load_counts, load_weights, save_weights
from maskgr.sids.item_text import ItemText
from maskgr.sids.semantic_ids import SemanticIds
from maskgr.sids.vectors import sample_rows
from maskgr.training.fit import Trainable

WEIGHTS, CHOSEN = "network.safetensors", "chosen.json"
REMAINING = 256  # items with the revealed digits that a target is contrasted with, if sampled
# Users x items, at most, of the choices that are made on validation: minutes.
BIAS_CELLS, CHANGE_CELLS = 2**32, 2**27


class MaskGR(Trainable):
    """The trained SASRec with its semantic IDs and the denoiser; `fit` trains the denoiser."""

    about: ClassVar = "masked diffusion over semantic IDs, normalised over the catalogue"
    needs: ClassVar = "nothing; item text or embeddings help"
    Config: ClassVar[type[Any]] = MaskGRConfig
    supports_ddp: ClassVar = True
    weighs_events = True
    uses_sids: ClassVar = True
    presets: ClassVar[Mapping[str, TrainConfig]]

    def __init__(
        self,
        config: TrainConfig,
        sids: SemanticIds,
        history: SASRec,
        neighbours: Neighbours | None = None,
        bias: Bias | None = None,
        change: float = 1.0,
    ) -> None:
        """`change`: the share of the learned change of queries that the denoiser was scaled to."""
        super().__init__()
        own: MaskGRConfig = config.model
        self.config, self.own, self.sids = config, own, sids
        self.neighbours, self.bias, self.change = neighbours, bias or Bias(), change
        self.history = history.requires_grad_(self.history_learns).eval()
        self.denoiser = Denoiser(own.transformer, sids.codebook_sizes, own.session)
        self.codes: Tensor  # (items, levels) int32, on a CPU those of the IDs themselves
        self.register_buffer("codes", torch.from_numpy(sids.digits), persistent=False)

    @cached_property
    def index(self) -> CodeIndex:
        """Which items have which digits; made when it is first needed: one step needs none."""
        return CodeIndex(self.codes, self.sids.codebook_sizes)

    @property
    def levels(self) -> int:
        return len(self.sids.codebook_sizes)

    @property
    def device(self) -> torch.device:
        return self.history.device

    @property
    def history_learns(self) -> bool:
        """Whether the history is trained together with the denoiser."""
        return bool(self.own.vectors == "digits")

    def to(self, *arguments: Any, **options: Any) -> Self:
        moved = super().to(*arguments, **options)
        self.history.eval()  # drops the table that it kept
        self.__dict__.pop("index", None)
        return moved

    def train(self, mode: bool = True) -> Self:
        self.training = mode
        self.denoiser.train(mode)
        if self.history_learns:  # else it has no dropout, and keeps its table
            self.history.train(mode)
        return self

    # Training

    def prepare(self, sequences: Sequences, generator: torch.Generator) -> RevealedBatch:
        asked = self.history.prepare(sequences, generator)
        batch = draw_revealed(asked, self.own.session, self.levels, generator)
        if self.own.loss == "softmax":
            return batch
        draws = torch.rand(len(sequences.values), REMAINING, generator=generator)
        return replace(batch, draws=draws)

    def forward(self, batch: RevealedBatch) -> Tensor:
        """() the sum of -log p(item | history, revealed digits), the exact joint of what is masked,
        over the items of which some digits are revealed; where the history learns as well, also of
        -log p(item | history) over all items."""
        if not len(batch.sequences):  # more processes than sequences
            trained = [p.sum() for p in self.parameters() if p.requires_grad]
            return 0 * torch.stack(trained).sum()
        history, learns = self.history, self.history_learns
        items = torch.from_numpy(batch.sequences.values).to(self.device).long()
        bonus = history.repeat_bonus(*earlier_items(batch.sequences))
        with torch.set_grad_enabled(learns and torch.is_grad_enabled()):
            hidden, layout = history.encode(batch.sequences.without_last())
            queries = history.queries(hidden)
            known = self.own.loss == "softmax" or not learns  # all vectors, not those of samples
            table = self._softmax_table() if known else None
        loss = self._revealed_loss(queries, hidden, layout, table, items, batch, bonus)
        if learns:
            weights = batch.target_weights(self.device)
            loss = loss + history.loss(queries, table, items, batch.asked, bonus, weights)
        return loss

    def _softmax_table(self) -> Tensor:
        """(items, width) with gradients where the history learns, else kept from step to step."""
        table = self.history.items() if torch.is_grad_enabled() else self.history.table()
        assert isinstance(table, Tensor)
        return table

    def _revealed_loss(
        self,
        queries: Tensor,
        hidden: Tensor,
        layout: Layout,
        table: Tensor | None,
        items: Tensor,
        batch: RevealedBatch,
        bonus: Bonus | None,
    ) -> Tensor:
        """() the summed loss of the queries that know something, or ask for a later item."""
        revealed, place = batch.revealed.to(self.device), batch.place.to(self.device)
        rows = torch.arange(len(items), device=self.device)
        session = (rows[:, None] + torch.arange(revealed.shape[1], device=self.device)).clamp(
            max=len(items) - 1
        )  # (items, session) places of its items; those beyond the sequence are not revealed
        queries = queries + self.denoiser(
            hidden, layout, self.codes[items[session]], revealed, place
        )
        targets, shown = items[rows + place], revealed[rows, place]
        weights = batch.target_weights(self.device)
        if weights is not None:
            weights = weights[rows + place]
        some = shown.any(1)
        known = some.nonzero().squeeze(1)
        found, extra = self._contrasted(targets[known], shown[known], known, batch)
        owners = known[found.owners]
        if table is None:
            numbers, number = torch.unique(found.items, return_inverse=True)
            energies = pair_energies(queries, self.history.items(numbers), owners, number)
        else:
            energies = pair_energies(queries, table, owners, found.items)
        if bonus is not None:
            energies = energies + bonus.at(owners, found.items)
        true = (found.items == targets[owners]).nonzero().squeeze(1)  # one for each that is known
        losses = log_sums(found.owners, energies + extra, len(known)) - energies[true]
        loss = weighted_sum(losses, None if weights is None else weights[known])
        whole = (~some & ((place > 0) | revealed.flatten(1).any(1))).nonzero().squeeze(1)
        if len(whole):  # none of its digits is known: the whole catalogue remains
            others = None if bonus is None else bonus.select(whole)
            own = None if weights is None else weights[whole]
            loss = loss + self.history.loss(
                queries[whole], table, targets[whole], batch.asked, others, own
            )
        return loss

    def _contrasted(
        self, targets: Tensor, revealed: Tensor, rows: Tensor, batch: RevealedBatch
    ) -> tuple[Matches, Tensor]:
        """Items with the `revealed` (targets, levels) digits of each of the `targets`, itself once
        among them, and (pairs,) what is added to their energies: a sampled item stands for many.

        `rows` (targets,): the targets' places in the batch.
        """
        codes = self.codes[targets]
        if batch.draws is None:
            found = self.index.matching(codes, revealed)
            return found, torch.zeros(len(found.items), device=self.device)
        found, stands = self.index.sampled(codes, revealed, batch.draws.to(self.device)[rows])
        found = found.keep(found.items != targets[found.owners])
        own = torch.arange(len(targets), device=self.device)
        extra = torch.cat([stands[found.owners], torch.zeros_like(stands)])
        both = Matches(torch.cat([found.items, targets]), torch.cat([found.owners, own]))
        order = both.owners.argsort(stable=True)
        return Matches(both.items[order], both.owners[order]), extra[order]

    def validate(self, holdout: Holdout) -> dict[str, float]:
        """By generation, as the settings say; in one step if they say so."""
        query = Query(holdout.histories, min(10, len(self.codes)))
        found = self.rank(query).items
        return {"recall@10": float(recall(found, holdout.targets, 10).mean())}

    @classmethod
    def learn(cls, training: Training) -> Self:
        config, work = training.config, training.work
        own: MaskGRConfig = config.model
        if (given := training.sids) is None:
            text = item_text(training, own.sids.encoder)
        else:  # a saved model has the texts of its IDs
            text = ItemText(given.embeddings, given.encoder)
        first, second = shares(config.fit, own.denoiser_share)
        like = None if training.like is None else training.like.model
        assert like is None or isinstance(like, MaskGR)
        source = None if like is None else like.history.config.items
        history = train_history(training, text, first, source)
        sids = learned_ids(training, history, text) if given is None else semantic_ids(training)
        neighbours = _neighbours(training)
        torch.manual_seed(config.seed)
        rows = sample_rows(len(sids.digits), max(sids.codebook_sizes), config.seed)
        with torch.no_grad():
            vectors = history.items(torch.from_numpy(rows).to(history.device)).cpu().numpy()
        tokens = fit_codes(vectors, sids.digits[rows], sids.codebook_sizes)
        model = cls(config, sids, history, neighbours)
        model.start_from(torch.from_numpy(tokens))
        training.fit(model, second, label="denoiser")
        model.eval()
        if like is not None:
            model.bias, model.change = like.bias, like.change
            model.denoiser.scale(like.change)
        elif work.world.writes:
            with work.world.alone():
                model.choose(training.split.validation, config.seed)
        return model

    @torch.no_grad()
    def start_from(self, tokens: Tensor) -> None:
        """Starts the digits' vectors as `tokens` (codes of all levels, width)."""
        self.denoiser.codes.weight.copy_(tokens)
        if (vectors := _digit_vectors(self.own, self.sids)) is not None:
            vectors.digits.weight.copy_(tokens)
            self.history.items = vectors.to(self.device)

    def choose(self, validation: Holdout, seed: int) -> None:
        """Chooses on validation users how much the biases and the denoiser count."""
        items = len(self.codes)
        self.bias = self.choose_bias(validation.sample(min(USERS, BIAS_CELLS // items), seed))
        if self.levels > 1 and self.own.session == 1:  # later items of a session need its change
            decoding = replace(self.decoding(), steps=min(self.levels, CHANGE_STEPS))
            self.change = choose_change(
                self.denoiser,
                lambda query: self.decode(query, decoding),
                validation.sample(min(CHANGE_USERS, max(1, CHANGE_CELLS // items)), seed),
                top=min(10, items),
            )

    @torch.no_grad()
    def choose_bias(self, holdout: Holdout) -> Bias:
        histories, limit = holdout.histories, self.config.history_limit
        queries = torch.empty(len(histories), self.history.width, device=self.device)
        for rows in portions(histories, limit):  # once for all biases
            hidden = self.history.last_states(histories.select(rows))
            queries[torch.from_numpy(rows).to(self.device)] = self.history.queries(hidden)
        top = min(10, len(self.codes))
        shortlist = Shortlist.of(self.history, self.neighbours, histories, queries, top)
        return choose_bias(
            lambda query, bias: shortlist.rank(bias),
            holdout,
            repeats=self.history.repeat_value != 0,
            neighbours=self.neighbours is not None,
            top=top,
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

    def resolved(self, decoding: DecodingConfig, items: int = 1) -> DecodingConfig:
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
        steps = decoding.steps or items * self.levels
        return replace(decoding, retrieval="generative", steps=steps, cache="frozen")

    def _decode(
        self, query: Query, decoding: DecodingConfig, *, trace: bool
    ) -> tuple[Tensor, Tensor, list[list[Step]]]:
        """(users, top) items and scores of users whose histories ascend in length."""
        own = Histories(self, query.histories, decoding.guidance)
        counts = schedule(self.levels, decoding.steps)
        one_step = self._one_step(own, query)
        exact = len(counts) == 1 and not decoding.remask  # a search only for its trace
        if exact and not trace:
            return *one_step, []
        seeds = history_seeds(query.histories, self.config.seed).to(self.device)
        found = beam_search(
            own,
            self.index,
            counts,
            query.top if exact else decoding.beams,
            priorities=fixed_priorities(decoding.order, seeds, self.levels),
            filters=query_filters(query, self.device),
            remask=decoding.remask,
            trace=trace,
        )
        if exact:
            return *one_step, found.steps
        items, scores = _extended(found.items.squeeze(2), found.scores, *one_step)
        return items[:, : query.top], scores[:, : query.top], found.steps

    def _one_step(self, own: Histories, query: Query) -> tuple[Tensor, Tensor]:
        return best_items(
            own.first().squeeze(1),
            own.table,
            query.top,
            allowed=query_filters(query, self.device).allowed,
            excluded=query.excluded,
            bonus=own.bonus,
        )

    @torch.no_grad()
    def sessions(
        self, query: Query, items: int, decoding: DecodingConfig, *, repeats: bool
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        if items > self.own.session:
            raise RequestError(
                f"this maskgr was trained for sessions of {self.own.session}, not of {items}; ask "
                f"for fewer, or train one with session={items}"
            )
        decoding = self.resolved(decoding, items)
        self.eval()
        found = np.full((len(query.histories), query.top, items), -1, dtype=np.int64)
        scores = np.full(found.shape[:2], -np.inf, dtype=np.float32)
        for rows in portions(query.histories, self.config.history_limit):
            part = query.select(rows)
            seeds = history_seeds(part.histories, self.config.seed).to(self.device)
            decoded = beam_search(
                Histories(self, part.histories, decoding.guidance, items),
                self.index,
                schedule(items * self.levels, decoding.steps),
                max(decoding.beams, query.top),
                priorities=fixed_priorities(decoding.order, seeds, items * self.levels),
                filters=query_filters(part, self.device),
                repeats=repeats,
                remask=decoding.remask,
            )
            found[rows] = decoded.items[:, : query.top].cpu().numpy()
            scores[rows] = decoded.scores[:, : query.top].cpu().numpy()
        return found, scores

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

    def semantic_ids(self) -> SemanticIds:
        return self.sids

    def item_vectors(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        return self.history.item_vectors(numbers)

    def with_items(self, items: pl.DataFrame, embeddings: npt.NDArray[Any] | None) -> MaskGR:
        """New items by their text: vectors, and semantic IDs from the fitted codebooks."""
        if self.history.config.items == "id":
            raise RequestError(
                "this maskgr was trained without text and knows nothing of new items; train one "
                "of items with text"
            )
        device = self.device.type
        sids = self.sids.encode_new(items, embeddings=embeddings, device=device)
        neighbours = None if self.neighbours is None else self.neighbours.with_items(items, None)
        history = self.history.enlarged(
            len(items), torch.from_numpy(sids.embeddings), _digit_vectors(self.own, sids)
        )
        model = MaskGR(self.config, sids, history, neighbours, self.bias, self.change)
        model.denoiser.load_state_dict(self.denoiser.state_dict())
        return model.to(self.device).eval()

    def grown(self, items: pl.DataFrame, embeddings: npt.NDArray[Any] | None) -> MaskGR:
        return self.with_items(items, embeddings)

    def update(self, training: Training) -> MaskGR:
        """The history's encoder goes on, then the denoiser on top of it; where they are trained
        together, both at once. Neighbours are counted anew, and biases chosen anew."""
        own, fit = self.own, training.config.fit
        second, history = fit, self.history
        history.recount(training.counts)
        if not self.history_learns:
            first, second = shares(fit, own.denoiser_share)
            history.requires_grad_(True)
            training.fit(history, first, work=training.work.stage("history"), label="history")
        model = MaskGR(training.config, self.sids, history, _neighbours(training))
        model.denoiser.load_state_dict(self.denoiser.state_dict())
        training.fit(model, second, label="denoiser")
        model.eval()
        if training.work.world.writes:
            with training.work.world.alone():
                model.choose(training.split.validation, training.config.seed)
        return model

    def exported(self) -> Exported:
        return exported(self, self.sids, self.resolved(self.decoding()))

    def save(self, folder: Path) -> None:
        save_weights(self, folder / WEIGHTS)
        self.sids.save(folder / "sids")
        np.save(folder / COUNTS, self.history.counts)
        if self.neighbours is not None:
            self.neighbours.save(folder)
        chosen = {
            "items": self.history.config.items,
            "change": self.change,
            **asdict(self.bias),
        }
        (folder / CHOSEN).write_text(json.dumps(chosen) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: Path, config: TrainConfig) -> Self:
        own: MaskGRConfig = config.model
        sids = SemanticIds.load(folder / "sids")
        try:
            chosen = json.loads((folder / CHOSEN).read_text(encoding="utf-8"))
            bias = Bias(**{f.name: float(chosen[f.name]) for f in fields(Bias)})
            change = float(chosen["change"])
            history_config = sasrec_config(own, chosen["items"])
        except (OSError, ValueError, KeyError, TypeError, RequestError) as error:
            raise ArtefactError(f"{folder / CHOSEN} is damaged ({error}); train again") from error
        history = SASRec(
            history_config,
            load_counts(folder),
            None if chosen["items"] == "id" else torch.from_numpy(sids.embeddings),
            config.history_limit,
            _digit_vectors(own, sids),
        )
        neighbours = Neighbours.load(folder) if own.neighbours else None
        model = cls(config, sids, history, neighbours, bias, change)
        load_weights(model, folder / WEIGHTS)
        return model.to(pick_device(config.device)).eval()


def _neighbours(training: Training) -> Neighbours | None:
    most = training.config.model.neighbours
    if not most:
        return None
    return Neighbours.count(training.split.train, len(training.data.items), most)


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


def _digit_vectors(own: MaskGRConfig, sids: SemanticIds) -> DigitVectors | None:
    """Item vectors as sums of digits' vectors, where the settings ask for them."""
    if own.vectors != "digits":
        return None
    return DigitVectors(own.transformer.width, torch.from_numpy(sids.digits), sids.codebook_sizes)


MaskGR.presets = PRESETS
