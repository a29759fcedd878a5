"""The protocols of evaluation, by name."""

from __future__ import annotations

from typing import Literal, get_args

Protocol = Literal["all", "unseen"]
PROTOCOLS: tuple[Protocol, ...] = get_args(Protocol)
