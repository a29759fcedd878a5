"""What MaskGR learns before its denoiser: the history encoder, then semantic IDs."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from maskgr.data.sequences import Sequences
from maskgr.models.base import TrainConfig, Training, is_large
from maskgr.models.maskgr.config import MaskGRConfig
from maskgr.models.retrieval import portions
from maskgr.models.sasrec import SASRec, SASRecConfig
from maskgr.nn.item_vectors import ItemSource
from maskgr.sids.item_text import ItemText
from maskgr.sids.semantic_ids import SemanticIds
from maskgr.sids.vectors import chunks
from maskgr.training.batches import by_length
from maskgr.training.fit import FitConfig

QUERY_USERS = 4096  # users whose queries say which directions of item vectors matter


def train_history(
    training: Training, text: ItemText, fit: FitConfig, source: ItemSource | None = None
) -> SASRec:
    """The history encoder, in evaluation mode. Where neither the settings nor `source` say what
    item vectors are made of, each way has an equal share of the time, and validation chooses.

    Which is better cannot be told early: where texts say much, `both` learns faster at first, then
    memorises and falls behind.
    """
    own: MaskGRConfig = training.config.model
    sources = _sources(training.config, text) if source is None else [source]
    budget = shares(fit, 1 / len(sources))[1] if len(sources) > 1 else fit
    best, networks = {}, {}
    for way in sources:
        torch.manual_seed(training.config.seed)
        networks[way] = SASRec(
            sasrec_config(own, way),
            training.counts,
            None if way == "id" else torch.from_numpy(text.embeddings),
            training.config.history_limit,
        )
        label = "history" if len(sources) == 1 else f"history, items by {way}"
        work = training.work.stage(f"history-{way}")
        found = training.fit(networks[way], budget, work=work, label=label)
        best[way] = found.get("recall@10", 0.0)
    chosen = max(sources, key=lambda way: best[way])
    if len(sources) > 1 and training.work.world.writes:
        print(f"history: items by {chosen} are better on validation", file=sys.stderr)
    return networks[chosen].eval()


def _sources(config: TrainConfig, text: ItemText) -> list[ItemSource]:
    """What item vectors may be made of. In a large catalogue most items have few events to learn a
    vector of their own from."""
    own: MaskGRConfig = config.model
    if own.items != "auto":
        return [own.items]
    if not np.ptp(text.embeddings, axis=0).any():
        return ["id"]
    return ["text"] if is_large(len(text.embeddings), config.device) else ["text", "both"]


def sasrec_config(own: MaskGRConfig, source: ItemSource) -> SASRecConfig:
    return SASRecConfig(own.transformer, own.loss, own.negatives, source, own.repeat_bias)


def shares(config: FitConfig, share: float) -> tuple[FitConfig, FitConfig]:
    """The budgets of the history's encoder and of the denoiser."""
    steps = max(1, round(share * config.steps))
    return (
        replace(config, steps=max(1, config.steps - steps), minutes=(1 - share) * config.minutes),
        replace(config, steps=steps, minutes=share * config.minutes),
    )


def learned_ids(training: Training, history: SASRec, text: ItemText) -> SemanticIds:
    """Semantic IDs made of what the SASRec learned about the items."""
    config, work = training.config, training.work

    def make(folder: Path) -> None:
        sids = SemanticIds.from_learned(
            training.data.items,
            score_space(history, training.split.train, config),
            text,
            config.model.sids,
            seed=config.seed,
            device=config.device,
            progress=work.progress,
        )
        sids.save(folder)

    return SemanticIds.load(work.once("sids", make))


@torch.no_grad()
def score_space(history: SASRec, train: Sequences, config: TrainConfig) -> npt.NDArray[np.float32]:
    """(items, width) item vectors, rotated and scaled such that a squared distance is the mean
    squared difference of two items' scores.

    No query ever asks about much of what vectors say; digits are not to be spent on it.
    """
    rng = np.random.default_rng(config.seed)
    users = rng.permutation(np.flatnonzero(train.lengths))[:QUERY_USERS]
    histories = by_length(train.select(users).last(config.history_limit))
    asked = []
    for rows in portions(histories, config.history_limit):
        hidden, _ = history.encode(histories.select(rows))
        asked.append(history.queries(hidden).double().cpu().numpy())
    queries = np.concatenate(asked)
    values, directions = np.linalg.eigh(queries.T @ queries / len(queries))
    stretch = directions * np.sqrt(values.clip(min=0))  # (width, width)
    found = np.empty((len(history.counts), history.width), dtype=np.float32)
    for part in chunks(len(found)):
        numbers = torch.arange(part.start, part.stop, device=history.device)
        found[part] = history.items(numbers).double().cpu().numpy() @ stretch
    return found
