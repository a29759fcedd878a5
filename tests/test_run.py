"""A run folder is never mixed with another, whatever a kill left in it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from maskgr.data.config import DataConfig
from maskgr.errors import ArtefactError
from maskgr.models.base import train_config
from maskgr.run import require_fresh, start_run
from tests.models.tiny import shop


def test_a_draft_that_a_kill_left_does_not_make_the_folder_a_foreign_one(tmp_path: Path) -> None:
    (tmp_path / "training").mkdir()
    (tmp_path / ".recommender.maskgr-abcdefgh").mkdir()
    require_fresh(tmp_path)
    (tmp_path / "photos").mkdir()
    with pytest.raises(ArtefactError, match="is not a run folder"):
        require_fresh(tmp_path)


@pytest.mark.parametrize("damage", ["another command", "a list", "text"])
def test_resuming_names_a_damaged_run_json(tmp_path: Path, damage: str) -> None:
    config, how = train_config(model="popularity"), {"data": "shop", "data_config": DataConfig()}
    start_run(tmp_path, shop(), config, **how)
    start_run(tmp_path, shop(), config, resume=True, **how)
    file = tmp_path / "training" / "run.json"
    about = json.loads(file.read_text())
    content = {"another command": {**about, "command": ["x"]}, "a list": [about]}
    file.write_text(json.dumps(content[damage]) if damage in content else "{")
    with pytest.raises(ArtefactError, match=r"run\.json (is damaged|has changed since it was wri)"):
        start_run(tmp_path, shop(), config, resume=True, **how)
