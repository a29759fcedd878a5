"""The denoising behind recommendations, step by step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import polars as pl

from maskgr.data.config import Unknown
from maskgr.data.sequences import Sequences
from maskgr.decoding.beams import Step
from maskgr.decoding.config import DecodingConfig, Retrieval
from maskgr.models.base import Decodes, require
from maskgr.recommender import Recommendation, Recommender
from maskgr.requests import checked_decoding, listed


@dataclass(frozen=True)
class Reveal:
    """One digit that a step unmasked."""

    level: int  # from 0
    code: int
    probability: float


@dataclass(frozen=True)
class Beam:
    """One partly unmasked item after a step."""

    digits: tuple[int | None, ...]  # None is still masked
    revealed: tuple[Reveal, ...]  # by this step
    parent: int  # which beam of the step before it continues
    score: float
    remaining: int  # items that have these digits


@dataclass(frozen=True)
class Explanation:
    retrieval: Retrieval
    steps: tuple[tuple[Beam, ...], ...]  # best beam first; none in dense retrieval
    results: tuple[Recommendation, ...]  # by dense score in unified retrieval
    searched: int  # results of the search itself; those behind them are beyond its beams

    def to_dict(self) -> dict[str, Any]:
        steps = [[asdict(beam) for beam in step] for step in self.steps]
        return {**vars(self), "steps": steps, "results": [r._asdict() for r in self.results]}


def explain(
    recommender: Recommender,
    history: Sequence[Any],
    top: int = 5,
    *,
    exclude_seen: bool | None = None,
    allow: Iterable[Any] | None = None,
    deny: Iterable[Any] = (),
    where: pl.Expr | str | None = None,
    unknown: Unknown = "raise",
    decoding: DecodingConfig | None = None,
) -> Explanation:
    """What `recommend` returns for the same arguments, with what each step revealed, how probable
    that was, and how many items remained."""
    model = require(recommender.model, Decodes)
    own = model.decoding() if decoding is None else checked_decoding(decoding)
    decoding = model.resolved(own)
    known = recommender.numbers(listed(history, "the history"), unknown=unknown)
    numbers = Sequences.of([known])
    allowed = recommender.allowed(allow, deny, unknown, where)
    query = recommender.query(numbers, top, exclude_seen=exclude_seen, allowed=allowed)
    ranked, traces = model.trace(query, decoding)
    steps, results = _steps(traces[0], model.levels), tuple(recommender.named(ranked)[0])
    searched = len(results) if _ranks_all(decoding) else min(decoding.beams, len(results))
    return Explanation(decoding.retrieval, tuple(steps), results, searched)


def _ranks_all(decoding: DecodingConfig) -> bool:
    """Whether every item is scored at once, so that beams leave nothing out."""
    once = decoding.steps == 1 and not decoding.remask and decoding.constrained
    return decoding.retrieval == "dense" or (once and decoding.retrieval == "generative")


def _steps(traces: Sequence[Step], levels: int) -> list[tuple[Beam, ...]]:
    steps: list[tuple[Beam, ...]] = []
    before: list[tuple[int | None, ...]] = [(None,) * levels]
    for step in traces:
        beams = []
        for row, parent in enumerate(step.parents.tolist()):
            reveals = tuple(
                Reveal(level, code, float(np.exp(log_prob)))
                for level, code, log_prob in zip(
                    step.positions[row].tolist(),
                    step.codes[row].tolist(),
                    step.log_probs[row].tolist(),
                    strict=True,
                )
            )
            digits = list(before[parent])
            for reveal in reveals:
                digits[reveal.level] = reveal.code
            score, remaining = float(step.scores[row]), int(step.remaining[row, 0])
            beams.append(Beam(tuple(digits), reveals, parent, score, remaining))
        steps.append(tuple(beams))
        before = [beam.digits for beam in beams]
    return steps
