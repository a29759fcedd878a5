"""What a model must do to be a Recommender, and the models there are.

To add one: write its file here, and give it a name in `MODELS`.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, Self, cast

import numpy as np
import numpy.typing as npt
import polars as pl

from maskgr.config import TrainConfig
from maskgr.data.dataset import Dataset
from maskgr.data.sequences import Sequences
from maskgr.data.splits import Split
from maskgr.decoding.config import DecodingConfig
from maskgr.errors import RequestError

if TYPE_CHECKING:
    from maskgr.sids.semantic_ids import SemanticIds

MODELS = {  # imported when first asked for
    "maskgr": "maskgr.models.maskgr:MaskGR",
    "popularity": "maskgr.models.popularity:Popularity",
}


@dataclass(frozen=True)
class Workspace:
    """What training may use beside the data."""

    run: Path  # a folder for checkpoints and logs
    resume: bool = False  # go on from the checkpoints there
    progress: bool = False
    sids: SemanticIds | None = None  # ready-made semantic IDs, for the models that need them

    def require_fresh(self) -> None:
        """Nothing that took long to make is overwritten, or mixed with something else."""
        stages = (self.run, *self.run.glob("*/"))
        if not self.resume and any((stage / "checkpoints").is_dir() for stage in stages):
            raise RequestError(
                f"{self.run} holds a training; --resume (resume=True) goes on with it, another "
                "folder begins a new one"
            )


class Ranked(NamedTuple):
    """Best first; -1 and -inf where there are no more."""

    items: npt.NDArray[np.int32]  # (histories, top)
    scores: npt.NDArray[np.float32]  # (histories, top) log-probabilities
    invalid_share: float = 0.0  # of the beams that ended as no item, without the constraint


class Model(Protocol):
    """Speaks of items by number; Recommender translates."""

    shares_work: ClassVar[bool]  # whether several processes can train it together

    @classmethod
    def train(cls, data: Dataset, split: Split, config: TrainConfig, work: Workspace) -> Self:
        """Learns from `split.train` (a sequence a user) and may validate on `split.validation`."""
        ...

    def rank(
        self,
        histories: Sequences,
        top: int,
        allowed: npt.NDArray[np.bool_],
        excluded: Sequences | None,
        decoding: DecodingConfig | None,
    ) -> Ranked:
        """The best `top` items that are `allowed` and not in the user's `excluded`.

        `decoding`: how to search, for the models that do; None is their own way."""
        ...

    def with_items(self, items: pl.DataFrame, embeddings: npt.NDArray[Any] | None = None) -> Model:
        """The same model with new `items` behind its own; they are numbered on from these."""
        ...

    def save(self, folder: Path) -> None:
        """Writes all that was learned into a folder that exists."""
        ...

    @classmethod
    def load(cls, folder: Path, config: TrainConfig) -> Self: ...


def model_class(name: str) -> type[Model]:
    if name not in MODELS:
        raise RequestError(f"there is no model {name!r}; the models are {', '.join(MODELS)}")
    module, _, attribute = MODELS[name].partition(":")
    return cast(type[Model], getattr(import_module(module), attribute))
