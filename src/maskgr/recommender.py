"""Recommender: one set of verbs for every model: train, recommend, save, load."""

from __future__ import annotations

import contextlib
import os
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import polars as pl

import maskgr
from maskgr.artefact import is_artefact, read_manifest, write_folder
from maskgr.config import TrainConfig, preset_config
from maskgr.data.dataset import Dataset
from maskgr.data.ingest import codes
from maskgr.data.sequences import Sequences
from maskgr.data.splits import leave_out, sparsify
from maskgr.data.tables import below, read_table
from maskgr.decoding.config import DecodingConfig
from maskgr.errors import ArtefactError, DataError, RequestError
from maskgr.models.base import Model, Ranked, Workspace, model_class

if TYPE_CHECKING:
    from maskgr.models.maskgr import MaskGR
    from maskgr.sids.semantic_ids import SemanticIds

KIND, SCHEMA = "recommender", 1
RECOMMENDER = "recommender"  # where a run folder has it

Unknown = Literal["raise", "skip"]
Retrieval = Literal["auto", "generative", "dense", "unified", "fused"]
ItemId = Any  # whatever scalar the catalogue uses


class Recommendation(NamedTuple):
    """An item as its owner wrote it, and its log-probability of being next."""

    item_id: ItemId
    score: float


class Session(NamedTuple):
    """Items that come next, in this order, and the log-probability of all of them."""

    item_ids: tuple[ItemId, ...]
    score: float


@dataclass(frozen=True, eq=False)
class Recommender:
    """A trained model with the catalogue that it speaks of."""

    model: Model
    items: pl.DataFrame  # item_id first; the row is the item's number
    config: TrainConfig
    repeats: bool  # whether users come back to an item in the training histories
    made: Mapping[str, Any] = field(default_factory=dict)  # data fingerprint, versions, time spent

    @classmethod
    def train(
        cls,
        data: Dataset,
        *,
        preset: str | None = None,
        config: TrainConfig | None = None,
        sids: SemanticIds | None = None,
        run: Path | str | None = None,
        resume: bool = False,
        progress: bool = False,
        made: Mapping[str, Any] | None = None,
    ) -> Recommender:
        """Trains on what leave-k-out leaves.

        preset, config: `tiny`, `cpu` (the default) or `paper`, or settings of your own.
        sids: semantic IDs made before; else they are made as the config says.
        run: a folder for checkpoints and logs, from which an interrupted training goes on with
            `resume`; without one they are thrown away.
        made: kept with the run, beside the versions, the data's fingerprint and the time spent.
        """
        config = config or preset_config(preset or "cpu")
        start = time.perf_counter()
        if config.history_limit < 1:
            raise RequestError(
                f"a history limit of {config.history_limit} shows the model nothing; use 1 or more"
            )
        if run is None and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise RequestError(
                "processes that train together need one folder for all of them; give run=…"
            )
        split = leave_out(data.histories, config.leave_out)
        split = replace(split, train=sparsify(split.train, config.sparsify, config.seed))
        with contextlib.ExitStack() as stack:
            folder = Path(run or stack.enter_context(TemporaryDirectory(prefix="maskgr-")))
            work = Workspace(folder, resume, progress, sids)
            model = model_class(config.model).train(data, split, config, work)
        return cls(
            model=model,
            items=data.items,
            config=config,
            repeats=bool(split.train.repeats().any()),
            made={
                **(made or {}),
                "fingerprint": data.fingerprint,
                "provenance": dict(data.provenance),
                "seconds": round(time.perf_counter() - start, 3),
                "versions": _versions(),
            },
        )

    def recommend(
        self,
        histories: Sequence[Any],
        top: int = 10,
        *,
        exclude_seen: bool | None = None,
        allow: Sequence[ItemId] | None = None,
        deny: Sequence[ItemId] = (),
        unknown: Unknown = "raise",
        retrieval: Retrieval | None = None,
        decoding: DecodingConfig | None = None,
    ) -> list[Any]:
        """The `top` next items for one history (IDs, oldest first) or for a list of histories:
        a list of Recommendation, or a list of such lists.

        exclude_seen: leave out the items of the history; by default where the training histories
            show that nobody takes an item twice.
        allow, deny: only these items, none of these items.
        unknown: an ID that is not in the catalogue raises, or is skipped.
        retrieval: `generative`, `dense`, `unified` or `fused`, for the models that have the choice.
        decoding: order, steps, beams and so on, for the models that decode (see `decoding`).

        Fewer than `top` come back only where the filters leave fewer.
        """
        if retrieval is not None:
            decoding = replace(decoding or self.config.decoding, retrieval=retrieval)
        many = any(isinstance(h, (list, tuple, np.ndarray, pl.Series)) for h in histories)
        rows = histories if many else [histories]
        ranked, scores, _ = self.rank(
            Sequences.of([self.numbers(row, "the history", unknown) for row in rows]),
            top,
            exclude_seen=exclude_seen,
            allowed=self._allowed(allow, deny, unknown),
            decoding=decoding,
        )
        ids = self.items["item_id"]
        answers = [
            [
                Recommendation(ids[item], float(score))
                for item, score in zip(row.tolist(), row_scores.tolist(), strict=True)
                if item >= 0
            ]
            for row, row_scores in zip(ranked, scores, strict=True)
        ]
        return answers if many else answers[0]

    def sessions(
        self,
        history: Sequence[ItemId],
        items: int = 2,
        top: int = 10,
        *,
        exclude_seen: bool | None = None,
        repeats: bool = False,
        unknown: Unknown = "raise",
        decoding: DecodingConfig | None = None,
    ) -> list[Session]:
        """The `top` most probable sequences of the next `items` items, decoded together.

        repeats: whether an item may be in a session twice; the rest is as in `recommend`.
        """
        if items < 1:
            raise RequestError(f"a session of {items} items is empty; ask for 1 or more")
        numbers = Sequences.of([self.numbers(history, "the history", unknown)])
        _, found = next(
            self.generative().search(
                numbers.last(self.config.history_limit),
                top,
                np.ones(len(self.items), dtype=bool),
                self.seen(numbers, exclude_seen),
                decoding,
                items=items,
                repeats=repeats,
            )
        )
        ids = self.items["item_id"]
        rows = found.items[0].reshape(-1, items).tolist()
        return [
            Session(tuple(ids[item] for item in row), score)
            for row, score in zip(rows, found.scores[0].tolist(), strict=True)
            if row[0] >= 0
        ]

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
        model = self.generative()
        numbers = Sequences.of([self.numbers(history, "the history", unknown)])
        drawn = model.sample(
            numbers.last(self.config.history_limit),
            count,
            np.ones(len(self.items), dtype=bool),
            self.seen(numbers, exclude_seen),
            steps=steps or model.network.digits,
            temperature=temperature,
            seed=seed,
        )
        return [self.items["item_id"][item] for item in drawn[0].tolist() if item >= 0]

    def add_items(self, items: Any, *, embeddings: npt.NDArray[Any] | None = None) -> Recommender:
        """A recommender of the same model that knows new items too, without training.

        items: a frame with `item_id` and the text columns of the catalogue; embeddings: (items, d)
            where the catalogue's own were given, not encoded.

        The old items keep their semantic IDs and their generative scores.
        """
        frame = items if isinstance(items, pl.DataFrame) else pl.from_pandas(items)
        if "item_id" not in frame.columns:
            raise DataError(f"the new items have no column item_id (they have: {frame.columns})")
        ids = frame["item_id"].cast(self.items["item_id"].dtype, strict=False)
        wrong = ids.is_null() | ids.is_duplicated() | ids.is_in(self.items["item_id"].implode())
        if wrong.any():
            first = frame["item_id"][int(wrong.arg_max() or 0)]
            raise DataError(
                f"{int(wrong.sum())} of the new items are old, repeated or without an ID (first: "
                f"{first!r}); give each new item once"
            )
        frame = frame.with_columns(item_id=ids)
        if not len(frame):
            return self
        return replace(
            self,
            model=self.model.with_items(frame, embeddings),
            items=below(self.items, frame),
        )

    def generative(self) -> MaskGR:
        from maskgr.models.maskgr import MaskGR

        if not isinstance(self.model, MaskGR):
            raise RequestError(
                f"{self.config.model} does not unmask anything; use a run of maskgr for this"
            )
        return self.model

    def seen(self, histories: Sequences, exclude: bool | None) -> Sequences | None:
        """What is left out: by default the history, where nobody takes an item twice."""
        return histories if (exclude if exclude is not None else not self.repeats) else None

    def rank(
        self,
        histories: Sequences,
        top: int,
        *,
        exclude_seen: bool | None = None,
        allowed: npt.NDArray[np.bool_] | None = None,
        decoding: DecodingConfig | None = None,
    ) -> Ranked:
        """`recommend` in item numbers: (histories, top) items and scores, -1 where there are none.

        The model sees the most recent `history_limit` items; `exclude_seen` removes all.
        """
        self.check_top(top)
        if allowed is None:
            allowed = np.ones(len(self.items), dtype=bool)
        recent = histories.last(self.config.history_limit)
        return self.model.rank(recent, top, allowed, self.seen(histories, exclude_seen), decoding)

    def decoding(self, **changes: Any) -> DecodingConfig:
        """The run's own way to decode, with some of it changed: `rec.decoding(steps=2)`."""
        try:
            return replace(self.config.decoding, **changes)
        except TypeError as error:
            raise RequestError(
                f"decoding has no such setting ({error}); see DecodingConfig"
            ) from None

    def check_top(self, top: int) -> None:
        if not 1 <= top <= len(self.items):
            raise RequestError(
                f"cannot give {top} items of a catalogue of {len(self.items):,}; ask for 1 to "
                f"{len(self.items):,}"
            )

    def numbers(self, ids: Sequence[ItemId], where: str, unknown: Unknown) -> npt.NDArray[np.int32]:
        if not len(ids):
            return np.empty(0, dtype=np.int32)
        given = pl.Series("item_id", ids, strict=False)
        catalogue = self.items["item_id"]
        if given.dtype != catalogue.dtype:
            given = given.cast(catalogue.dtype, strict=False)
        numbers = codes(given, catalogue).to_numpy()
        if unknown == "raise" and (numbers < 0).any():
            stranger = list(ids)[int(np.argmax(numbers < 0))]
            raise RequestError(
                f"item {stranger!r} of {where} is not in the catalogue; remove it, or pass "
                "unknown='skip' (--unknown skip)"
            )
        known: npt.NDArray[np.int32] = numbers[numbers >= 0]
        return known

    def _allowed(
        self, allow: Sequence[ItemId] | None, deny: Sequence[ItemId], unknown: Unknown
    ) -> npt.NDArray[np.bool_]:
        allowed = np.ones(len(self.items), dtype=bool)
        if allow is not None:
            allowed[:] = False
            allowed[self.numbers(allow, "the allow list", unknown)] = True
        allowed[self.numbers(deny, "the deny list", unknown)] = False
        if not allowed.any():
            raise RequestError("the allow and deny lists leave no item; allow more or deny fewer")
        return allowed

    def save(self, path: Path | str) -> None:
        """As one folder: the model, the catalogue, and how it was made."""
        config = {"train": asdict(self.config), "repeats": self.repeats, "made": dict(self.made)}
        with write_folder(path, KIND, SCHEMA, config) as folder:
            self.model.save(folder)
            self.items.write_parquet(folder / "items.parquet")

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
            model=model_class(config.model).load(path, config),
            items=read_table(path / "items.parquet"),
            config=config,
            repeats=repeats,
            made=made,
        )


def _versions() -> dict[str, str]:
    return {
        "maskgr": maskgr.__version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "polars": pl.__version__,
        "platform": sys.platform,
    }
