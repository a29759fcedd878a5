"""How much of the learned item vectors' recall stays where an item is the sum of its digits.

Nothing is trained after quantising: this compares quantisers and numbers of digits before the
denoiser learns to make up for what they lose. Judged in one step, without biases.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from maskgr.data.splits import leave_out
from maskgr.errors import RequestError
from maskgr.evaluation.protocol import evaluate
from maskgr.evaluation.ranking import Query, Ranked
from maskgr.models.maskgr.denoiser import fit_codes
from maskgr.models.maskgr.model import MaskGR
from maskgr.models.maskgr.stages import score_space
from maskgr.models.retrieval import portions
from maskgr.models.sasrec import SASRec
from maskgr.nn.scoring import best_items
from maskgr.sids.config import QuantizerConfig, QuantizerName
from maskgr.sids.quantizers import fit_quantizer
from maskgr.sids.vectors import Digits, Floats
from maskgr.studies.report import Asked, Report, Row, percent

QUANTIZERS: tuple[QuantizerName, ...] = ("residual-kmeans", "opq")
LEVELS = (4, 8, 16)
METRICS = ("recall@10", "ndcg@10")
MANY = 10_000_000  # items of a large catalogue, for the memory


@dataclass(frozen=True, eq=False)
class _TableRanker:
    """Ranks by the queries of a history encoder and any item vectors."""

    history: SASRec
    table: Tensor  # (items, width)

    @torch.no_grad()
    def rank(self, query: Query) -> Ranked:
        histories = query.histories
        items = np.full((len(histories), query.top), -1, dtype=np.int32)
        scores = np.full(items.shape, -np.inf, dtype=np.float32)
        for rows in portions(histories, self.history.history_limit):
            hidden = self.history.last_states(histories.select(rows))
            excluded = None if query.excluded is None else query.excluded.select(rows)
            found, values = best_items(
                self.history.queries(hidden), self.table, query.top, excluded=excluded
            )
            items[rows], scores[rows] = found.cpu().numpy(), values.cpu().numpy()
        return Ranked(items, scores)


def run(asked: Asked) -> Report:
    """One trained model; its item vectors as they are, then as sums of digits."""
    runner, job = asked.runner(), asked.job(("vectors=learned",))
    if job.model != "maskgr":
        raise RequestError(f"{job.model} has no learned item vectors to quantise; use maskgr")
    recommender = runner.load(runner.train(job))
    model = recommender.model
    assert isinstance(model, MaskGR)
    split = leave_out(runner.dataset.histories, recommender.config.leave_out)
    holdout = split.validation
    if asked.users is not None:
        holdout = holdout.sample(asked.users)
    vectors = model.history.items().detach()  # (items, width)
    space = score_space(model.history, split.train, recommender.config)

    def row(name: str, table: Tensor, size: int | str, many: int | str) -> Row:
        found = evaluate(
            _TableRanker(model.history, table), holdout, len(table), protocols=("unseen",)
        )
        return (name, *percent(found.values["unseen"], METRICS), size, many)

    n_items, width = vectors.shape
    rows = [row("learned", vectors, _mb(4 * n_items * width), _mb(4 * MANY * width))]
    for quantizer in QUANTIZERS:
        for levels, digits, sizes in _digits(space, quantizer, asked.seed):
            tokens = fit_codes(vectors.cpu().numpy(), digits, sizes)
            starts = np.cumsum((0, *sizes[:-1]))
            table = torch.from_numpy(tokens[starts + digits].sum(1)).to(vectors.device)
            tokens_size = 4 * sum(sizes) * width
            sizes_mb = (_mb(tokens_size + n * levels) for n in (n_items, MANY))
            rows.append(row(f"{quantizer}, {levels} digits", table, *sizes_mb))
    kept = [(*r, round(r[1] / rows[0][1], 2)) for r in rows]
    return Report(
        f"Item vectors as sums of digits on {asked.data}, nothing trained after quantising, "
        f"validation, {len(holdout.users):,} users, protocol unseen, one step, percent",
        ("item vectors", *METRICS, f"MB, {n_items:,} items", f"MB, {MANY:,} items", "kept"),
        tuple(kept),
    )


def _digits(
    space: Floats, quantizer: QuantizerName, seed: int
) -> Iterator[tuple[int, Digits, tuple[int, ...]]]:
    """Numbers of digits with (items, levels) digits and the codes at each level. Residual digits
    are nested: fewer of them are the first ones of many."""
    nested = quantizer == "residual-kmeans"
    fits = {max(LEVELS)} if nested else LEVELS
    for fitted_levels in fits:
        config = QuantizerConfig(quantizer=quantizer, levels=fitted_levels, components=0)
        fitted = fit_quantizer(space, config, normalise=False, seed=seed)
        digits = fitted.encode(space)
        for levels in LEVELS if nested else (fitted_levels,):
            yield levels, digits[:, :levels], fitted.codebook_sizes[:levels]


def _mb(size: int) -> float:
    return round(size / 1e6, 1)
