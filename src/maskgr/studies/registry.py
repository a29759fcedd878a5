"""All studies. To add one: a file with its `STUDY`, and its name in `STUDIES`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from maskgr.errors import RequestError

if TYPE_CHECKING:
    from maskgr.studies.findings import Findings
    from maskgr.studies.study import Asked, Study

STUDIES = {  # name -> what it shows
    "overall": "MaskGR in both forms beside the six baselines and popularity",
    "coarse": "recall at 5 to 40, against TIGER",
    "sparse": "what is left of recall when training sequences lose items, against TIGER",
    "steps": "quality against evaluations of the network, milliseconds and operations",
    "session": "the next two items together, against evaluations of the network",
    "ids": "semantic IDs, random IDs, item IDs, and a fixed masking ratio",
    "levels": "3, 4 and 5 digits, with and without the catalogue's constraint",
    "orders": "three decoding orders, with 1 to m steps each",
    "dense": "generative, dense and unified retrieval",
    "cold-start": "items added after training, by their text",
    "recipe": "variants of the preset under one budget, on validation",
}


def study_of(name: str) -> Study:
    if name not in STUDIES:
        raise RequestError(f"there is no study {name!r}; the studies are {', '.join(STUDIES)}")
    study: Study = import_module(f"maskgr.studies.{name.replace('-', '_')}").STUDY
    return study


def run_study(name: str, asked: Asked) -> Findings:
    study = study_of(name)
    from maskgr.studies.conduct import conduct

    return conduct(name, study, asked)
