"""Batch jobs on Ray: recommendations for a folder of files, vectors of item texts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from maskgr.errors import ArtefactError, DataError
from maskgr.recommender import Recommender
from maskgr.serving.actors import TRIES, Work, map_rows
from maskgr.serving.batch import model_key, recommend_as
from maskgr.serving.shards import Shard
from maskgr.sids.config import EncoderConfig
from maskgr.sids.encoders import load_encoder
from maskgr.sids.vectors import Floats


def recommend_shards(
    shards: Sequence[Shard],
    how: Mapping[str, Any],
    *,
    run: Path,
    model: str,
    actors: int | None = None,
    address: str | None = None,
) -> Iterator[DataError]:
    """An engine for `recommend_folder`: `run` is a saved recommender and `model` its key."""
    # The largest first: no actor begins a large file when the others are done.
    order = sorted(shards, key=lambda shard: -shard.source.stat().st_size)
    rows = [{"source": str(s.source), "target": str(s.target), "key": s.key} for s in order]
    started = (str(run), model, dict(how))
    for number, found in map_rows(_recommends, started, rows, actors, address):
        if isinstance(found, DataError):
            yield found
        elif found is None:
            yield DataError(
                f"{order[number].source}: the actor that worked on it died {TRIES} times, perhaps "
                "for want of memory; give fewer --actors or smaller files"
            )


def _recommends(cpus: int, run: str, model: str, how: Mapping[str, Any]) -> Work:
    torch.set_num_threads(cpus)
    recommender = Recommender.load(run)
    if model_key(recommender) != model:
        raise ArtefactError(f"{run} has changed since the job began; start it again")

    def work(row: Mapping[str, Any]) -> int:
        return recommend_as(recommender, Path(row["source"]), Path(row["target"]), row["key"], how)

    return work


def encode_texts(
    config: EncoderConfig,
    device: str,
    calls: Sequence[list[str]],
    *,
    actors: int | None = None,
    address: str | None = None,
) -> Iterator[tuple[int, Floats]]:
    """For `encode_items`: the vectors of each call's texts, in the order in which they are made."""
    rows = [{"texts": texts} for texts in calls]
    for number, found in map_rows(_encodes, (config, device), rows, actors, address):
        if isinstance(found, DataError):
            raise found
        if found is None:
            raise ArtefactError(
                f"an actor that encoded texts died {TRIES} times, perhaps for want of memory; what "
                "is done is kept: give fewer --actors, or a smaller batch_size"
            )
        yield number, np.frombuffer(found, np.float32).reshape(len(calls[number]), -1)


def _encodes(cpus: int, config: EncoderConfig, device: str) -> Work:
    torch.set_num_threads(cpus)
    encode = load_encoder(config, device)
    return lambda row: encode(list(row["texts"])).tobytes()
