"""The log of a run: a progress bar, log.csv, TensorBoard where it is installed."""

from __future__ import annotations

import contextlib
import csv
import io
import sys
import time
from collections.abc import Iterator
from html import escape
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from maskgr.artefact import write_file
from maskgr.training.checkpoint import State
from maskgr.training.distributed import World

COLUMNS = (
    "step", "epoch", "seconds", "tokens", "loss", "learning_rate", "gradient_norm",
    "tokens_per_second", "recall@10", "bound", "training_recall@10", "training_bound",
)  # fmt: skip
EVERY = 10  # steps between rows: reading a loss makes an accelerator wait


class RunLog:
    """Writes rows of numbers; silent in every process but the writing one."""

    def __init__(
        self, run: Path, world: World, *, label: str = "training", progress: bool = False
    ) -> None:
        self.run, self.world, self.writes = run, world, world.writes
        self.progress = progress and self.writes
        self._label = label
        self._losses: list[Tensor] = []
        self._clock = (time.perf_counter(), 0)
        self._shown = {"loss": "-", "best": "-", "rate": "-"}

    def __enter__(self) -> Self:
        self._stack = contextlib.ExitStack()
        self._advance = self._stack.enter_context(_bar(self.progress, self._label))
        self._board = self._stack.enter_context(_tensorboard(self.run)) if self.writes else None
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def step(self, state: State, loss: Tensor, norm: Tensor, learning_rate: float) -> None:
        self._losses.append(loss)
        if state.step % EVERY == 0 or state.step == 1:
            now, tokens = time.perf_counter(), state.tokens
            rate = (tokens - self._clock[1]) / max(now - self._clock[0], 1e-9)
            # Each process has the loss of its share, times their number.
            mean = float(self.world.total(torch.stack(self._losses).mean())) / self.world.size
            self._losses, self._clock = [], (now, tokens)
            self._shown |= {"loss": f"{mean:.4f}", "rate": f"{rate:,.0f}"}
            values = {
                "loss": mean,
                "learning_rate": learning_rate,
                "gradient_norm": float(norm),
                "tokens_per_second": rate,
            }
            self._row(state, values)
        self._advance(state, self._shown)

    def validation(self, state: State, found: dict[str, float]) -> None:
        if state.best_step == state.step:
            self._shown["best"] = f"{100 * found['recall@10']:.2f} %"
        self._row(state, found)

    def rewind(self, step: int, tokens: int = 0) -> None:
        """Drops the rows after `step`, which a run resumed after `tokens` writes again."""
        self._clock = (time.perf_counter(), tokens)
        if self.writes:
            rows = [row for row in read_log(self.run) if row["step"] <= step]
            kept = [[row[column] for column in COLUMNS] for row in rows]
            with write_file(self.run / "log.csv") as draft:
                draft.write_text(_csv([list(COLUMNS), *kept]), encoding="utf-8")

    def _row(self, state: State, values: dict[str, float]) -> None:
        if not self.writes:
            return
        row = {
            "step": state.step,
            "epoch": state.place.epoch,
            "seconds": round(state.seconds, 2),
            "tokens": state.tokens,
            **{name: float(f"{value:.6g}") for name, value in values.items()},
        }
        file = self.run / "log.csv"
        self.run.mkdir(parents=True, exist_ok=True)
        new = not file.exists()
        with file.open("a", encoding="utf-8") as stream:
            lines = [[row.get(column) for column in COLUMNS]]
            stream.write(_csv([list(COLUMNS), *lines] if new else lines))
        if self._board is not None:
            for name, value in values.items():
                self._board.add_scalar(name, value, state.step)


def read_log(run: Path) -> list[dict[str, Any]]:
    """The rows of log.csv that can be read: a kill may have cut off the last."""
    file = run / "log.csv"
    if not file.exists():
        return []
    rows = []
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines()[1:]:
        with contextlib.suppress(ValueError, OverflowError):
            numbers = [float(value) if value else None for value in line.split(",")]
            row: dict[str, Any] = dict(zip(COLUMNS, numbers, strict=True))
            rows.append({**row, "step": int(row["step"] or 0)})
    return rows


def _csv(rows: list[list[Any]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


@contextlib.contextmanager
def _tensorboard(run: Path) -> Iterator[Any]:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        yield None  # an extra: maskgr[track]
        return
    with SummaryWriter(str(run / "tensorboard")) as board:
        yield board


@contextlib.contextmanager
def _bar(shown: bool, label: str) -> Iterator[Any]:
    if shown and _in_notebook():
        yield _NotebookBar(label)
        return
    if not (shown and sys.stderr.isatty()):
        yield lambda state, words: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn(label),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]}"),
        TextColumn("{task.fields[rate]} tokens/s"),
        TextColumn("best recall@10 {task.fields[best]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=None, loss="-", rate="-", best="-")
        yield lambda state, words: bar.update(
            task, completed=state.step, total=state.total, **words
        )


def _in_notebook() -> bool:
    return "ipykernel" in sys.modules and "IPython" in sys.modules


class _NotebookBar:
    """One line of HTML below a cell, replaced in place; it needs no widgets."""

    def __init__(self, label: str) -> None:
        show = import_module("IPython.display")
        self._html, self._label, self._drawn = show.HTML, label, 0.0
        self._handle = show.display(show.HTML(""), display_id=True)

    def __call__(self, state: State, words: dict[str, str]) -> None:
        now = time.monotonic()
        if now - self._drawn < 0.5 and state.step < state.total:
            return
        self._drawn = now
        left = state.seconds / max(state.step, 1) * (state.total - state.step)
        self._handle.update(
            self._html(
                f"<span style='font:14px system-ui,sans-serif'>{escape(self._label)} "
                f"<progress value='{state.step}' max='{state.total}'></progress> "
                f"{state.step:,}/{state.total:,} · loss {words['loss']} · best recall@10 "
                f"{words['best']} · {left / 60:.1f} minutes left</span>"
            )
        )
