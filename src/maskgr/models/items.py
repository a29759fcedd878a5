"""What a training makes of the items first, once for all processes, and keeps in the run."""

from __future__ import annotations

from pathlib import Path

from maskgr.errors import ArtefactError
from maskgr.models.base import Training
from maskgr.sids.config import EncoderConfig
from maskgr.sids.item_text import ItemText
from maskgr.sids.semantic_ids import SemanticIds


def item_text(training: Training, encoder: EncoderConfig) -> ItemText:
    """The embeddings of the items' texts."""
    work, device = training.work, training.config.device

    def make(folder: Path) -> None:
        made = ItemText.make(training.data, encoder, device=device, progress=work.progress)
        made.save(folder)

    return ItemText.load(work.once("text", make))


def semantic_ids(training: Training) -> SemanticIds:
    """The given IDs, or IDs made from the items' texts."""
    config, work = training.config, training.work

    def make(folder: Path) -> None:
        made = training.sids or SemanticIds.make(
            training.data,
            config.model.sids,
            seed=config.seed,
            device=config.device,
            progress=work.progress,
        )
        made.save(folder)

    folder = work.once("sids", make)
    sids = training.sids or SemanticIds.load(folder)  # not twice in memory
    if not sids.items["item_id"].equals(training.data.item_ids):
        raise ArtefactError(
            "the semantic IDs were made for other items than the dataset's; make them again"
        )
    return sids
