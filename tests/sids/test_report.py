from __future__ import annotations

import json
from collections.abc import Callable
from itertools import combinations
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from maskgr.data.dataset import Dataset
from maskgr.errors import RequestError
from maskgr.sids.config import EncoderConfig, QuantizerConfig
from maskgr.sids.plot import draw
from maskgr.sids.report import perplexity, portrait, report
from maskgr.sids.semantic_ids import SemanticIds
from maskgr.sids.uniqueness import Policy
from tests.conftest import Outcome

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
        encoder=EncoderConfig(encoder="embeddings"),
        quantizer=QuantizerConfig(levels=3, codes=8, components=0),
        unique=unique,
    )


def test_the_report_against_counting() -> None:
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


def test_agreement_against_all_pairs() -> None:
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


def test_perplexity() -> None:
    assert perplexity(np.array([5, 5, 5, 5, 0])) == pytest.approx(4)
    assert perplexity(np.array([9, 0])) == 1


def test_portrait() -> None:
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


def test_the_picture_is_a_png(tmp_path: Path) -> None:
    sids = made()
    draw(sids, report(sids), tmp_path / "deep" / "report.png")
    assert (tmp_path / "deep" / "report.png").read_bytes().startswith(PNG)


def test_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    sids = made()
    with pytest.raises(RequestError, match=r"pip install 'maskgr\[plots\]'"):
        draw(sids, report(sids), tmp_path / "x.png")


def test_the_command(maskgr: Callable[..., Outcome], tmp_path: Path) -> None:
    shop, out = tmp_path / "shop", tmp_path / "sids"
    maskgr("data", "fetch", "synthetic", "--set", "users=60", "--set", "items=120", "--out", shop)
    words = ("--levels", 3, "--codes", 16, "--picture", tmp_path / "p.png")
    outcome = maskgr("sids", shop, "--out", out, *words, "--json")
    assert outcome.code == 0, outcome.err
    found = json.loads(outcome.out)
    assert found["items"] == 120
    assert found["unique_share_after"] == 1
    assert {"codes_used", "perplexity", "reconstruction_error"} <= set(found["levels"][0])
    assert (tmp_path / "p.png").exists()

    shown = json.loads(maskgr("sids", "show", out, "SKU-00007", "--json").out)
    assert shown["item"]["item_id"] == "SKU-00007"
    assert len(shown["digits"]) == 4
    text = maskgr("sids", "show", out, "SKU-00007").out
    assert shown["item"]["title"] in " ".join(text.split())
    assert "in common" in text

    again = maskgr("sids", shop, "--out", out, "--unique", "reassign", "--codes", 16, "--levels", 3)
    assert "unique after" in again.out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--quantizer", "magic"], "there is no quantiser 'magic'"),
        (["--encoder", "magic"], "there is no encoder 'magic'"),
        (["--codes", "1"], "codes is 1; it must be 2 or more"),
        (["--encoder", "embeddings"], "the dataset has none; put embeddings.npy"),
        (["--template", "{colour}"], "colour"),
        (["--set", "colour=blue"], "--set colour=blue is not key=value with a key of encoder"),
        (["--set", "restarts=many"], "--set restarts=many: 'many' is not a valid int"),
        (["--unique", "magic"], "there is no policy 'magic'"),
    ],
)
def test_bad_requests(
    maskgr: Callable[..., Outcome], tmp_path: Path, words: list[str], expected: str
) -> None:
    shop = tmp_path / "shop"
    maskgr("data", "fetch", "synthetic", "--set", "users=20", "--set", "items=30", "--out", shop)
    outcome = maskgr("sids", shop, "--out", tmp_path / "sids", *words)
    assert outcome.code == 2
    assert expected in outcome.err.splitlines()[-1]
    assert not (tmp_path / "sids").exists()


def test_missing_item_and_folder(maskgr: Callable[..., Outcome], tmp_path: Path) -> None:
    made().save(tmp_path / "sids")
    assert (
        "item 'ghost' has no semantic ID" in maskgr("sids", "show", tmp_path / "sids", "ghost").err
    )
    assert "there is no folder" in maskgr("sids", "show", tmp_path / "nothing", "i1").err
