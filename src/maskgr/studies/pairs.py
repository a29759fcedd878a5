"""Two results on the same users: how much one is above the other, and how sure that is."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from maskgr.evaluation.differences import Difference
from maskgr.evaluation.protocol import Protocol


@dataclass(frozen=True)
class Pair:
    """How much `model` is above `other` on the same users."""

    protocol: Protocol
    metric: str
    model: str
    other: str
    difference: Difference
    adjusted: float  # the p-value, for the number of pairs

    def turned(self) -> Pair:
        d = self.difference
        turned = Difference(-d.mean, -d.high, -d.low, d.p)
        return replace(self, model=self.other, other=self.model, difference=turned)


def gap_text(pair: Pair) -> str:
    """A difference in percentage points, with half of its interval."""
    d = pair.difference
    return f"{100 * d.mean:+.2f} ± {50 * (d.high - d.low):.2f}"


def p_text(value: float) -> str:
    return "< 0.001" if value < 0.001 else f"{value:.3f}"


def pair_dict(pair: Pair) -> dict[str, Any]:
    d = pair.difference
    return {
        "protocol": pair.protocol,
        "metric": pair.metric,
        "model": pair.model,
        "other": pair.other,
        "difference": d.mean,
        "low": d.low,
        "high": d.high,
        "p": d.p,
        "p_adjusted": pair.adjusted,
    }
