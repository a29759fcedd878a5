"""How a recommender was made: what is kept with it for people and for later trainings."""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import polars as pl

from maskgr.data.dataset import Dataset
from maskgr.training.fit import Fitted
from maskgr.version import __version__


def how_made(data: Dataset, fits: Mapping[str, Fitted], seconds: float) -> dict[str, Any]:
    """The data's fingerprint and size, how each stage of the training ended, the time spent, and
    versions, as JSON has them."""
    return {
        "fingerprint": data.fingerprint,
        "provenance": dict(data.provenance),
        "counts": {
            "users": len(data.users),
            "items": len(data.items),
            "events": len(data.histories.values),
        },
        "fits": {stage: asdict(fitted) for stage, fitted in fits.items()},
        "seconds": round(seconds, 3),
        "versions": versions(),
    }


def fits_of(made: Mapping[str, Any]) -> dict[str, Fitted]:
    """How each stage of a training ended."""
    return {stage: Fitted(**own) for stage, own in made.get("fits", {}).items()}


def versions() -> dict[str, str]:
    return {
        "maskgr": __version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "polars": pl.__version__,
        "platform": sys.platform,
    }
