"""The denoising of one recommendation, step by step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from maskgr.data.config import Unknown
from maskgr.data.sequences import Sequences
from maskgr.decoding.beams import Step
from maskgr.decoding.config import DecodingConfig
from maskgr.models.base import Decodes, require
from maskgr.recommender import Recommendation, Recommender


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
    steps: tuple[tuple[Beam, ...], ...]  # best beam first
    results: tuple[Recommendation, ...]

    def to_dict(self) -> dict[str, Any]:
        results = [{"item_id": r.item_id, "score": r.score} for r in self.results]
        return {"steps": [[asdict(b) for b in step] for step in self.steps], "results": results}


def explain(
    recommender: Recommender,
    history: Sequence[Any],
    top: int = 5,
    *,
    decoding: DecodingConfig | None = None,
    unknown: Unknown = "raise",
) -> Explanation:
    """The recommendations with what each step revealed, how probable that was, and how many items
    remained. In a single step nothing is revealed before the items: then there are no steps."""
    model = require(recommender.model, Decodes)
    numbers = Sequences.of([recommender.numbers(history, "the history", unknown)])
    query = recommender.query(numbers, top)
    ranked, traces = model.trace(query, decoding or model.decoding())
    return Explanation(tuple(_steps(traces[0], model.levels)), tuple(recommender.named(ranked)[0]))


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
