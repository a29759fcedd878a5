"""Counts what becomes of generated inputs."""

from __future__ import annotations

import faulthandler
import shutil
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings

from maskgr.errors import MaskGRError

from .readers import READERS

SECONDS = 60.0  # that no input may take
LONGEST = 2000  # characters of a sentence


@dataclass
class Tally:
    reader: str
    accepted: int = 0
    refused: int = 0
    failures: dict[str, str] = field(default_factory=dict)  # what happened -> the shortest input

    @property
    def inputs(self) -> int:
        return self.accepted + self.refused


def try_input(
    read: Callable[[Any, Path], object], value: Any, folder: Path, tally: Tally, seconds: float
) -> None:
    """Reads one input in an empty folder and notes what became of it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    faulthandler.dump_traceback_later(seconds, exit=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            read(value, folder)
        tally.accepted += 1
    except MaskGRError as error:
        tally.refused += 1
        said = str(error)
        if "\n" in said or not said.strip() or len(said) > LONGEST:
            note(tally, f"not one sentence: {said[:200]!r}", value)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # polars' panics are no Exceptions
        tally.refused += 1
        frames_ = traceback.extract_tb(error.__traceback__)
        ours = [f for f in frames_ if "maskgr" in f.filename] or frames_
        where = f"{Path(ours[-1].filename).name}:{ours[-1].lineno}"
        note(tally, f"{type(error).__name__} at {where}: {str(error)[:150]!r}", value)
    finally:
        faulthandler.cancel_dump_traceback_later()


def note(tally: Tally, what: str, value: Any) -> None:
    shown = repr(value)
    if what not in tally.failures or len(shown) < len(tally.failures[what]):
        tally.failures[what] = shown[:1000]


def fuzz(name: str, inputs: int, number: int, folder: Path, seconds: float = SECONDS) -> Tally:
    """`inputs` generated inputs for one reader, the same for the same seed."""
    values, read = READERS[name]
    tally = Tally(name)

    @seed(number)
    @settings(
        max_examples=inputs,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(values)
    def run(value: Any) -> None:
        try_input(read, value, folder / "input", tally, seconds)

    run()
    return tally
