"""How much of the learned item vectors' recall stays where an item is the sum of its digits.

Nothing is trained after quantising: this compares quantisers and numbers of digits before the
denoiser learns to make up for what they lose. Judged in one step, without biases.
"""

from __future__ import annotations

import json
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from maskgr.data.open import open_dataset
from maskgr.data.splits import leave_out
from maskgr.evaluation.protocol import evaluate
from maskgr.evaluation.ranking import Query, Ranked
from maskgr.models.maskgr.denoiser import fit_codes
from maskgr.models.maskgr.model import MaskGR
from maskgr.models.maskgr.stages import score_space
from maskgr.models.retrieval import portions
from maskgr.models.sasrec import SASRec
from maskgr.nn.scoring import best_items
from maskgr.recommender import Recommender
from maskgr.sids.config import QuantizerConfig, QuantizerName
from maskgr.sids.quantizers import fit_quantizer
from maskgr.sids.vectors import Digits, Floats

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


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument(
        "run", nargs="?", help="a maskgr with learned item vectors; else a tiny one is trained"
    )
    parser.add_argument("--users", type=int, default=4000, help="validation users")
    parser.add_argument("--quick", action="store_true", help="2 and 4 digits, 100 users")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    if asked.run is None:
        shop = open_dataset("synthetic")
        recommender = Recommender.train(shop, preset="tiny", made={"data": "synthetic"})
    else:
        recommender = Recommender.load(asked.run)
    rows = measure(recommender, asked.users, asked.quick)
    if asked.json:
        print(json.dumps(rows))
        return
    print(*rows[0], sep="\t")
    for row in rows:
        print(*row.values(), sep="\t")


def measure(recommender: Recommender, users: int, quick: bool) -> list[dict[str, Any]]:
    """A row for the vectors as they are, then one for each quantiser and number of digits."""
    model = recommender.model
    if not isinstance(model, MaskGR) or model.own.vectors != "learned":
        raise SystemExit("this run has no learned item vectors; give one of maskgr's preset cpu")
    dataset = open_dataset(recommender.made["data"])
    split = leave_out(dataset.histories, recommender.config.leave_out)
    holdout = split.validation.sample(100 if quick else users)
    vectors = model.history.items().detach()  # (items, width)
    space = score_space(model.history, split.train, recommender.config)
    n_items, width = vectors.shape

    def row(name: str, table: Tensor, tokens: int, own: int) -> dict[str, Any]:
        """`tokens`: bytes of the digits' vectors; `own`: bytes of each item."""
        ranker = _TableRanker(model.history, table)
        found = evaluate(ranker, holdout, n_items, protocols=("unseen",)).metrics["unseen"]
        return {
            "item vectors": name,
            **{metric: round(100 * found[metric].mean, 2) for metric in METRICS},
            **{f"MB, {n:,} items": round((tokens + n * own) / 1e6, 1) for n in (n_items, MANY)},
        }

    rows = [row("learned", vectors, 0, 4 * width)]
    for quantizer in QUANTIZERS:
        for levels, digits, sizes in _digits(space, quantizer, (2, 4) if quick else LEVELS):
            tokens = fit_codes(vectors.cpu().numpy(), digits, sizes)
            starts = np.cumsum((0, *sizes[:-1]))
            table = torch.from_numpy(tokens[starts + digits].sum(1)).to(vectors.device)
            name = f"{quantizer}, {levels} digits"
            rows.append(row(name, table, 4 * sum(sizes) * width, levels))
    return [{**own, "kept": round(own["recall@10"] / rows[0]["recall@10"], 2)} for own in rows]


def _digits(
    space: Floats, quantizer: QuantizerName, wanted: Sequence[int]
) -> Iterator[tuple[int, Digits, tuple[int, ...]]]:
    """Numbers of digits with (items, levels) digits and the codes at each level. Residual digits
    are nested: fewer of them are the first ones of many."""
    nested = quantizer == "residual-kmeans"
    fits = (max(wanted),) if nested else wanted
    for fitted_levels in fits:
        config = QuantizerConfig(quantizer=quantizer, levels=fitted_levels, components=0)
        fitted = fit_quantizer(space, config, normalise=False)
        digits = fitted.encode(space)
        for levels in wanted if nested else (fitted_levels,):
            yield levels, digits[:, :levels], fitted.codebook_sizes[:levels]


if __name__ == "__main__":
    main()
