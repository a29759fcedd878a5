"""What a model must do to be a Recommender, and the models there are.

To add one: write its file here, and give it a name in `MODELS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, Protocol, Self, cast

import numpy as np
import numpy.typing as npt

from maskgr.config import TrainConfig
from maskgr.data.dataset import Dataset
from maskgr.data.sequences import Sequences
from maskgr.errors import RequestError

MODELS = {"popularity": "maskgr.models.popularity:Popularity"}  # imported when first asked for


class Model(Protocol):
    """Speaks of items by number; Recommender translates."""

    @classmethod
    def train(cls, data: Dataset, train: Sequences, config: TrainConfig) -> Self:
        """Learns from `train` (a sequence a user); `data` has the items, not the answers."""
        ...

    def rank(
        self,
        histories: Sequences,
        top: int,
        allowed: npt.NDArray[np.bool_],
        excluded: Sequences | None,
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        """(histories, top) the best items that are `allowed` and not in the user's `excluded`,
        best first, and their log-probabilities; -1 and -inf where there are no more."""
        ...

    def tensors(self) -> Mapping[str, npt.NDArray[Any]]:
        """All that was learned."""
        ...

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, npt.NDArray[Any]], config: TrainConfig) -> Self: ...


def model_class(name: str) -> type[Model]:
    if name not in MODELS:
        raise RequestError(f"there is no model {name!r}; the models are {', '.join(MODELS)}")
    module, _, attribute = MODELS[name].partition(":")
    return cast(type[Model], getattr(import_module(module), attribute))
