"""How many digits each step reveals (paper, Section 3.2: the counts α_1, …, α_T)."""

from __future__ import annotations

from collections.abc import Sequence

from maskgr.errors import RequestError


def schedule(digits: int, steps: int | Sequence[int]) -> tuple[int, ...]:
    """The digits revealed at each step: as even as can be, the larger steps first.

    A list of counts is taken as it is. No step is empty and nothing is left masked.
    """
    if isinstance(steps, int):
        if not 1 <= steps <= digits:
            raise RequestError(f"{steps} steps cannot reveal {digits} digits; give 1 to {digits}")
        least, larger = divmod(digits, steps)
        return (least + 1,) * larger + (least,) * (steps - larger)
    counts = tuple(steps)
    if sum(counts) != digits or min(counts) < 1:
        raise RequestError(
            f"steps that reveal {', '.join(map(str, counts)) or 'no'} digits do not go with "
            f"{digits} digits; give counts of at least 1 that sum to {digits}, or how many steps"
        )
    return counts
