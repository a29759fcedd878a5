"""Each study end to end on a small shop, with models trained for a few steps."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maskgr.data.config import SyntheticConfig
from maskgr.data.dataset import Dataset
from maskgr.data.open import fetch
from maskgr.data.sequences import Sequences
from maskgr.data.splits import leave_out
from maskgr.errors import RequestError
from maskgr.evaluation.differences import Difference
from maskgr.evaluation.ranking import Query, Ranked
from maskgr.models.base import MODELS, model_class, train_config
from maskgr.recommender import RECOMMENDER, Recommender
from maskgr.studies import cold_start, recipe, results
from maskgr.studies.findings import Findings
from maskgr.studies.measures import ItemByItem
from maskgr.studies.pairs import Pair
from maskgr.studies.registry import STUDIES, run_study, study_of
from maskgr.studies.report import Report
from maskgr.studies.results import Claim
from maskgr.studies.runner import Job, Runner
from maskgr.studies.study import SMALL, Asked, Variant, preset_of
from tests.conftest import Outcome

FILES = ("table.md", "table.csv", "table.json", "differences.csv", "configurations.json")
# Of the studies with many variants; the others are run whole.
ONLY = {
    "sparse": ("maskgr", "maskgr -50.0%", "tiger", "tiger -50.0%"),
    "levels": ("maskgr-paper 3 digits", "maskgr-paper 4 digits", "maskgr 3 digits"),
    "ids": (
        "maskgr-paper",
        "maskgr-paper random SIDs",
        "maskgr-paper item IDs",
        "maskgr digits alone",
        "maskgr random digits alone",
    ),
    "recipe": ("as it is", "no text"),
}


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Asked:
    """One folder for all studies: what one has trained serves the others."""
    folder = tmp_path_factory.mktemp("studies")
    shop = fetch("synthetic", synthetic=SyntheticConfig(users=80, items=40))
    vectors = np.random.default_rng(0).normal(size=(40, 8)).astype(np.float32)  # no text encoder
    replace(shop, embeddings=vectors).save(folder / "beauty")
    return Asked((str(folder / "beauty"),), folder / "out", preset="tiny", users=24)


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """The trainings that were asked for; small models are trained for them in this process."""
    started: list[Job] = []

    def quickly(runner: Runner, job: Job) -> Path:
        folder = runner.folder(job)
        if not runner.is_trained(job):
            started.append(job)
            config = replace(job, minutes=None, settings=(*_quick(job.model), *job.settings)).config
            Recommender.train(runner.dataset, config=config).save(folder / RECOMMENDER)
        return folder

    monkeypatch.setattr(Runner, "train", quickly)
    return started


def _quick(model: str) -> list[str]:
    """The settings of a quick training that this model has."""
    preset = next(iter(model_class(model).presets))
    wanted = ("fit.steps=3", "validations=1", "width=16", "layers=1", "codes=8")
    return [setting for setting in wanted if _has(model, preset, setting)]


def _has(model: str, preset: str, setting: str) -> bool:
    try:
        train_config(preset, [setting], model=model)
    except RequestError:
        return False
    return True


def _read(found: Findings) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((found.folder / "table.json").read_text())
    return content


@pytest.mark.parametrize("name", STUDIES)
def test_study_writes_its_table_figure_configurations_and_report(
    name: str, asked: Asked, jobs: list[Job]
) -> None:
    found = run_study(name, replace(asked, only=ONLY.get(name, ())))
    study, folder = study_of(name), asked.out / f"{name}-beauty"
    variants = [own.name for own in study.chosen(ONLY.get(name, ()))]
    (part,) = _read(found)["parts"]
    assert list(dict.fromkeys(cell[study.first] for cell in part["cells"])) == variants
    assert not found.missing
    assert {"table.md", *FILES, "report.html", "figure.png"} == {f.name for f in folder.iterdir()}
    assert (folder / "figure.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    for cell in part["cells"]:
        for values in cell["protocols"].values():
            assert set(values) == set(study.metrics)
            for mean in values.values():
                assert mean["low"] <= mean["mean"] <= mean["high"]
    with (folder / "table.csv").open() as file:
        rows = list(csv.DictReader(file))
    published = sum(bool(cell["paper"]) for cell in part["cells"])
    assert len(rows) == len(part["cells"]) * len(found.protocols) + published
    exact = json.loads((folder / "configurations.json").read_text())
    assert [own["variant"] for own in exact["variants"]] == [c[study.first] for c in part["cells"]]
    assert all(own["trainings"][0]["name"] in MODELS for own in exact["variants"])
    html = (folder / "report.html").read_text()
    assert 'src="data:image/png;base64,' in html
    assert "http" not in html
    assert all(variant in html for variant in variants)
    assert exact["variants"][0]["runs"][0] in html
    assert bool(study.where) == ("Why figures differ" in html)
    assert bool(part["claims"]) == ("The paper&#x27;s findings" in html) == bool(study.where)


def test_studies_share_their_trainings(asked: Asked, jobs: list[Job]) -> None:
    """Whatever ran before: a second study of the same models trains nothing."""
    run_study("overall", asked)
    jobs.clear()
    for name in ("coarse", "steps", "orders"):
        run_study(name, asked)
    assert not jobs
    run_study("ids", replace(asked, only=("maskgr-paper", "bert4rec")))
    assert "maskgr-paper" not in [job.model for job in jobs if not job.settings]


def test_everything_is_measured_once(
    asked: Asked, jobs: list[Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    dense = replace(asked, only=("maskgr",))
    first = run_study("dense", dense).to_dict()
    monkeypatch.setattr("maskgr.studies.runner.measured", None)
    assert run_study("dense", dense).to_dict() == first


def test_several_datasets_and_seeds_are_one_table(
    asked: Asked, jobs: list[Job], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "sports"
    fetch("synthetic", synthetic=SyntheticConfig(users=60, items=30, seed=1)).save(folder)
    both = replace(
        asked, data=(*asked.data, str(folder)), out=tmp_path / "out", only=("popularity",), seeds=2
    )
    found = run_study("overall", both)
    assert [part.data for part in found.parts] == ["beauty", "sports"]
    assert found.folder == tmp_path / "out" / "overall-beauty-sports"
    assert {file.name for file in found.folder.glob("*.png")} == {
        "figure-beauty.png",
        "figure-sports.png",
    }
    assert all(part.cells[0].seeds == (0, 1) for part in found.parts)
    assert "24 users and 2 seeds" in found.reports()[0].notes[0]
    assert len(jobs) == 4
    assert "[4/4] popularity, preset cpu, seed 1 on " in capsys.readouterr().err


def test_paper_figures_stand_beside_the_dataset_that_they_are_about(asked: Asked) -> None:
    overall = study_of("overall")
    assert [overall.paper_of(name) for name in ("ml-1m", "my-shop")] == ["ml-1m", "beauty"]
    cell = _cell(variant="tiger", model="tiger")
    assert overall.paper("ml-1m", cell) == {
        "recall@5": 12.83,
        "ndcg@5": 8.85,
        "recall@10": 19.97,
        "ndcg@10": 10.13,
    }
    levels = study_of("levels")
    cell = _cell(variant="maskgr-paper 5 digits", model="maskgr-paper", key="free")
    assert levels.paper("beauty", cell)["recall@10"] == 7.53


def _cell(**changes: Any) -> results.Cell:
    plain = {"variant": "", "model": "", "key": "", "labels": (), "seeds": (), "scores": ()}
    return results.Cell(**{**plain, "values": {}, **changes})


def test_presets_of_a_study_are_those_of_its_models() -> None:
    asked = Asked(("beauty",), Path("out"), minutes=15)
    for model, preset, expected in (
        ("maskgr-paper", "cpu", ("paper", SMALL)),
        ("maskgr-paper", "published", ("paper", ())),
        ("maskgr-paper", "tiny", ("tiny-paper", ())),
        ("maskgr", "published", ("cpu", ())),
        ("tiger", "published", ("published", ())),
        ("popularity", "published", ("cpu", ())),
    ):
        assert preset_of(model, preset) == expected
    paper = Variant("maskgr-paper", "maskgr-paper").job(asked, 0).config
    assert (paper.model.network.layers, paper.fit.minutes, paper.fit.accumulate) == (4, 15, 1)
    (head,) = study_of("dense").chosen(("maskgr-paper",))
    config = head.job(asked, 0).config
    assert (config.model.dense.head, config.model.dense.layer) == (True, 2)
    assert config.model.objective.whole_item == 0.2
    with pytest.raises(RequestError, match="tiger has no preset 'digits'"):
        Variant("tiger", "tiger").job(replace(asked, preset="digits"), 0)


def test_paper_form_is_asked_with_a_cache_unless_costs_are_measured() -> None:
    asked = Asked(("beauty",), Path("out"))
    for name, model, preset, cache in (
        ("levels", "maskgr-paper", "cpu", "frozen"),
        ("levels", "maskgr-paper", "published", None),
        ("levels", "maskgr", "cpu", None),
        ("steps", "maskgr-paper", "cpu", None),
    ):
        study = study_of(name)
        (way, *_) = study.ways(model, 4)
        measure = study.measure_of(way, model, replace(asked, preset=preset))
        assert measure.decoding.get("cache") == cache, (name, model, preset)
    *_, quick = study_of("steps").ways("maskgr-paper", 4)
    assert (quick.key, quick.changes["decoding"]["cache"]) == ("cached", "frozen")


@pytest.mark.parametrize("name", [name for name in STUDIES if name != "recipe"])
@pytest.mark.parametrize("preset", ["cpu", "published"])
def test_every_variant_is_a_training_of_its_own(name: str, preset: str) -> None:
    asked = Asked(("beauty",), Path("out"), preset=preset)
    configs = [own.job(asked, 0).config for own in study_of(name).variants]
    assert len(set(map(str, configs))) == len(configs)


def test_default_models_of_the_studies_are_the_same_trainings() -> None:
    asked = Asked(("beauty",), Path("out"), minutes=15)
    paper = Variant("maskgr-paper", "maskgr-paper").job(asked, 0).config
    ours = Variant("maskgr", "maskgr").job(asked, 0).config
    for name, variant, config in (
        ("levels", "maskgr-paper 4 digits", paper),
        ("levels", "maskgr 4 digits", ours),
        ("sparse", "maskgr-paper", paper),
        ("ids", "maskgr", ours),
        ("dense", "maskgr", ours),
        ("recipe", "as it is", ours),
    ):
        (own,) = (v for v in study_of(name).variants if v.name == variant)
        assert own.job(asked, 0).config == config


def test_every_variant_of_the_recipe_changes_settings_that_exist() -> None:
    start = train_config("cpu")
    for name, settings in recipe.VARIANTS.items():
        changed = train_config("cpu", settings)
        assert (changed != start) == bool(settings), name


@pytest.mark.parametrize(
    ("weak", "differences", "verdict"),
    [
        (False, [(0.02, 0.01), (0.01, 0.04)], "holds"),
        (False, [(0.02, 0.01), (0.01, 0.06)], "holds partly"),
        (False, [(0.02, 0.01), (-0.01, 0.01)], "holds partly"),
        (False, [(0.02, 0.2), (-0.01, 0.2)], "not decided"),
        (False, [(0.02, 0.2), (-0.01, 0.01)], "does not hold"),
        (True, [(0.0, 1.0), (0.01, 0.9)], "holds"),
        (True, [(0.01, 0.9), (-0.01, 0.01)], "holds partly"),
        (True, [(-0.01, 0.2)], "not decided"),
        (True, [(-0.01, 0.01)], "does not hold"),
    ],
)
def test_verdict_of_a_claim(
    weak: bool, differences: list[tuple[float, float]], verdict: str
) -> None:
    pairs = [Pair("all", "m", "a", "b", Difference(d, d, d, p), p) for d, p in differences]
    assert results._verdict(Claim("", "m", (), weak), pairs) == verdict


class Chain:
    """After an item n: n + 1 with probability 0.6, n + 2 with 0.4."""

    def rank(self, query: Query) -> Ranked:
        items = np.full((len(query.histories), query.top), -1, dtype=np.int32)
        scores = np.full(items.shape, -np.inf, dtype=np.float32)
        assert query.excluded is not None
        for row, (history, taken) in enumerate(zip(query.histories, query.excluded, strict=True)):
            after = [(history[-1] + 1, 0.6), (history[-1] + 2, 0.4)]
            kept = [(item, p) for item, p in after if item not in taken]
            for place, (item, p) in enumerate(kept[: query.top]):
                items[row, place], scores[row, place] = item, np.log(p)
        return Ranked(items, scores)


def test_sessions_item_by_item_are_the_most_probable_ones() -> None:
    query = Query(Sequences.of([[3], [7, 0]]), 3)
    found = ItemByItem(Chain(), repeats=True).sessions(query, 2)
    # 0.36, 0.24 (1 + 2), 0.24 (2 + 1); 0.16 is the fourth.
    assert found[0].tolist() == [[4, 5], [4, 6], [5, 6]]
    assert found[1].tolist() == [[1, 2], [1, 3], [2, 3]]
    query = Query(Sequences.of([[3]]), 4, excluded=Sequences.of([[4, 6]]))
    found = ItemByItem(Chain(), repeats=False).sessions(query, 2)
    assert found[0].tolist() == [[5, 7], [-1, -1], [-1, -1], [-1, -1]]


def test_cold_items_leave_the_dataset_and_come_last_in_the_test_cases(asked: Asked) -> None:
    shop = Dataset.load(asked.data[0])
    cold = np.zeros(len(shop.items), dtype=bool)
    cold[[3, 17]] = True
    warm = cold_start.without(shop, cold)
    ids = shop.item_ids.to_list()
    assert not {ids[3], ids[17]} & set(warm.item_ids.to_list())
    for before, after in zip(shop.histories, warm.histories, strict=True):
        kept = [ids[n] for n in before if n not in (3, 17)]
        assert [warm.item_ids[int(n)] for n in after] == kept
    test = leave_out(shop.histories).test
    moved = cold_start.renumbered(test, cold)
    order = [*warm.item_ids.to_list(), ids[3], ids[17]]
    for old, new in zip(test.histories, moved.histories, strict=True):
        assert [ids[n] for n in old] == [order[n] for n in new]
    assert [ids[n] for n in test.targets[:, 0]] == [order[n] for n in moved.targets[:, 0]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"only": ("x",)}, "--only x: no such variant; the variants are maskgr-paper, maskgr"),
        ({"preset": "x"}, "maskgr-paper has no preset 'x'; its presets are tiny-paper, paper"),
        ({"minutes": -1}, "leaves no time to train"),
        ({"data": ("a/shop", "b/shop")}, "--data a/shop,b/shop: name each dataset once"),
    ],
)
def test_raises_before_anything_is_trained(
    changes: dict[str, Any], message: str, asked: Asked, jobs: list[Job], tmp_path: Path
) -> None:
    with pytest.raises(RequestError, match=message):
        run_study("overall", replace(asked, out=tmp_path / "out", **changes))
    assert not jobs


def test_raises_when_there_is_no_such_study_or_the_folder_is_not_of_studies(
    asked: Asked, tmp_path: Path
) -> None:
    with pytest.raises(RequestError, match="there is no study 'x'; the studies are overall, co"):
        run_study("x", asked)
    (tmp_path / "letter.txt").touch()
    with pytest.raises(RequestError, match="exists and holds no study; give another --out"):
        run_study("overall", replace(asked, out=tmp_path))


def test_command_prints_tables_or_json_and_lists_the_studies(
    maskgr: Callable[..., Outcome], asked: Asked, jobs: list[Job]
) -> None:
    words = ("study", "orders", "--data", *asked.data, "--out", asked.out, "--users", 24)
    words = (*words, "--preset", "tiny", "--only", "maskgr")
    outcome = maskgr(*words)
    assert outcome.code == 0, outcome.err
    assert "Decoding orders" in outcome.out
    assert "report.html" in outcome.out
    found = json.loads(maskgr(*words, "--json").out)
    assert found["parts"][0]["cells"][0]["order"] == "any"  # one step has none
    assert maskgr("study", "x", "--out", asked.out).code == 2
    listed = maskgr("study", "list").out
    assert all(name in listed for name in STUDIES)
    (first, *_) = json.loads(maskgr("study", "list", "--json").out)
    assert (first["name"], first["variants"][-1]) == ("overall", "popularity")


def test_killed_study_goes_on_to_the_same_result(
    maskgr: Callable[..., Outcome], asked: Asked, tmp_path: Path, commands: list[list[str]]
) -> None:
    words = ["study", "overall", "--data", *asked.data, "--preset", "tiny", "--users", "24"]
    words += ["--only", "sasrec,bert4rec", "--json", "--out"]
    killed = tmp_path / "killed"
    process = subprocess.Popen(
        [sys.executable, "-m", "maskgr", *words, str(killed)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        end = time.monotonic() + 300
        while not any(killed.glob("runs/bert4rec-*/training/run.json")):
            assert time.monotonic() < end
            assert process.poll() is None
            time.sleep(0.02)
        os.kill(process.pid, signal.SIGKILL)
    finally:
        process.kill()
        process.wait()
    partial = json.loads((killed / "overall-beauty" / "table.json").read_text())
    assert partial["missing"] == ["bert4rec"]
    went_on = json.loads(maskgr(*words, killed).out)
    assert [command[5] for command in commands] == ["bert4rec"]
    whole = json.loads(maskgr(*words, tmp_path / "whole").out)
    assert _untimed(went_on) == _untimed(whole)
    assert went_on["parts"][0]["cells"][0] == partial["parts"][0]["cells"][0]


def _untimed(report: dict[str, Any]) -> Any:
    """What a study found, without what a clock says."""
    timed = ("minutes", "users/s", "ms/user")
    (part,) = report["parts"]
    cells = [{k: v for k, v in cell.items() if k not in timed} for cell in part["cells"]]
    return cells, part["claims"], report["missing"]


def test_report_as_markdown() -> None:
    report = Report("Title", ("a|b", "count"), (("x", 12_345), ("y", 0.5)), ("a note",))
    assert report.to_markdown() == (
        "**Title**\n\n| a\\|b | count |\n| --- | --- |\n| x | 12,345 |\n| y | 0.5 |\n\n- a note\n"
    )
