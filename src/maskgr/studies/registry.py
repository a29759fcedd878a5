"""The experiments there are. To add one: a file with `run(asked) -> Report`, and its name here."""

from __future__ import annotations

from importlib import import_module

from maskgr.errors import RequestError
from maskgr.studies.report import Asked, Report

EXPERIMENTS = {  # name -> what it shows
    "dense": "generative, dense, unified and fused retrieval by one model",
    "orders": "three decoding orders, with 1 to m steps each",
    "cold-start": "items added after training, by their text",
    "recipe": "variants of the preset under one budget, on validation",
}


def run_experiment(name: str, asked: Asked) -> Report:
    if name not in EXPERIMENTS:
        raise RequestError(
            f"there is no experiment {name!r}; the experiments are {', '.join(EXPERIMENTS)}"
        )
    module = import_module(f"maskgr.studies.{name.replace('-', '_')}")
    report: Report = module.run(asked)
    return report
