"""What is wrong with a dataset, collected or raised: one description serves both."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from maskgr.errors import DataError


@dataclass(frozen=True)
class Problem:
    """One finding: what it is, how to mend it, and whether the data can be used regardless."""

    severity: Literal["error", "warning"]
    message: str
    fix: str

    def __str__(self) -> str:
        return f"{self.message}; {self.fix}"


@dataclass
class Problems:
    """Strict: the first error is raised. Otherwise all are kept, and reading goes on without the
    rows that are at fault, so that one look finds everything."""

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
    """`1 row`, `1,204 rows`."""
    return f"{number:,} {thing}" + ("" if number == 1 else "s")
