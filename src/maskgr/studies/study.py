"""A study: which models it trains, in which ways it measures them, and what the paper says."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import Any

from maskgr.errors import RequestError
from maskgr.models.base import TrainConfig, model_class, train_config
from maskgr.studies.measures import Measure
from maskgr.studies.plots import Draw, draw_rows
from maskgr.studies.results import Cell, Claim, Part
from maskgr.studies.runner import Job, Runner

# The published network would take weeks on a laptop. This one has half its layers, a sixth of its
# hidden entries, and small batches, for which the published learning rate is too high. It is told
# the level of every digit, which the published one has to find out first. And it has no
# dropout, with which it had half the recall after a short training (docs/studies.md).
SMALL = (
    "layers=4",
    "heads=4",
    "network.hidden=512",
    "dropout=0",
    "logits=level",
    "level_embedding=true",
    "accumulate=1",
    "token_budget=2048",
    "learning_rate=2e-3",
    "ema=0.999",
    "minutes=30",
)
PAPER_PRESETS = {"cpu": ("paper", SMALL), "tiny": ("tiny-paper", ()), "published": ("paper", ())}
# A history's keys and values are kept from the first step, where all of the next item is masked: an
# approximation with the same recall, five times as fast (docs/studies.md has the figures).
CACHED = {"cache": "frozen"}
FORMS = ("maskgr-paper", "maskgr")  # MaskGR as the paper has it, scaled to the budget, and ours

Settings = tuple[str, ...] | Callable[[TrainConfig], tuple[str, ...]]


@dataclass(frozen=True)
class Asked:
    """The request; every study takes the same."""

    data: tuple[str, ...]  # folders or built-in sources
    out: Path  # folder of its trainings; a finished one is used again
    _: KW_ONLY
    preset: str = "cpu"
    minutes: float | None = None  # of each training; None: the preset's
    users: int | None = None  # evaluated users; None: all
    seed: int = 0  # the first
    seeds: int = 1  # trainings of each model
    only: tuple[str, ...] = ()  # variants or models, by name; empty: all

    def __post_init__(self) -> None:
        names = [data_name(own) for own in self.data]
        if len(set(names)) < len(names) or not names:
            raise RequestError(f"--data {','.join(self.data)}: name each dataset once")

    def words(self, study: str) -> list[str]:
        """The command that asks for it."""
        words = ["maskgr", "study", study, "--data", ",".join(self.data), "--out", str(self.out)]
        words += ["--preset", self.preset, "--seed", str(self.seed), "--seeds", str(self.seeds)]
        for name in ("minutes", "users"):
            if (value := getattr(self, name)) is not None:
                words += [f"--{name}", f"{value:g}"]
        return words + [word for name in self.only for word in ("--only", name)]


@dataclass(frozen=True)
class Variant:
    """A model of a study and how it is trained."""

    name: str
    model: str
    settings: Settings = ()  # on top of the preset, which a function is given

    def job(self, asked: Asked, seed: int) -> Job:
        preset, own = preset_of(self.model, asked.preset)
        more = self.settings
        if callable(more):
            more = more(train_config(preset, own, model=self.model))
        job = Job(self.model, preset, (*own, *more), asked.minutes, seed)
        _ = job.config  # raises before anything is trained
        return job


@dataclass(frozen=True)
class Way:
    """A way to measure a trained model: a row of the table for each protocol."""

    labels: tuple[str | float, ...] = ()
    changes: Mapping[str, Any] = field(default_factory=dict)  # to the study's measure
    key: str = ""  # by which claims and the paper's figures find it


def one_way(model: str, levels: int) -> Sequence[Way]:
    """In the model's own way."""
    return (Way(),)


def no_paper(data: str, cell: Cell) -> Mapping[str, float]:
    return {}


def no_claims(part: Part) -> Iterable[Claim]:
    return ()


def as_measured(cells: Sequence[Cell]) -> Sequence[Cell]:
    return cells


def open_data(data: str, asked: Asked) -> Runner:
    return Runner.open(data, asked.out)


@dataclass(frozen=True)
class Study:
    """Everything that makes a study; `maskgr.studies.conduct` runs it."""

    title: str
    where: str  # in the paper; empty: ours
    variants: Sequence[Variant]
    metrics: tuple[str, ...]
    first: str = "model"  # the column of the variants
    labels: tuple[str, ...] = ()  # further columns, of the ways
    facts: tuple[str, ...] = ("minutes", "users/s")  # columns at the end: see `Cell.facts`
    measure: Measure = field(default_factory=Measure)
    ways: Callable[[str, int], Sequence[Way]] = one_way  # given the model and its digits
    derive: Callable[[Sequence[Cell]], Sequence[Cell]] = as_measured
    paper: Callable[[str, Cell], Mapping[str, float]] = no_paper  # given the dataset; percent
    paper_data: tuple[str, ...] = ("beauty",)  # the datasets that the paper's figures are about
    claims: Callable[[Part], Iterable[Claim]] = no_claims
    reasons: tuple[str, ...] = ()  # for differences to the paper, beside those of every study
    notes: tuple[str, ...] = ()
    draw: Draw = draw_rows
    open: Callable[[str, Asked], Runner] = open_data

    def chosen(self, only: Sequence[str]) -> list[Variant]:
        """The variants that are named, or whose model is."""
        known = {name for own in self.variants for name in (own.name, own.model)}
        for name in only:
            if name not in known:
                names = ", ".join(own.name for own in self.variants)
                raise RequestError(f"--only {name}: no such variant; the variants are {names}")
        return [own for own in self.variants if not only or own.name in only or own.model in only]

    def paper_of(self, data: str) -> str:
        """The dataset whose published figures stand beside those on `data`."""
        return data if data in self.paper_data else self.paper_data[0]

    def measure_of(self, way: Way, model: str, asked: Asked) -> Measure:
        """`maskgr-paper` is asked with a cache, except where costs are measured."""
        found = replace(self.measure, users=asked.users, **way.changes)
        if model != "maskgr-paper" or asked.preset == "published" or found.costs:
            return found
        return replace(found, decoding={**CACHED, **found.decoding})


def preset_of(model: str, preset: str) -> tuple[str, tuple[str, ...]]:
    """A model's own preset and settings for the one asked for: see docs/studies.md."""
    own = model_class(model).presets
    if model == "maskgr-paper":
        return PAPER_PRESETS.get(preset, (preset, ()))
    if len(own) == 1:
        return next(iter(own)), ()
    if model == "maskgr" and preset == "published":
        return "cpu", ()
    return preset, ()


def data_name(data: str) -> str:
    """A dataset's name: that of the source, or of its folder."""
    return Path(data).name or data
