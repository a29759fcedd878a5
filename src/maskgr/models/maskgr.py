"""MaskGR itself: the network with its semantic IDs, as a model that is trained and ranks items."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import numpy as np
import numpy.typing as npt
import polars as pl
import torch
from torch import Tensor

from maskgr.artefact import is_artefact
from maskgr.config import DecodingConfig, LoopConfig, TrainConfig
from maskgr.data.dataset import Dataset
from maskgr.data.sequences import Sequences
from maskgr.data.splits import Holdout, Split
from maskgr.devices import pick_device
from maskgr.diffusion.decoding import Decoder, Ranking, Search
from maskgr.diffusion.layout import Layout
from maskgr.diffusion.sampling import sample
from maskgr.errors import ArtefactError, RequestError
from maskgr.evaluation.metrics import recall
from maskgr.items.catalogue import Catalogue
from maskgr.items.semantic_ids import SemanticIds
from maskgr.models import retrieval
from maskgr.models.causal import check_copies
from maskgr.models.collaborative import carry_over, check_collaborative, score_space
from maskgr.models.distillation import check_distillation
from maskgr.models.followers import Followers
from maskgr.models.history import Cache, Histories
from maskgr.models.network import Network, Part, flops_per_token, load_network, save_network
from maskgr.models.registry import Ranked, Workspace
from maskgr.models.retrieval import Asked, Dense, Weights
from maskgr.models.task import BEST, Task
from maskgr.training.batches import Batches, by_length
from maskgr.training.distributed import World, world
from maskgr.training.log import RunLog
from maskgr.training.loop import Trainer
from maskgr.training.picture import draw

RANK_TOKENS = 65_536  # of the histories that are encoded at once
NETWORK, ABOUT = "network.safetensors", "retrieval.json"
FOLLOWERS = "followers.safetensors"
ASKING = 4096  # users whose queries say what of the items' vectors matters
FIRST = "item-vectors"  # where a run keeps the training of the dense head alone


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
    def train(cls, data: Dataset, split: Split, config: TrainConfig, work: Workspace) -> Self:
        check_collaborative(config)
        check_distillation(config)
        check_copies(config)
        with world(config.loop.device) as here:
            sids = _semantic_ids(data, config, work, here)
            torch.manual_seed(config.seed)
            model = cls(build_network(config, sids).to(here.device), sids, config)
            loop = config.loop
            part: Part | None = None  # of the network; None is all
            if config.collaborative and work.sids is None:
                part = "digits"
                first, loop = _two_stages(config)
                model = model._with_learned_ids(split, first, work, here)
            if here.writes:
                print(_about(model, split, part), file=sys.stderr)
            found = _run(Task(model, split, here, part), loop, work, work.run, "training")
            if here.writes:
                words = ", ".join(f"{name} {value:.2%}" for name, value in found.items())
                print(
                    f"the best network on validation, all users, digits in one step: {words}",
                    file=sys.stderr,
                )
                _draw(work.run, *([] if part is None else [work.run / FIRST]))
        if model.network.dense and here.writes:
            model.weigh(split)
        return model

    def _with_learned_ids(
        self, split: Split, loop: LoopConfig, work: Workspace, here: World
    ) -> Self:
        """The same model after its dense head was trained alone, with semantic IDs made of what
        that learned (`maskgr.models.collaborative`)."""
        folder = work.run / FIRST
        made = folder / "sids"
        if work.resume and is_artefact(made):
            load_network(self.network, folder / BEST)
        else:
            _run(Task(self, split, here, "dense"), loop, work, folder, "item vectors")
            if here.writes:
                _draw(folder)
                vectors = self._item_vectors(split)
                self.sids.remade(vectors, self.config.quantizer, progress=work.progress).save(made)
            here.wait()
        sids = SemanticIds.load(made)
        torch.manual_seed(self.config.seed)
        network = build_network(self.config, sids).to(here.device)
        model = type(self)(network, sids, self.config)
        carry_over(self.network, self.digits, network, model.digits)
        return model

    @torch.no_grad()
    def _item_vectors(self, split: Split) -> npt.NDArray[np.float32]:
        """(items, width) what the dense head learned of the items, as its scores see it."""
        network = self.network.eval()
        rng = np.random.default_rng(self.config.seed)
        users = rng.permutation(np.flatnonzero(split.train.lengths))[:ASKING]
        histories = split.train.select(users).last(self.config.history_limit + 1)
        queries = []
        for rows in self.portions(histories):
            numbers, layout = self.batch(by_length(histories.select(rows)))
            past = network.remember(self.digits[numbers], layout, numbers)
            queries.append(network.queries(past).cpu())
        return score_space(network.table(self.digits).cpu().numpy(), torch.cat(queries).numpy())

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

    def weigh(self, split: Split) -> None:
        """Chooses on validation users what counts how much (`retrieval.Weights`), one after the
        other."""
        sample = split.validation.sample(self.config.loop.validation_users, self.config.seed)
        if self.config.dense.followers:
            most = self.config.dense.followers
            self.followers = Followers.of(split.train, len(self.sids.digits), most)
        self.forget()
        repeats = self.network.repeats != 0
        if repeats:
            self._choose("repeat", retrieval.REPEAT, sample, "dense")
        if self.followers is not None:
            self._choose("follow", retrieval.FOLLOW, sample, "dense")
        if repeats:
            self._choose("repeat_beams", retrieval.REPEAT_BEAMS, sample, "generative")
        self._choose_fusion(sample, None if split.train.repeats().any() else sample.histories)

    def _with_weights(self, weights: Weights) -> Self:
        """The same model, with nothing computed anew."""
        other = replace(self, weights=weights)
        other.catalogue, other.digits = self.catalogue, self.digits
        other.dense = replace(self.dense, weights=weights)
        return other

    def _choose(
        self,
        name: str,
        values: Sequence[float],
        sample: Holdout,
        way: Literal["dense", "generative"],
    ) -> None:
        """The one of the weight's `values` with the best recall@10; the first of equals."""
        recent = sample.histories.last(self.config.history_limit)
        allowed = np.ones(len(self.sids.digits), dtype=bool)
        decoding = replace(self.config.decoding, retrieval=way)
        found = []
        for value in values:
            told = self._with_weights(replace(self.weights, **{name: value}))
            ranked = told.rank(recent, min(10, len(allowed)), allowed, None, decoding)
            found.append(float(recall(ranked.items, sample.targets, 10).mean()))
        best = int(np.argmax(found))
        self.weights = replace(self.weights, **{name: values[best]})
        self.dense = replace(self.dense, weights=self.weights)
        print(
            f"{way} retrieval: weight of {name} {values[best]}, recall@10 {found[best]:.2%}; with "
            f"{values[0]} it is {found[0]:.2%}, on {len(sample.users):,} validation users",
            file=sys.stderr,
        )

    def _choose_fusion(self, sample: Holdout, excluded: Sequences | None) -> None:
        """Users are asked as `recommend` will ask (without what they had, where nobody takes an
        item twice)."""
        histories = sample.histories.last(self.config.history_limit)
        allowed = np.ones(len(self.sids.digits), dtype=bool)
        decoding = self.config.decoding
        decoder, how = self._decoder(allowed, decoding.constrained), self._how(decoding)
        width, top = max(10, how.beams), min(10, len(allowed))
        hits = np.zeros(len(retrieval.FUSION))
        for rows, asked in self._asked(histories, allowed, excluded, decoding):
            both = retrieval.pool(
                self.dense, decoder, asked, how, min(width, len(allowed)), 0, self.digits
            )
            for number, weight in enumerate(retrieval.FUSION):
                items, _ = both.ranked(weight, top)
                hits[number] += recall(items, sample.targets[rows], 10).sum()
        self.weights = replace(self.weights, fusion=retrieval.FUSION[int(hits.argmax())])
        print(
            f"fused retrieval: dense + {self.weights.fusion} x generative, recall@10 "
            f"{hits.max() / len(sample.users):.2%} on {len(sample.users):,} validation users",
            file=sys.stderr,
        )

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
        decoder = self._decoder(allowed, decoding.constrained)
        how, seed = self._how(decoding), decoding.seed
        for rows, asked in self._asked(histories, allowed, excluded, decoding):
            if kind == "generative":
                repeat = self.weights.repeat_beams * self.network.repeats
                found = retrieval.generative(decoder, asked, how, top, seed, repeat)
                items, values = found.items.cpu().numpy(), found.scores.cpu().numpy()
                invalid += found.invalid_share * len(rows) / len(histories)
            elif kind == "dense":
                items, values = self.dense.rank(asked, top)
            elif kind == "unified":
                items, values = retrieval.unified(self.dense, decoder, asked, how, top, seed)
            else:
                both = retrieval.pool(
                    self.dense, decoder, asked, how, max(top, how.beams), seed, self.digits
                )
                items, values = both.ranked(self.weights.fusion, top)
            ranked[rows, : items.shape[1]] = items
            scores[rows, : items.shape[1]] = values
        return Ranked(ranked, scores, invalid)

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
        aware = self.config.objective.catalogue_aware and constrained
        catalogue = self.catalogue
        if not allowed.all():
            catalogue = catalogue.restrict(torch.from_numpy(allowed).to(self.device))
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


def _two_stages(config: TrainConfig) -> tuple[LoopConfig, LoopConfig]:
    """The budget of the dense head alone, and what is left for the digits."""
    loop, share = config.loop, config.collaborative
    steps = max(1, round(share * loop.steps))
    return (
        replace(loop, steps=steps, minutes=share * loop.minutes),
        replace(loop, steps=max(1, loop.steps - steps), minutes=(1 - share) * loop.minutes),
    )


def _run(
    task: Task, loop: LoopConfig, work: Workspace, folder: Path, label: str
) -> dict[str, float]:
    """Trains in `folder`, from its checkpoints where it goes on; the best network's validation."""
    config, here = task.model.config, task.world
    budget = loop.token_budget // task.tokens_per_item
    batches = Batches(task.split.train, config.history_limit + 1, budget, config.seed)
    with RunLog(folder, label=label, writes=here.writes, progress=work.progress) as log:
        trainer = Trainer(task, batches, loop, folder, here, log)
        if work.resume:
            trainer.resume()
        return trainer.train()


def build_network(config: TrainConfig, sids: SemanticIds) -> Network:
    text = None
    if config.dense.text_input or config.dense.table != "off":
        text = torch.from_numpy(sids.embeddings)
    return Network(config.network, sids.codebook_sizes, config.dense, text)


def _about(model: MaskGR, split: Split, part: Part | None) -> str:
    network = model.network
    window = model.config.history_limit + 1
    lengths = np.minimum(split.train.lengths, window) * network.digits
    length = float((lengths**2).sum() / lengths.sum())  # of the sequence that a token is in
    objective = model.config.objective
    flops = flops_per_token(
        network, length, part=part, taught=objective.distil > 0, copies=objective.copies
    )
    return (
        f"{sum(p.numel() for p in network.parameters()):,} parameters, {flops / 1e6:.1f} million "
        f"floating-point operations a token, on {model.device}"
    )


def _draw(run: Path, *earlier: Path) -> None:
    try:
        draw(run, *earlier)
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
