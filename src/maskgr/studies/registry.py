"""All studies. To add one: a file with `run(asked) -> Report`, and its name in `STUDIES`."""

from __future__ import annotations

from importlib import import_module

from maskgr.errors import RequestError
from maskgr.studies.report import Asked, Report
from maskgr.studies.runner import alone

STUDIES = {  # name -> what it shows
    "dense": "the paper's model with a dense head: generative, dense and unified retrieval",
    "orders": "three decoding orders, with 1 to m steps each",
    "cold-start": "items added after training, by their text",
    "recipe": "variants of the preset under one budget, on validation",
}


def run_study(name: str, asked: Asked) -> Report:
    if name not in STUDIES:
        raise RequestError(f"there is no study {name!r}; the studies are {', '.join(STUDIES)}")
    module = import_module(f"maskgr.studies.{name.replace('-', '_')}")
    with alone(asked.out):
        report: Report = module.run(asked)
    return report
