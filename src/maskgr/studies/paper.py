"""Figures that the paper printed, in percent.

Its curves (coarse retrieval, sparse data, steps, sessions) are pictures without numbers.
"""

from __future__ import annotations

from collections.abc import Mapping

METRICS = ("recall@5", "ndcg@5", "recall@10", "ndcg@10")
DATA = ("beauty", "sports", "toys", "ml-1m")

Figures = tuple[float, ...]
OVERALL: dict[str, tuple[Figures, Figures, Figures, Figures]] = {  # as METRICS, as DATA
    "sasrec": (
        (3.87, 2.49, 6.05, 3.18),
        (2.33, 1.54, 3.50, 1.92),
        (4.63, 3.06, 7.12, 4.32),
        (9.38, 5.31, 16.89, 7.72),
    ),
    "bert4rec": (
        (3.60, 2.16, 6.01, 3.08),
        (2.17, 1.43, 3.59, 1.81),
        (4.61, 3.11, 6.65, 3.68),
        (13.63, 8.89, 20.56, 11.12),
    ),
    "dreamrec": (
        (4.40, 2.74, 6.87, 3.52),
        (2.48, 1.51, 3.74, 1.91),
        (4.97, 3.16, 6.43, 4.02),
        (13.04, 8.58, 20.29, 10.47),
    ),
    "cadirec": (
        (4.95, 3.14, 7.18, 3.86),
        (2.76, 1.83, 4.25, 2.33),
        (5.22, 3.56, 7.85, 4.41),
        (15.04, 10.01, 22.82, 12.51),
    ),
    "tiger": (
        (4.29, 2.88, 6.33, 3.54),
        (2.45, 1.64, 3.61, 2.03),
        (4.42, 2.91, 6.63, 3.61),
        (12.83, 8.85, 19.97, 10.13),
    ),
    "liger": (
        (4.62, 3.17, 7.52, 4.14),
        (2.61, 1.67, 4.27, 2.30),
        (4.66, 3.01, 6.25, 3.52),
        (13.73, 9.12, 20.58, 10.81),
    ),
    "maskgr": (
        (5.38, 3.51, 8.15, 4.41),
        (3.02, 1.91, 4.54, 2.49),
        (5.48, 3.75, 8.46, 4.45),
        (16.72, 11.12, 23.96, 13.45),
    ),
}


def overall(data: str, model: str) -> Mapping[str, float]:
    """A row of the paper's main table; both forms of MaskGR have the paper's."""
    name = "maskgr" if model == "maskgr-paper" else model
    if name not in OVERALL:
        return {}
    return dict(zip(METRICS, OVERALL[name][DATA.index(data)], strict=True))


def beauty(recall5: float, recall10: float, ndcg5: float, ndcg10: float) -> Mapping[str, float]:
    """A row of the paper's other tables, which have another order of metrics."""
    return {"recall@5": recall5, "recall@10": recall10, "ndcg@5": ndcg5, "ndcg@10": ndcg10}
