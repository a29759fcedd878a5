"""Problems found in a dataset: raised when loading, collected when inspecting."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from maskgr.errors import DataError


@dataclass(frozen=True)
class Problem:
    """A problem and its fix; data with an error cannot be used, data with a warning can."""

    severity: Literal["error", "warning"]
    message: str
    fix: str

    def __str__(self) -> str:
        return f"{self.message}; {self.fix}"


@dataclass
class Problems:
    """Collects problems; if `strict`, the first error is raised instead.

    If not strict, reading continues without the bad rows, so that one pass finds everything.
    """

    strict: bool = True
    found: list[Problem] = field(default_factory=list)

    def error(self, message: str, fix: str) -> None:
        problem = Problem("error", message, fix)
        if self.strict:
            raise DataError(str(problem))
        self.found.append(problem)

    def warn(self, message: str, fix: str) -> None:
        self.found.append(Problem("warning", message, fix))


def count(number: int, thing: str) -> str:
    """A number with its noun: `1 row`, `1,204 rows`."""
    return f"{number:,} {thing}" + ("" if number == 1 else "s")
