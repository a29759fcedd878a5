"""What earlier releases saved is loaded as it was, or refused with a sentence that says why."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from maskgr import Dataset, Recommender
from maskgr.errors import ArtefactError
from maskgr.sids.semantic_ids import SemanticIds
from maskgr.version import __version__

KEPT = Path(__file__).parent / "artefacts"
RELEASES = sorted(path.name for path in KEPT.iterdir() if (path / "expected.json").exists())


@pytest.mark.parametrize("release", RELEASES)
def test_what_a_release_saved_gives_what_it_gave(release: str) -> None:
    folder = KEPT / release
    expected = json.loads((folder / "expected.json").read_text())
    assert Dataset.load(folder / "shop").content == expected["content"]
    assert SemanticIds.load(folder / "sids").digits.tolist() == expected["digits"]
    recommender = Recommender.load(folder / "recommender")
    for asked in expected["recommended"]:
        decoding = recommender.decoding(steps=asked["steps"])
        found = recommender.recommend(asked["history"], len(asked["best"]), decoding=decoding)
        assert [row.item_id for row in found] == [item for item, _ in asked["best"]]
        scores = [score for _, score in asked["best"]]
        assert [row.score for row in found] == pytest.approx(scores, abs=1e-4)


def test_this_release_is_kept() -> None:
    """A release is made with its artefacts: tests/artefacts/make.py."""
    assert __version__ in RELEASES
    files = [file for file in (KEPT / __version__).rglob("*") if file.is_file()]
    size = sum(file.stat().st_size for file in files)
    assert size < 200_000


LOADS: dict[str, Callable[[Path], Any]] = {
    "shop": Dataset.load,
    "sids": SemanticIds.load,
    "recommender": Recommender.load,
}


@pytest.mark.parametrize("kind", LOADS)
@pytest.mark.parametrize("newer", [False, True])
def test_another_layout_is_refused_with_the_version_that_made_it(
    tmp_path: Path, kind: str, newer: bool
) -> None:
    folder = tmp_path / kind
    shutil.copytree(KEPT / __version__ / kind, folder)
    manifest = folder / "maskgr.json"
    about = json.loads(manifest.read_text())
    own = about["schema"]
    about |= {"schema": own + 1 if newer else own - 1, "maskgr": "7.7.7" if newer else "0.0.1"}
    manifest.write_text(json.dumps(about))
    digest = hashlib.sha256(manifest.read_bytes()).hexdigest()
    (folder / "maskgr.sha256").write_text(f"{digest}  maskgr.json\n")
    with pytest.raises(ArtefactError) as caught:
        LOADS[kind](folder)
    advice = (
        "install maskgr 7.7.7 or newer, or make it again"
        if newer
        else "make it again, or load it with maskgr 0.0.1"
    )
    assert str(caught.value) == (
        f"{folder} has layout version {about['schema']} and this maskgr reads version {own}; "
        f"{advice}"
    )
