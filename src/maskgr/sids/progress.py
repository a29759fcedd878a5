"""A progress bar on stderr."""

from __future__ import annotations

from collections.abc import Iterator


def steps(count: int, label: str, *, shown: bool) -> Iterator[int]:
    """0 to `count - 1`, with a progress bar if `shown`."""
    from rich.console import Console
    from rich.progress import track

    yield from track(range(count), label, console=Console(stderr=True), disable=not shown)
