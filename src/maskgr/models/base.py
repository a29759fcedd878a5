"""What a model is, what else it may be able to do, and the models there are.

To add one: write its file with a class that satisfies `Model`, and name it in `MODELS`. Training,
evaluation, saving and the command follow from that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import (
    Any,
    ClassVar,
    Protocol,
    Self,
    TypeVar,
    cast,
    get_type_hints,
    runtime_checkable,
)

import numpy as np
import numpy.typing as npt
import polars as pl
import torch

from maskgr.data.config import MAX_SEED
from maskgr.data.dataset import Dataset
from maskgr.data.sequences import Counts
from maskgr.data.splits import Split
from maskgr.decoding.beams import Step
from maskgr.decoding.config import DecodingConfig
from maskgr.decoding.matching import Filters
from maskgr.devices import pick_device
from maskgr.errors import RequestError
from maskgr.evaluation.ranking import Query, Ranked
from maskgr.models.graphs import Exported
from maskgr.nn.scoring import pairs
from maskgr.settings import apply_settings, require_numbers
from maskgr.sids.semantic_ids import SemanticIds
from maskgr.training.fit import FitConfig, Fitted, Trainable, fit
from maskgr.training.workspace import Workspace

T = TypeVar("T")
MIN_MINUTES = 0.01  # less is over before the first step
# Items above which a softmax over all of them takes most of a training's time, and elsewhere (on
# a GPU) most of its memory.
LARGE = {"cpu": 100_000}
LARGEST = 2**20

MODELS = {  # imported when first asked for
    "maskgr": "maskgr.models.maskgr.model:MaskGR",
    "maskgr-paper": "maskgr.models.maskgr.paper:PaperMaskGR",
    "tiger": "maskgr.models.tiger:Tiger",
    "liger": "maskgr.models.liger:Liger",
    "sasrec": "maskgr.models.sasrec:SASRec",
    "bert4rec": "maskgr.models.bert4rec:Bert4Rec",
    "dreamrec": "maskgr.models.dreamrec:DreamRec",
    "cadirec": "maskgr.models.cadirec:CaDiRec",
    "neighbours": "maskgr.models.neighbours:Neighbours",
    "popularity": "maskgr.models.popularity:Popularity",
}


@dataclass(frozen=True)
class TrainConfig:
    """Everything that decides a training."""

    name: str
    """One of `MODELS`."""
    model: Any
    """The model's own settings: an instance of its `Config`."""
    fit: FitConfig
    """How long and how its network is trained."""
    leave_out: int = 1
    """Items held out at each history's end, for the test and again for the validation; 0 holds out
    none, after a training that did (`train --holdout none --like RUN`)."""
    sparsify: float = 0.0
    """Share of each training sequence that is dropped (the paper's data-constrained study)."""
    history_limit: int = 20
    """How many of a user's most recent items the model sees."""
    seed: int = 0
    """Fixes every random choice: semantic IDs, initial weights, batches, noise, decoding."""
    device: str = "auto"
    """`auto` (cuda, else mps, else cpu) or a torch device, for everything that computes."""

    def __post_init__(self) -> None:
        require_numbers(
            self,
            leave_out=(0, 1000),
            sparsify=(0, 0.99),
            history_limit=(1, 100_000),
            seed=(0, MAX_SEED),
        )

    def for_catalogue(self, items: int) -> TrainConfig:
        """The same for so many items: above `LARGE` of them, `loss=softmax` becomes `sampled`. The
        repeat bias is then not learned, and next items are found in one step."""
        own = self.model
        if getattr(own, "loss", "") != "softmax" or not is_large(items, self.device):
            return self
        changes: dict[str, Any] = {"loss": "sampled", "repeat_bias": False}
        if hasattr(own, "decoding"):
            changes["decoding"] = replace(own.decoding, steps=1)
        names = {f.name for f in fields(own)}
        own = replace(own, **{name: value for name, value in changes.items() if name in names})
        return replace(self, model=own)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TrainConfig:
        """The inverse of `to_dict`, also after a way through JSON."""
        kind = model_class(values["name"]).Config
        nested = {"model": from_dict(kind, values["model"]), "fit": FitConfig(**values["fit"])}
        return cls(**{**values, **nested})


def is_large(items: int, device: str) -> bool:
    """Whether a catalogue has too many items to score all of them in every training step."""
    return items > LARGE.get(pick_device(device).type, LARGEST)


def from_dict(kind: type[Any], values: Mapping[str, Any]) -> Any:
    """A dataclass from nested dictionaries; JSON has lists where the dataclass has tuples."""
    hints = get_type_hints(kind)
    found = {
        f.name: from_dict(hints[f.name], values[f.name])
        if is_dataclass(hints[f.name])
        else values[f.name]
        for f in fields(kind)
        if f.name in values  # what came later has its default
    }
    return kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in found.items()})


@dataclass(frozen=True)
class Chosen:
    """What validation chose in an earlier training, for one that has none."""

    model: Model
    fits: Mapping[str, Fitted]  # by the folder of each stage


@dataclass(frozen=True)
class Training:
    """Everything that a model learns from."""

    data: Dataset
    split: Split  # a sequence a user to learn from, and questions to validate on
    config: TrainConfig
    work: Workspace
    sids: SemanticIds | None = None  # ready-made, for the models that use them
    like: Chosen | None = None  # whose choices are used, where nothing is held out
    fits: dict[str, Fitted] = field(default_factory=dict)  # how each stage ended, by its folder

    @property
    def counts(self) -> Counts:
        """(items,) training events of each item, by weight."""
        return self.split.train.counts(len(self.data.items))

    def fit(
        self,
        network: Trainable,
        fit_config: FitConfig | None = None,
        *,
        work: Workspace | None = None,
        label: str = "training",
    ) -> dict[str, float]:
        """Trains a network as the configuration says, or as `fit_config` does; returns its
        validation with all users."""
        work = work or self.work
        stage = work.run.relative_to(self.work.run).as_posix()
        fitted = fit(
            network,
            self.split,
            fit_config or self.config.fit,
            work,
            history_limit=self.config.history_limit,
            seed=self.config.seed,
            label=label,
            chosen=None if self.like is None else self.like.fits[stage],
        )
        self.fits[stage] = fitted
        return fitted.metrics


@runtime_checkable
class Model(Protocol):
    """Speaks of items by number; `maskgr.recommender.Recommender` translates."""

    about: ClassVar[str]  # one sentence
    needs: ClassVar[str]  # of the data, beside events
    Config: ClassVar[type[Any]]
    presets: ClassVar[Mapping[str, TrainConfig]]
    supports_ddp: ClassVar[bool]  # whether several processes can train it together
    uses_sids: ClassVar[bool]  # whether it can be given semantic IDs

    @classmethod
    def learn(cls, training: Training) -> Self: ...

    def rank(self, query: Query) -> Ranked:
        """The best items of each user, in the model's own way."""
        ...

    def save(self, folder: Path) -> None:
        """Writes everything that was learned into a folder that exists."""
        ...

    @classmethod
    def load(cls, folder: Path, config: TrainConfig) -> Self: ...


@runtime_checkable
class Decodes(Protocol):
    """Finds items by unmasking the digits of their semantic IDs."""

    @property
    def levels(self) -> int: ...

    def decode(self, query: Query, decoding: DecodingConfig) -> Ranked: ...

    def trace(self, query: Query, decoding: DecodingConfig) -> tuple[Ranked, list[list[Step]]]:
        """The same with each step of each user's search; dense retrieval has no steps."""
        ...

    def decoding(self) -> DecodingConfig:
        """The model's own way."""
        ...

    def resolved(self, decoding: DecodingConfig) -> DecodingConfig:
        """The same with `auto` and 0 replaced by what they mean for this model; raises where the
        model cannot decode so."""
        ...


@runtime_checkable
class PlansSessions(Protocol):
    """Decodes several next items together."""

    def sessions(
        self, query: Query, items: int, decoding: DecodingConfig, *, repeats: bool
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """(users, top, items) item numbers, -1 where no more are, and (users, top) scores."""
        ...


@runtime_checkable
class Samples(Protocol):
    """Draws next items instead of searching for them."""

    def sample(
        self, query: Query, *, steps: int, temperature: float, seed: int
    ) -> npt.NDArray[np.int64]:
        """(users, top) item numbers; -1 where the filters leave none."""
        ...


@runtime_checkable
class AddsItems(Protocol):
    """Takes new items without training."""

    def with_items(self, items: pl.DataFrame, embeddings: npt.NDArray[Any] | None) -> Model:
        """The same model with new `items` behind its own; they are numbered on from these."""
        ...


@runtime_checkable
class HasItemVectors(Protocol):
    """Has learned a vector for every item."""

    def item_vectors(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        """(items, width) the vectors of the items `numbers` (items,)."""
        ...


@runtime_checkable
class HasSids(Protocol):
    """Knows items by semantic IDs."""

    def semantic_ids(self) -> SemanticIds: ...


@runtime_checkable
class Updates(Protocol):
    """Goes on learning from more events, of old and new users."""

    def grown(self, items: pl.DataFrame, embeddings: npt.NDArray[Any] | None) -> Model:
        """The same model with new `items` behind its own, which it has yet to learn about."""
        ...

    def update(self, training: Training) -> Model:
        """Trains on, from the weights it has; semantic IDs stay. `training` has all events."""
        ...


@runtime_checkable
class Exports(Protocol):
    """Can be written as graphs and arrays that recommend without torch."""

    def exported(self) -> Exported: ...


CAPABILITIES: dict[str, type[Any]] = {  # as `maskgr models` and errors name them
    "decode digits": Decodes,
    "plan sessions": PlansSessions,
    "sample": Samples,
    "add items": AddsItems,
    "give item vectors": HasItemVectors,
    "give semantic IDs": HasSids,
    "be updated": Updates,
    "be exported to ONNX": Exports,
}


def capabilities(kind: type[Any]) -> list[str]:
    """What the models of a class can do beside ranking."""
    return [
        name
        for name, protocol in CAPABILITIES.items()
        if all(hasattr(kind, member) for member in _members(protocol))
    ]


def require(model: Model, capability: type[T]) -> T:
    """The model as what it is asked to be, or an error that names the models that can."""
    if isinstance(model, capability):
        return model
    wanted = next(name for name, own in CAPABILITIES.items() if own is capability)
    able = [name for name in MODELS if wanted in capabilities(model_class(name))]
    raise RequestError(
        f"{type(model).__name__} cannot {wanted}; {', '.join(able)} can: train one of these"
    )


def _members(protocol: type[Any]) -> list[str]:
    return [name for name in vars(protocol) if not name.startswith("_")]


def query_filters(query: Query, device: torch.device) -> Filters:
    """The filters of a query as decoding wants them."""
    allowed = None
    if query.allowed is not None and not query.allowed.all():
        allowed = torch.from_numpy(query.allowed).to(device)
    return Filters(allowed, None if query.excluded is None else pairs(query.excluded, device))


def model_class(name: str) -> type[Model]:
    if name not in MODELS:
        raise RequestError(f"there is no model {name!r}; the models are {', '.join(MODELS)}")
    module, _, attribute = MODELS[name].partition(":")
    return cast(type[Model], getattr(import_module(module), attribute))


def train_config(
    preset: str = "cpu",
    settings: Sequence[str] = (),
    *,
    model: str | None = None,
    minutes: float | None = None,
    seed: int | None = None,
    device: str | None = None,
) -> TrainConfig:
    """A preset with `key=value` settings on top of it.

    Without a `model` the preset is MaskGR's, or that of the only model that has one of this name.
    """
    start = _preset(preset, model)
    config = apply_settings(start, settings)
    if config.leave_out == 0:
        raise RequestError(
            "leave_out is 0; give a whole number from 1 to 1,000 (--holdout none --like RUN trains "
            "on everything)"
        )
    if config.fit.steps != start.fit.steps and config.fit.minutes == start.fit.minutes:
        config = replace(config, fit=replace(config.fit, minutes=0.0))  # steps replace minutes
    if minutes is not None:
        if not minutes >= MIN_MINUTES:
            raise RequestError(
                f"--minutes {minutes:g} leaves no time to train; give {MIN_MINUTES} or more, or "
                "leave it out for the time of the preset"
            )
        config = replace(config, fit=replace(config.fit, minutes=minutes))
    if 0 < config.fit.minutes < MIN_MINUTES:
        raise RequestError(
            f"fit.minutes is {config.fit.minutes:g}, which leaves no time to train; give "
            f"{MIN_MINUTES} or more, or 0 to train for fit.steps"
        )
    return replace(
        config,
        seed=config.seed if seed is None else seed,
        device=config.device if device is None else device,
    )


def _preset(name: str, model: str | None) -> TrainConfig:
    owners = [model] if model else ["maskgr", *(other for other in MODELS if other != "maskgr")]
    for owner in owners:
        presets = model_class(owner).presets
        if name in presets:
            return presets[name]
    if model:
        raise RequestError(f"{model} has no preset {name!r}; its presets are {', '.join(presets)}")
    known = {preset for owner in owners for preset in model_class(owner).presets}
    raise RequestError(f"there is no preset {name!r}; the presets are {', '.join(sorted(known))}")
