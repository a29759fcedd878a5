"""The commands `maskgr sids` and `maskgr sids show`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Outcome


def test_make_and_show(maskgr: Callable[..., Outcome], tmp_path: Path) -> None:
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
        (["--quantizer", "magic"], "magic"),
        (["--encoder", "magic"], "encoder is 'magic'"),
        (["--codes", "1"], "codes is 1; give a whole number from 2 to "),
        (["--encoder", "embeddings"], "the dataset has none; put embeddings.npy"),
        (["--template", "{colour}"], "colour"),
        (["--set", "colour=blue"], "--set colour=blue"),
        (["--set", "components=many"], "--set components=many"),
        (["--unique", "magic"], "magic"),
    ],
)
def test_bad_options_end_with_one_sentence(
    maskgr: Callable[..., Outcome], tmp_path: Path, words: list[str], expected: str
) -> None:
    shop = tmp_path / "shop"
    maskgr("data", "fetch", "synthetic", "--set", "users=20", "--set", "items=30", "--out", shop)
    outcome = maskgr("sids", shop, "--out", tmp_path / "sids", *words)
    assert outcome.code == 2
    assert expected in outcome.err.splitlines()[-1]
    assert not (tmp_path / "sids").exists()


def test_missing_item_and_folder_are_named(maskgr: Callable[..., Outcome], tmp_path: Path) -> None:
    shop, out = tmp_path / "shop", tmp_path / "sids"
    maskgr("data", "fetch", "synthetic", "--set", "users=20", "--set", "items=30", "--out", shop)
    maskgr("sids", shop, "--out", out, "--levels", 2, "--codes", 8)
    assert "item 'ghost' has no semantic ID" in maskgr("sids", "show", out, "ghost").err
    assert "there is no folder" in maskgr("sids", "show", tmp_path / "nothing", "i1").err
