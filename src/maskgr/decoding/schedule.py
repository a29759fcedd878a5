"""How many digits each step reveals (paper, Section 3.2: the counts α_1, …, α_T)."""

from __future__ import annotations

from collections.abc import Sequence

from maskgr.errors import RequestError


def schedule(positions: int, steps: int | Sequence[int]) -> tuple[int, ...]:
    """The counts of digits that the steps reveal: as even as possible, the larger ones first.

    A list of counts is taken as it is. Together the steps reveal all `positions`.
    """
    if isinstance(steps, int):
        if not 1 <= steps <= positions:
            raise RequestError(
                f"{steps} steps cannot reveal {positions} digits; give 1 to {positions}"
            )
        least, larger = divmod(positions, steps)
        return (least + 1,) * larger + (least,) * (steps - larger)
    counts = tuple(steps)
    if sum(counts) != positions or min(counts) < 1:
        raise RequestError(
            f"steps that reveal {', '.join(map(str, counts)) or 'no'} digits do not fit "
            f"{positions} digits; give counts of at least 1 that sum to {positions}, or a number "
            f"of steps"
        )
    return counts
