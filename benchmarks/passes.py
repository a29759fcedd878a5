"""How much code one training step, and one recommendation, pass through: files and functions.

    python benchmarks/passes.py [--names] [--json]

Networks of the tiny presets, untrained, on the synthetic shop. `sys.setprofile` sees every call of
a function of the package in one step of `maskgr.training.fit` or in one `Recommender.recommend`,
after one to warm up. Comprehensions and lambdas count as part of the function that they are in.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

import maskgr
from decode import with_memory
from maskgr.data.open import open_dataset
from maskgr.models.maskgr.model import MaskGR
from maskgr.recommender import Recommender
from train import Ours, Problem, config_of

PACKAGE = Path(maskgr.__file__).parent
DATA = "synthetic"
STAGES = {"paper": "maskgr-paper", "sasrec": "sasrec", "denoiser": "maskgr's denoiser"}


def passed(work: Callable[[], Any]) -> list[tuple[str, str]]:
    """The (file, function) pairs of the package that `work` calls."""
    found: set[tuple[str, str]] = set()

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and not code.co_name.startswith("<"):
            file = Path(code.co_filename)
            if PACKAGE in file.parents:
                found.add((str(file.relative_to(PACKAGE)), code.co_qualname))

    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(None)
    return sorted(found)


def training_step(ours: Ours) -> list[tuple[str, str]]:
    warm_up, batch = ours.batches(1)
    ours.step(warm_up)
    return passed(lambda: ours.step(batch))


def recommendation(recommender: Recommender) -> list[tuple[str, str]]:
    history = recommender.items["item_id"].head(5).to_list()
    recommender.recommend(history)
    return passed(lambda: recommender.recommend(history))


def measure(folder: Path) -> dict[str, list[tuple[str, str]]]:
    steps, requests = {}, {}
    for stage, name in STAGES.items():
        config = config_of(stage, quick=True)
        problem = Problem.open(DATA, config, folder)
        ours = Ours(stage, config, problem)
        steps[f"training step, {name}"] = training_step(ours)
        model: Any = ours.trainer.network.eval()
        if isinstance(model, MaskGR):
            model = with_memory(model, problem.split.train)
        recommender = Recommender(model, open_dataset(DATA).items, config, repeats=False)
        requests[f"recommend, {config.name}"] = recommendation(recommender)
    return steps | requests


def table(found: dict[str, list[tuple[str, str]]], names: bool) -> str:
    lines = [f"{'':36}{'files':>7}{'functions':>11}"]
    for work, functions in found.items():
        files = sorted({file for file, _ in functions})
        lines.append(f"{work:36}{len(files):7}{len(functions):11}")
        if names:
            for file in files:
                own = ", ".join(name for other, name in functions if other == file)
                lines.append(f"    {file}: {own}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--names", action="store_true", help="also name the functions")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        found = measure(Path(folder))
    print(json.dumps(found, indent=2) if options.json else table(found, options.names))


if __name__ == "__main__":
    main()
