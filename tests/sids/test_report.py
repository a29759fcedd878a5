from __future__ import annotations

from itertools import combinations
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from maskgr.data.dataset import Dataset
from maskgr.errors import RequestError
from maskgr.sids.config import EncoderConfig, Policy, QuantizerConfig, SidsConfig
from maskgr.sids.plot import draw
from maskgr.sids.report import perplexity, portrait, report
from maskgr.sids.semantic_ids import SemanticIds

PNG = b"\x89PNG\r\n\x1a\n"


def made(unique: Policy = "append") -> SemanticIds:
    rng = np.random.default_rng(1)
    kinds = np.arange(80) % 5
    vectors = rng.normal(size=(5, 6))[kinds] + 0.3 * rng.normal(size=(80, 6))
    vectors[7] = vectors[2]
    items = pl.DataFrame(
        {
            "item_id": [f"i{n}" for n in range(80)],
            "title": [f"{('red', 'blue')[n % 2]} kind{k} number {n}" for n, k in enumerate(kinds)],
            "categories": [["Root", f"Kind {k}"] for k in kinds],
            "brand": [None if n % 4 else "Acme" for n in range(80)],
        }
    )
    log = pl.DataFrame({"user_id": "u", "item_id": items["item_id"], "position": range(80)})
    return SemanticIds.make(
        Dataset.from_frames(log, items, embeddings=vectors),
        SidsConfig(
            EncoderConfig(encoder="embeddings"),
            QuantizerConfig(levels=3, codes=8, components=0),
            unique,
        ),
    )


def test_report_equals_counting_by_hand() -> None:
    sids = made()
    found = report(sids)
    tuples = [tuple(row) for row in sids.digits[:, :3].tolist()]
    alone = sum(tuples.count(t) == 1 for t in tuples)
    assert found.items == 80
    assert found.unique_share_before == alone / 80
    assert found.unique_share_after == 1
    assert found.distinct_before == len(set(tuples))
    assert found.largest_collision == max(map(tuples.count, tuples))
    assert sum(size * groups for size, groups in found.collision_sizes.items()) == 80
    assert [level.codes for level in found.levels] == list(sids.codebook_sizes)
    assert [level.appended for level in found.levels] == [False, False, False, True]
    for place, level in enumerate(found.levels):
        assert level.codes_used == len(set(sids.digits[:, place].tolist()))
    errors = [level.reconstruction_error for level in found.levels[:3]]
    assert errors == sorted(errors, reverse=True)
    assert found.error_before == found.error_after == errors[-1]


def test_reassigning_costs_distortion_and_is_reported() -> None:
    found = report(made("reassign"))
    assert found.unique_share_after == 1
    assert found.error_after > found.error_before


def test_agreement_equals_counting_all_pairs() -> None:
    sids = made()
    kinds = sids.items["categories"].to_list()
    pairs = list(combinations(range(80), 2))
    by_column = {a.column: a for a in report(sids).agreement}
    assert set(by_column) == {"categories", "brand"}  # titles do not repeat
    found = by_column["categories"]
    assert found.chance == np.mean([kinds[a] == kinds[b] for a, b in pairs])
    for length, share in ((1, found.same_first_digit), (2, found.same_first_two)):
        heads = [tuple(row[:length]) for row in sids.digits.tolist()]
        near = [kinds[a] == kinds[b] for a, b in pairs if heads[a] == heads[b]]
        assert share == pytest.approx(np.mean(near))
    assert by_column["brand"].chance == 1  # only what is known is compared


def test_perplexity_is_the_exponential_of_the_entropy() -> None:
    assert perplexity(np.array([5, 5, 5, 5, 0])) == pytest.approx(4)
    assert perplexity(np.array([9, 0])) == 1


def test_portrait_shows_prefixes_and_neighbours() -> None:
    sids = made()
    found = portrait(sids, "i2", neighbours=3)
    assert found.digits == tuple(sids.digits[2].tolist())
    assert [p.items for p in found.prefixes] == [
        len(sids.with_prefix(sids.digits[2, :n].tolist())) for n in (1, 2, 3, 4)
    ]
    words = dict(found.prefixes[0].words)
    assert words["root"] == 1
    assert words["kind2"] > 0.5
    assert found.neighbours[0]["item_id"] == "i7"  # its twin
    assert found.neighbours[0]["similarity"] == pytest.approx(1)
    assert len(found.neighbours) == 3


def test_picture_is_a_png(tmp_path: Path) -> None:
    sids = made()
    draw(sids, report(sids), tmp_path / "deep" / "report.png")
    assert (tmp_path / "deep" / "report.png").read_bytes().startswith(PNG)


def test_raises_when_matplotlib_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    sids = made()
    with pytest.raises(RequestError, match=r"pip install 'maskgr\[plots\]'"):
        draw(sids, report(sids), tmp_path / "x.png")
