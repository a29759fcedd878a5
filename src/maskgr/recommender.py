"""Recommender: one set of verbs for every model: train, recommend, evaluate, save, load."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import polars as pl

from maskgr.artefact import is_artefact, read_manifest, write_folder
from maskgr.cards import card
from maskgr.data.config import SplitName, Unknown
from maskgr.data.dataset import Dataset
from maskgr.data.open import shop_of
from maskgr.data.sequences import Sequences
from maskgr.data.splits import Holdout, Split, leave_out, sparsify
from maskgr.data.tables import below, read_table
from maskgr.decoding.config import DecodingConfig, Retrieval
from maskgr.errors import ArtefactError, RequestError
from maskgr.evaluation.protocol import PROTOCOLS, Evaluation, Protocol, evaluate
from maskgr.evaluation.ranking import Query, Ranked, Ranker, SessionPlanner
from maskgr.made import fits_of, how_made
from maskgr.models.base import (
    AddsItems,
    Chosen,
    Decodes,
    HasItemVectors,
    HasSids,
    Model,
    PlansSessions,
    Samples,
    TrainConfig,
    Training,
    capabilities,
    model_class,
    require,
    train_config,
)
from maskgr.models.floors import floors
from maskgr.requests import (
    allowed_items,
    at_least_one,
    checked_decoding,
    item_numbers,
    listed,
    new_items,
    numbered_histories,
    require_dataset,
    session_count,
    whole_number,
    yes_or_no,
)
from maskgr.settings import require_choice
from maskgr.sids.semantic_ids import SemanticIds
from maskgr.similar import Likeness, cosines, most_similar, shared_digits
from maskgr.training.workspace import workspace
from maskgr.users import FILE as USERS
from maskgr.users import Users

KIND, SCHEMA = "recommender", 4
RECOMMENDER = "recommender"  # where a run folder has it

ItemId = Any  # whatever scalar the catalogue uses


class Recommendation(NamedTuple):
    """An item's ID as its owner wrote it, and the log-probability that it is next."""

    item_id: ItemId
    score: float


class Session(NamedTuple):
    """The IDs of the items that come next, in this order, and their joint log-probability."""

    item_ids: tuple[ItemId, ...]
    score: float


@dataclass(frozen=True)
class _Decoder:
    """A model as a ranker that decodes in a given way."""

    model: Decodes
    decoding: DecodingConfig

    def rank(self, query: Query) -> Ranked:
        return self.model.decode(query, self.decoding)


@dataclass(frozen=True)
class _Planner:
    """A model as a planner of sessions that decodes in a given way."""

    model: PlansSessions
    decoding: DecodingConfig
    repeats: bool

    def sessions(self, query: Query, items: int) -> npt.NDArray[np.int64]:
        return self.model.sessions(query, items, self.decoding, repeats=self.repeats)[0]


@dataclass(frozen=True, eq=False)
class Recommender:
    """A trained model with its catalogue."""

    model: Model
    items: pl.DataFrame  # item_id first; the row is the item's number
    config: TrainConfig
    repeats: bool  # whether users come back to an item in the training histories
    made: Mapping[str, Any] = field(default_factory=dict)  # data fingerprint, versions, time spent
    users: Users = field(default_factory=Users.none)  # and their histories, held-out items included

    def __repr__(self) -> str:
        found = self.summary()
        counts = ", ".join(f"{found[name]:,} {name}" for name in ("users", "items", "events"))
        return f"Recommender({self.config.name}: {counts})"

    def _repr_html_(self) -> str:
        facts = {name: value for name, value in self.summary().items() if value is not None}
        return card(f"Recommender: {self.config.name}", self.model.about, facts)

    def summary(self) -> dict[str, Any]:
        """Facts about the model, its data and its training, for people."""
        made, counts = self.made, self.made.get("counts", {})
        fits = {stage: own["metrics"] for stage, own in made.get("fits", {}).items()}
        found = [own["recall@10"] for own in fits.values() if "recall@10" in own]
        held_out = self.config.leave_out
        return {
            "users": int(counts.get("users", 0)),
            "items": len(self.items),
            "events": int(counts.get("events", 0)),
            "columns of items": list(self.items.columns),
            "held out": f"the last {2 * held_out} of each user, for validation and test"
            if held_out
            else "nothing: no figures of its own",
            "validation recall@10": f"{found[-1]:.2%}" if found else None,
            "history": f"the last {self.config.history_limit} items",
            "repeats": self.repeats,
            "can": ["rank items", *capabilities(type(self.model))],
            "trained in": f"{made['seconds'] / 60:.1f} minutes" if "seconds" in made else None,
            "with": "maskgr {maskgr}, Python {python}".format(**made["versions"])
            if "versions" in made
            else None,
        }

    @classmethod
    def train(
        cls,
        data: Dataset,
        *,
        model: str | None = None,
        preset: str = "cpu",
        config: TrainConfig | None = None,
        sids: SemanticIds | None = None,
        run: Path | str | None = None,
        resume: bool = False,
        progress: bool = False,
        made: Mapping[str, Any] | None = None,
        like: Recommender | None = None,
    ) -> Recommender:
        """Trains on what leave-k-out leaves, or on everything (`like`).

        model, preset: one of `maskgr models` and one of its presets; or `config`, which has all.
        sids: ready-made semantic IDs; else they are made as the config says.
        run: a folder for checkpoints and logs, from which `resume` goes on with an interrupted
            training; without one they are thrown away.
        made: kept with the recommender, beside versions, the data's fingerprint and the time spent.
        like: a recommender that was trained with held-out items. This one is trained as that one
            was, with the numbers of steps and the weights that validation chose there, on
            everything: nothing is held out, and there is nothing to evaluate it on.
        """
        require_dataset(data)
        if like is None:
            config = _fitting(config or train_config(preset, model=model), len(data.items))
        else:
            config = everything(like, config and config.for_catalogue(len(data.items)))
        start = time.perf_counter()
        if run is None and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise RequestError(
                "processes that train together need one folder for all of them; give run=…"
            )
        kind = model_class(config.name)
        if sids is not None and not kind.uses_sids:
            raise RequestError(f"{config.name} has no use for semantic IDs; leave --sids out")
        split = held_out(data, config)
        with contextlib.ExitStack() as stack:
            folder = Path(run or stack.enter_context(TemporaryDirectory(prefix="maskgr-")))
            work = stack.enter_context(
                workspace(folder, device=config.device, resume=resume, progress=progress)
            )
            chosen = None if like is None else Chosen(like.model, fits_of(like.made))
            training = Training(data, split, config, work, sids, chosen)
            if work.world.size > 1:
                work.world.require_alike(f"{data.content} {config}")
            trained = kind.learn(training)
            work.world.wait()  # until here torchrun can start all processes again
        return cls(
            model=trained,
            items=data.items,
            config=config,
            repeats=bool(split.train.repeats().any()),
            made={**(made or {}), **how_made(data, training.fits, time.perf_counter() - start)},
            users=Users.of(data.users, data.histories),
        )

    def recommend(
        self,
        histories: Sequence[Any],
        top: int = 10,
        *,
        exclude_seen: bool | None = None,
        allow: Iterable[ItemId] | None = None,
        deny: Iterable[ItemId] = (),
        where: pl.Expr | str | None = None,
        unknown: Unknown = "raise",
        retrieval: Retrieval | None = None,
        decoding: DecodingConfig | None = None,
    ) -> list[Any]:
        """The `top` next items for one history (IDs, oldest first) or for a list of histories:
        a list of Recommendation, or a list of such lists. `[]` is a list of no histories, and
        `[[]]` has one history without items.

        exclude_seen: leave out the items of the history; by default where the training histories
            show that nobody takes an item twice.
        allow, deny: only these items, none of these items.
        where: only items whose columns fulfil this: SQL ("in_stock and price < 30") or a polars
            expression.
        unknown: an ID that is not in the catalogue raises, or is skipped.
        retrieval: `generative`, `dense` or `unified`, for the models that have the choice.
        decoding: order, steps, beams and so on, for the models that decode (see `decoding`).

        Fewer than `top` come back only where the filters leave fewer.
        """
        numbers, many = numbered_histories(self.items, histories, unknown)
        answers = self.recommend_numbers(
            numbers,
            top,
            exclude_seen=exclude_seen,
            allow=allow,
            deny=deny,
            where=where,
            unknown=unknown,
            retrieval=retrieval,
            decoding=decoding,
        )
        return answers if many else answers[0]

    def recommend_users(
        self, user_ids: Sequence[Any], top: int = 10, **options: Any
    ) -> list[list[Recommendation]]:
        """`recommend`, with its options, for users of the training data: each has all of their
        history, held-out items included."""
        rows = self.users.rows(listed(user_ids, "user_ids"))
        return self.recommend_numbers(self.users.histories.select(rows), top, **options)

    def recommend_numbers(
        self,
        histories: Sequences,
        top: int = 10,
        *,
        exclude_seen: bool | None = None,
        allow: Iterable[ItemId] | None = None,
        deny: Iterable[ItemId] = (),
        where: pl.Expr | str | None = None,
        unknown: Unknown = "raise",
        retrieval: Retrieval | None = None,
        decoding: DecodingConfig | None = None,
    ) -> list[list[Recommendation]]:
        """`recommend` for histories of item numbers, which need no translation."""
        if retrieval is not None:
            chosen = self.decoding() if decoding is None else checked_decoding(decoding)
            decoding = replace(chosen, retrieval=retrieval)
        ranker, allowed = self.ranker(decoding), self.allowed(allow, deny, unknown, where)
        query = self.query(histories, top, exclude_seen=exclude_seen, allowed=allowed)
        return self.named(ranker.rank(query)) if len(histories) else []

    def history_of(self, user_id: Any) -> list[ItemId]:
        """The item IDs of a user of the training data, oldest first, held-out items included."""
        numbers = self.users.histories[self.users.row(user_id)]
        return self.items["item_id"].gather(numbers).to_list()

    def sessions(
        self,
        histories: Sequence[Any],
        items: int = 2,
        top: int = 10,
        *,
        exclude_seen: bool | None = None,
        allow: Iterable[ItemId] | None = None,
        deny: Iterable[ItemId] = (),
        where: pl.Expr | str | None = None,
        repeats: bool | None = None,
        unknown: Unknown = "raise",
        decoding: DecodingConfig | None = None,
    ) -> list[Any]:
        """The `top` most probable sequences of the next `items` items, decoded together: a list of
        Session for one history, or a list of such lists for a list of histories.

        repeats: whether an item may be in a session twice; by default where the training histories
            show that users come back to an item. The rest is as in `recommend`.
        """
        model = require(self.model, PlansSessions)
        chosen = yes_or_no("repeats", repeats)
        repeats = self.repeats if chosen is None else chosen
        numbers, many = numbered_histories(self.items, histories, unknown)
        allowed = self.allowed(allow, deny, unknown, where)
        query = self.query(numbers, 1, exclude_seen=exclude_seen, allowed=allowed)
        available = None if allowed is None else int(allowed.sum())
        longest = self.config.history_limit
        top = session_count(len(self.items), items, top, available, longest, repeats=repeats)
        if not len(numbers):
            return []
        found, scores = model.sessions(
            replace(query, top=top),
            items,
            self.decoding() if decoding is None else checked_decoding(decoding),
            repeats=repeats,
        )
        ids = self.items["item_id"]
        answers = [
            [
                Session(tuple(ids[item] for item in session), float(score))
                for session, score in zip(row.tolist(), values.tolist(), strict=True)
                if session[0] >= 0
            ]
            for row, values in zip(found, scores, strict=True)
        ]
        return answers if many else answers[0]

    def sample(
        self,
        history: Sequence[ItemId],
        count: int = 10,
        *,
        steps: int = 0,
        temperature: float = 1.0,
        seed: int = 0,
        exclude_seen: bool | None = None,
        unknown: Unknown = "raise",
    ) -> list[ItemId]:
        """`count` next items drawn from the model (with replacement) instead of searched for.

        steps: noise levels from all masked to none (0: one for every digit).
        """
        count, steps = whole_number("count", count), whole_number("steps", steps)
        seed = whole_number("seed", seed)
        if count < 1 or steps < 0:
            raise RequestError(f"{count} samples in {steps} steps; give at least 1 of each")
        if not isinstance(temperature, int | float):
            raise RequestError(f"temperature is {temperature!r}; give a number above 0")
        if not temperature > 0:
            raise RequestError(f"temperature {temperature} cannot be drawn at; give one above 0")
        model = require(self.model, Samples)
        numbers = Sequences.of([self.numbers(listed(history, "the history"), unknown=unknown)])
        query = replace(self.query(numbers, 1, exclude_seen=exclude_seen), top=count)
        drawn = model.sample(query, steps=steps, temperature=temperature, seed=seed)
        return [self.items["item_id"][item] for item in drawn[0].tolist() if item >= 0]

    def add_items(self, items: Any, *, embeddings: npt.NDArray[Any] | None = None) -> Recommender:
        """A recommender of the same model that knows new items too, without training.

        items: a frame with `item_id` and the text columns of the catalogue; embeddings: (items, d)
            where the catalogue's own were given, not encoded.

        The old items keep their semantic IDs.
        """
        model, new = require(self.model, AddsItems), new_items(self.items, items)
        if not len(new):
            return self
        grown = model.with_items(new, embeddings)
        return replace(self, model=grown, items=below(self.items, new))

    def update(
        self,
        events: Any,
        items: Any = None,
        *,
        embeddings: npt.NDArray[Any] | None = None,
        minutes: float | None = None,
        settings: Sequence[str] = (),
        run: Path | str | None = None,
        resume: bool = False,
        progress: bool = False,
    ) -> Recommender:
        """A recommender that has gone on learning from new events; this one stays what it is.

        events: a frame as a dataset has it, of old and new users; its rows come after the old ones.
        items: new items, as in `add_items`; embeddings: their vectors, where the catalogue's own
            were given.
        minutes: time for training, 5 by default; settings: `key=value` texts that change how it
            trains (`fit.learning_rate=1e-4`).
        run, resume, progress: as in `train`.
        """
        from maskgr import update

        config = update.update_config(self, settings, minutes=minutes)
        prepared = update.prepare(self, events, items, embeddings=embeddings)
        return update.train(prepared, config, run=run, resume=resume, progress=progress)

    def dataset(self) -> Dataset:
        """The users' histories and the items that it was trained on, as a dataset; items that were
        added later are not in it."""
        return Dataset(
            users=self.users.ids,
            items=self.items.head(self.made.get("counts", {}).get("items", len(self.items))),
            histories=self.users.histories,
            text=tuple(self.made.get("provenance", {}).get("text", ())),
            provenance=self.made.get("provenance", {}),
        )

    def similar_items(
        self,
        item_id: ItemId,
        top: int = 10,
        *,
        by: Likeness = "vectors",
        allow: Iterable[ItemId] | None = None,
        deny: Iterable[ItemId] = (),
        where: pl.Expr | str | None = None,
    ) -> list[Recommendation]:
        """The items most like one item, itself left out; a score is no log-probability here.

        by: `vectors`, the cosine of the vectors that the model learned; or `sids`, the number of
            first digits in common, and among items with as many the nearness of what their digits
            stand for (see `maskgr.similar.shared_digits`).
        """
        require_choice("by", by, Likeness)
        item = int(self.numbers([item_id], "this request")[0])
        top, allowed = self._top(top), self.allowed(allow, deny, "raise", where)
        left = np.ones(len(self.items), dtype=bool) if allowed is None else allowed.copy()
        left[item] = False
        if by == "vectors":
            scores = cosines(require(self.model, HasItemVectors), item, len(self.items))
        else:
            sids = require(self.model, HasSids).semantic_ids()
            scores = shared_digits(sids, item, top, left)
        found = most_similar(scores, top, left)
        ids = self.items["item_id"]
        return [Recommendation(ids[number], float(scores[number])) for number in found.tolist()]

    def embeddings(self) -> pl.DataFrame:
        """item_id and embedding, an array: the vectors that the model learned."""
        vectors = require(self.model, HasItemVectors).item_vectors(np.arange(len(self.items)))
        array = pl.Series("embedding", vectors, dtype=pl.Array(pl.Float32, vectors.shape[1]))
        return pl.DataFrame([self.items["item_id"], array])

    def digits_of(self, item_id: ItemId) -> tuple[int, ...] | None:
        """The item's semantic ID; None where the model has none."""
        item = int(self.numbers([item_id], "this request")[0])
        if not isinstance(self.model, HasSids):
            return None
        return tuple(self.model.semantic_ids().digits[item].tolist())

    def items_with_prefix(self, prefix: Sequence[int]) -> list[ItemId]:
        """The IDs of the items whose semantic IDs begin with these digits."""
        digits = [whole_number("a digit", d) for d in listed(prefix, "the prefix", of="digits")]
        rows = require(self.model, HasSids).semantic_ids().with_prefix(digits)
        return self.items["item_id"].gather(rows).to_list()

    def evaluate(
        self,
        data: Dataset,
        *,
        split: SplitName = "test",
        ks: Sequence[int] = (5, 10),
        protocols: Sequence[Protocol] = PROTOCOLS,
        users: int | None = None,
        decoding: DecodingConfig | None = None,
    ) -> Evaluation:
        """Recall and NDCG at `ks` on the held-out items of the dataset it was trained on, with
        popularity and neighbours beside it (`floors`).

        users: a random sample of so many instead of all.
        """
        ks = [whole_number("K", k) for k in listed(ks, "ks", of="numbers")]
        for protocol in listed(protocols, "protocols", of="names"):
            require_choice("protocol", protocol, Protocol)
        known = self.split(data)
        holdout = known.holdout(split)
        if users is not None:
            holdout = holdout.sample(at_least_one("users", users))
        how: dict[str, Any] = {"ks": ks, "protocols": protocols}
        found = evaluate(self.ranker(decoding), holdout, len(self.items), shop=shop_of(data), **how)
        beside = {
            name: evaluate(model, holdout, len(data.items), **how)
            for name, model in floors(known.train, len(data.items)).items()
        }
        return replace(found, floors=beside)

    def split(self, data: Dataset) -> Split:
        """What was trained on and what was held out; raises where `data` is another dataset, whose
        histories would leak or mislead."""
        require_dataset(data)
        if data.fingerprint != self.made.get("fingerprint"):
            raise RequestError(
                "this is not the dataset that the recommender was trained on (it differs in users, "
                "items or events); give the same, or train again"
            )
        if self.config.leave_out == 0:
            raise RequestError(
                "this recommender was trained on everything, so there are no held-out items to "
                "evaluate it on; evaluate the one that it was trained like"
            )
        return held_out(data, self.config)

    def decoding(self, **changes: Any) -> DecodingConfig:
        """The model's own way to decode, with `changes`."""
        model = require(self.model, Decodes)
        try:
            return replace(model.decoding(), **changes)
        except TypeError as error:
            raise RequestError(
                f"decoding has no such setting ({error}); see DecodingConfig"
            ) from None

    def ranker(self, decoding: DecodingConfig | None = None) -> Ranker:
        """The model, in its own way or as `decoding` says: what `evaluate` asks for."""
        if decoding is None:
            return self.model
        return _Decoder(require(self.model, Decodes), checked_decoding(decoding))

    def planner(self, decoding: DecodingConfig | None = None) -> SessionPlanner:
        """The same for sessions: what `evaluate_sessions` asks for."""
        model = require(self.model, PlansSessions)
        decoding = self.decoding() if decoding is None else checked_decoding(decoding)
        return _Planner(model, decoding, self.repeats)

    def query(
        self,
        histories: Sequences,
        top: int,
        *,
        exclude_seen: bool | None = None,
        allowed: npt.NDArray[np.bool_] | None = None,
    ) -> Query:
        """A question about item numbers, checked."""
        top = self._top(top)
        chosen = yes_or_no("exclude_seen", exclude_seen)
        exclude = not self.repeats if chosen is None else chosen
        return Query(histories, top, allowed, histories if exclude else None)

    def _top(self, top: int) -> int:
        top = whole_number("top", top)
        if not 1 <= top <= len(self.items):
            raise RequestError(
                f"cannot give {top} items of a catalogue of {len(self.items):,}; ask for 1 to "
                f"{len(self.items):,}"
            )
        return top

    def named(self, ranked: Ranked) -> list[list[Recommendation]]:
        """Ranked item numbers as recommendations, without the places that were not filled."""
        ids = self.items["item_id"]
        return [
            [
                Recommendation(ids[item], float(score))
                for item, score in zip(row.tolist(), scores.tolist(), strict=True)
                if item >= 0
            ]
            for row, scores in zip(ranked.items, ranked.scores, strict=True)
        ]

    def numbers(
        self, ids: Iterable[ItemId], where: str = "the history", unknown: Unknown = "raise"
    ) -> npt.NDArray[np.int32]:
        """The numbers of item IDs; `where` they stand is for the error message."""
        return item_numbers(self.items, ids, where, unknown)

    def allowed(
        self,
        allow: Iterable[ItemId] | None,
        deny: Iterable[ItemId],
        unknown: Unknown = "raise",
        where: pl.Expr | str | None = None,
    ) -> npt.NDArray[np.bool_] | None:
        """(items,) the items that the lists and the condition leave; None: all."""
        return allowed_items(self.items, allow, deny, unknown, where)

    def save(self, path: Path | str, *, add: Callable[[Path], None] = lambda folder: None) -> None:
        """Writes one folder: the model, the catalogue, and how it was made; `add` changes it before
        its checksums are taken."""
        config = {
            "train": self.config.to_dict(),
            "repeats": self.repeats,
            "made": dict(self.made),
        }
        with write_folder(path, KIND, SCHEMA, config) as folder:
            self.model.save(folder)
            self.items.write_parquet(folder / "items.parquet")
            self.users.save(folder)
            add(folder)

    @classmethod
    def load(cls, path: Path | str) -> Recommender:
        """From a folder that `save` wrote, or from a run folder."""
        path = Path(path)
        if is_artefact(path / RECOMMENDER):
            path = path / RECOMMENDER
        manifest = read_manifest(path, KIND, SCHEMA)
        try:
            config = TrainConfig.from_dict(manifest.config["train"])
            made, repeats = manifest.config["made"], bool(manifest.config["repeats"])
        except (KeyError, TypeError) as error:
            raise ArtefactError(f"{path} is damaged ({error}); train it again") from error
        return cls(
            model=model_class(config.name).load(path, config),
            items=read_table(path / "items.parquet"),
            config=config,
            repeats=repeats,
            made=made,
            users=Users.load(path / USERS, manifest.files[USERS]["sha256"]),
        )


def held_out(data: Dataset, config: TrainConfig) -> Split:
    """What to train on, and what is held out."""
    if config.leave_out == 0:
        nobody = Holdout(
            np.zeros(0, dtype=np.int64), Sequences.of([]), np.zeros((0, 1), dtype=np.int32)
        )
        split = Split(data.histories, nobody, nobody)
    else:
        split = leave_out(data.histories, config.leave_out)
    return replace(split, train=sparsify(split.train, config.sparsify, config.seed))


def _fitting(config: TrainConfig, items: int) -> TrainConfig:
    """The settings for a catalogue of so many items; what changes is told."""
    found = config.for_catalogue(items)
    if found != config and os.environ.get("RANK", "0") == "0":
        print(
            f"note: {items:,} items are too many for a softmax over all of them in every step, so "
            "negatives are sampled (loss=sampled)",
            file=sys.stderr,
        )
    return found


def everything(like: Recommender, config: TrainConfig | None = None) -> TrainConfig:
    """The settings of a training on everything: those of `like`; the seed and the device may be
    others."""
    own = replace(like.config, leave_out=0)
    if config is None:
        return own
    if replace(config, seed=own.seed, device=own.device, leave_out=0) != own:
        raise RequestError(
            "a training like another one has its settings; leave the others out, or train without "
            "--like"
        )
    return replace(config, leave_out=0)
