"""What a study found: cells of its table, and how the paper's findings fare."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np

from maskgr.evaluation.differences import holm, mean_over_seeds, paired_difference
from maskgr.evaluation.metrics import Floats, Mean
from maskgr.evaluation.protocol import Protocol
from maskgr.studies.measures import Scores
from maskgr.studies.pairs import Pair

SIGNIFICANT = 0.05
RETAINED = "retained "  # before metrics that are shares of what another training reaches

Verdict = Literal["holds", "holds partly", "not decided", "does not hold"]


@dataclass(frozen=True, eq=False)
class Cell:
    """A variant measured in one way, once for each seed."""

    variant: str
    model: str
    key: str  # of the way
    labels: tuple[str | float, ...]
    seeds: tuple[int, ...]
    scores: tuple[Scores, ...]  # as the seeds
    values: Mapping[Protocol, Mapping[str, Floats]]  # (seeds, users)

    @classmethod
    def of(
        cls,
        variant: str,
        model: str,
        key: str,
        labels: tuple[str | float, ...],
        found: Mapping[int, Scores],
    ) -> Cell:
        seeds = tuple(sorted(found))
        scores = tuple(found[seed] for seed in seeds)
        values: dict[Protocol, dict[str, Floats]] = {
            protocol: {
                metric: np.stack([own.values[protocol][metric] for own in scores])
                for metric in values
            }
            for protocol, values in scores[0].values.items()
        }
        return cls(variant, model, key, labels, seeds, scores, values)

    def __str__(self) -> str:
        return ", ".join([self.variant, *map(str, self.labels)])

    def mean(self, protocol: Protocol, metric: str) -> Mean | None:
        """None where it was not measured."""
        if (values := self.values[protocol].get(metric)) is None:
            return None
        return mean_over_seeds(values, np.inf if metric.startswith(RETAINED) else 1.0)

    def with_metric(self, name: str, values: Mapping[Protocol, Floats]) -> Cell:
        more = {protocol: {**own, name: values[protocol]} for protocol, own in self.values.items()}
        return replace(self, values=more)

    @cached_property
    def facts(self) -> dict[str, float | None]:
        """What each answer and the training took; None: not known, or it makes no sense."""
        first = self.scores[0]
        shares = [own.invalid_share for own in self.scores if own.invalid_share is not None]
        steps, beams = (first.decoding.get(name) for name in ("steps", "beams"))
        speed = float(np.mean([own.users_per_second for own in self.scores]))
        costs = [own.costs for own in self.scores if own.costs is not None]
        return {
            "users": first.users,
            "minutes": float(np.mean([own.minutes for own in self.scores])),
            "parameters": first.parameters,
            "users/s": speed,
            "ms/user": 1000 / speed,
            "ms alone": float(np.mean([own.ms_alone for own in costs])) if costs else None,
            "MFLOP/user": float(np.mean([own.flops for own in costs])) / 1e6 if costs else None,
            "NFE": steps,
            # One for the history alone, then one for each beam and step.
            "passes/user": None if steps is None else 1 + (steps - 1) * beams,
            "invalid beams %": 100 * float(np.mean(shares)) if shares else None,
        }


@dataclass(frozen=True, eq=False)
class Claim:
    """A finding of the paper as differences that should be positive."""

    text: str
    metric: str
    pairs: tuple[tuple[Cell, Cell], ...]  # what should be ahead, and of what
    weak: bool = False  # it is enough not to be behind


class Checked(NamedTuple):
    """A claim with what was found."""

    claim: Claim
    pairs: tuple[Pair, ...]
    verdict: Verdict


@dataclass(frozen=True, eq=False)
class Part:
    """The cells on one dataset."""

    data: str
    fingerprint: str
    cells: tuple[Cell, ...]

    @property
    def protocol(self) -> Protocol:
        """Under which claims are checked."""
        return next(iter(self.cells[0].values))

    @property
    def users(self) -> int:
        """How many at most: a study may ask some about one thing and some about another."""
        return max(own.scores[0].users for own in self.cells)

    def find(self, variant: str, key: str = "") -> Cell | None:
        found = (own for own in self.cells if (own.variant, own.key) == (variant, key))
        return next(found, None)

    def pairs(
        self, *names: tuple[tuple[str, str], tuple[str, str]]
    ) -> tuple[tuple[Cell, Cell], ...]:
        """The cells of these (variant, key) pairs, where both were measured."""
        found = [(self.find(*one), self.find(*two)) for one, two in names]
        return tuple((one, two) for one, two in found if one is not None and two is not None)

    def each_model(self, *models: str) -> Iterator[tuple[str, list[Cell]]]:
        """The cells of each model, in their order."""
        for model in models or dict.fromkeys(own.model for own in self.cells):
            if cells := [own for own in self.cells if own.model == model]:
                yield model, cells


def check(part: Part, claims: Iterable[Claim]) -> list[Checked]:
    """Each claim with its paired differences; p-values are adjusted for all claims of a metric."""
    known = [claim for claim in claims if claim.pairs]
    compared: dict[tuple[str, Cell, Cell], Pair] = {}
    for metric in dict.fromkeys(claim.metric for claim in known):
        pairs = [pair for claim in known if claim.metric == metric for pair in claim.pairs]
        own = [pair for pair in dict.fromkeys(pairs) if _both_have(part.protocol, metric, pair)]
        found = compare(part.protocol, metric, own)
        compared |= {(metric, *pair): d for pair, d in zip(own, found, strict=True)}
    checked = []
    for claim in known:
        keys = [(claim.metric, *pair) for pair in claim.pairs]
        if differences := tuple(compared[key] for key in keys if key in compared):
            checked.append(Checked(claim, differences, _verdict(claim, differences)))
    return checked


def compare(protocol: Protocol, metric: str, pairs: Sequence[tuple[Cell, Cell]]) -> list[Pair]:
    each = [
        paired_difference(one.values[protocol][metric], two.values[protocol][metric])
        for one, two in pairs
    ]
    adjusted = holm([own.p for own in each])
    return [
        Pair(protocol, metric, str(one), str(two), own, p)
        for (one, two), own, p in zip(pairs, each, adjusted, strict=True)
    ]


def _both_have(protocol: Protocol, metric: str, pair: tuple[Cell, Cell]) -> bool:
    return all(metric in own.values[protocol] for own in pair)


def _verdict(claim: Claim, pairs: Sequence[Pair]) -> Verdict:
    """`holds` where every difference is positive beyond chance; for a weak claim it is enough that
    none is negative."""
    sure = [own.adjusted < SIGNIFICANT for own in pairs]
    signs = [own.difference.mean for own in pairs]
    wins = [
        (d > 0 and known) or (claim.weak and d >= 0) for d, known in zip(signs, sure, strict=True)
    ]
    if all(wins):
        return "holds"
    if any(wins):
        return "holds partly"
    losses = [d < 0 and known for d, known in zip(signs, sure, strict=True)]
    return "does not hold" if any(losses) else "not decided"
