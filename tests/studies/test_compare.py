"""`maskgr compare` on a tiny shop: figures, reuse, resuming, refusals, nothing left behind."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from maskgr.data.config import SyntheticConfig
from maskgr.data.open import fetch
from maskgr.evaluation.differences import holm, mean_over_seeds, paired_difference
from maskgr.recommender import Recommender
from maskgr.studies.compare import entries
from tests.conftest import Outcome

QUICK = ("--set", "fit.steps=4", "--set", "validations=1")
TWO = ("--models", "neighbours,sasrec:tiny", *QUICK)
SIDES = ("model", "other")
METRICS = ("recall@5", "ndcg@5", "recall@10", "ndcg@10")


def figures(report: dict[str, Any]) -> dict[str, Any]:
    """What a comparison found, without what a clock says."""
    timed = ("minutes", "users_per_second", "runs")
    models = [{k: v for k, v in m.items() if k not in timed} for m in report["models"]]
    return {**report, "models": models}


def users(out: Path, run: str) -> pl.DataFrame:
    """What was kept of a run, user by user."""
    (folder,) = (out / "evaluations").glob(f"{run}-*")
    return pl.read_parquet(folder / "users.parquet")


def test_table_has_the_figures_of_evaluate_and_a_second_run_trains_nothing(
    maskgr: Callable[..., Outcome], shop: Path, tmp_path: Path, commands: list[list[str]]
) -> None:
    words = ("compare", shop, *TWO, "--out", tmp_path / "out")
    first = maskgr(*words)
    assert first.code == 0, first.err
    assert [command[5] for command in commands] == ["neighbours", "sasrec", "popularity"]
    report = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert [row["model"] for row in report["models"]] == ["neighbours", "sasrec:tiny", "popularity"]
    for row in report["models"]:
        alone = json.loads(maskgr("evaluate", row["runs"][0], "--json").out)
        assert row["protocols"] == alone["protocols"]
        assert row["config"]["fit"]["steps"] == 4
        shown = [alone["protocols"]["all"][name] for name in METRICS]
        cells = [f"{100 * m['mean']:.2f} ± {50 * (m['high'] - m['low']):.2f}" for m in shown]
        line = next(own for own in first.out.splitlines() if own.startswith(f"{row['model']} "))
        assert line.split("  ")[0] == row["model"]
        assert all(cell in line for cell in cells)
    sasrec = Recommender.load(report["models"][1]["runs"][0]).model
    assert report["models"][1]["parameters"] == sum(p.numel() for p in sasrec.parameters())  # type: ignore[attr-defined]

    commands.clear()
    again = maskgr(*words, "--json")
    assert not commands
    assert json.loads(again.out) == report  # the times of the first run too
    assert "trained before" in again.err
    part = maskgr("compare", shop, "--models", "neighbours", *QUICK, "--out", tmp_path / "out")
    assert part.code == 0
    assert not commands


def test_differences_are_those_of_the_kept_users(
    maskgr: Callable[..., Outcome], shop: Path, tmp_path: Path, commands: list[list[str]]
) -> None:
    run, out = tmp_path / "few", tmp_path / "out"
    maskgr("train", shop, "--model", "neighbours", "--set", "most=1", "--out", run)
    words = ("compare", shop, "--models", f"{run},neighbours", "--out", out, "--json")
    report = json.loads(maskgr(*words).out)
    kept = {
        name: users(out, name.split("/")[-1]) for name in (str(run), "neighbours", "popularity")
    }
    found = [d for d in report["differences"] if (d["protocol"], d["metric"]) == ("all", "ndcg@5")]
    expected = [
        paired_difference(*(kept[d[who]]["all ndcg@5"].to_numpy()[None] for who in SIDES))
        for d in found
    ]
    assert len(found) == 3  # each two of three models
    assert [d["difference"] for d in found] == [own.mean for own in expected]
    assert [(d["low"], d["high"], d["p"]) for d in found] == [
        (own.low, own.high, own.p) for own in expected
    ]
    assert [d["p_adjusted"] for d in found] == holm([own.p for own in expected])
    with (out / "differences.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert len(rows) == 3 * 4 * 2
    assert [float(row["p"]) for row in rows] == [d["p"] for d in report["differences"]]


def test_files_hold_the_same_figures(
    maskgr: Callable[..., Outcome], shop: Path, tmp_path: Path, commands: list[list[str]]
) -> None:
    out = tmp_path / "out"
    words = ("--split", "validation", "--users", 40, "--out", out)
    outcome = maskgr("compare", shop, "--models", "neighbours", *words)
    report = json.loads((out / "comparison.json").read_text())
    assert (report["users"], report["split"], report["missing"]) == (40, "validation", [])
    with (out / "comparison.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert [(row["model"], row["protocol"]) for row in rows] == [
        (name, protocol) for name in ("neighbours", "popularity") for protocol in ("all", "unseen")
    ]
    for row in rows:
        model = report["models"][row["model"] == "popularity"]
        for name in METRICS:
            interval = model["protocols"][row["protocol"]][name]
            assert [float(row[f"{name}{end}"]) for end in ("", " low", " high")] == [
                interval[key] for key in ("mean", "low", "high")
            ]
    written = (out / "comparison.md").read_text()
    shown = [line for line in outcome.out.splitlines() if line.startswith("popularity")]
    assert shown[0].split()[2] in written  # recall@5
    assert "validation chose each network" in written
    assert "](comparison.png)" in written
    assert (out / "comparison.png").read_bytes().startswith(b"\x89PNG")


def test_model_that_fails_leaves_a_table_of_the_others(
    maskgr: Callable[..., Outcome],
    shop: Path,
    tmp_path: Path,
    commands: list[list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "out"

    def broken(*_: object) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr("maskgr.models.neighbours.Neighbours.learn", broken)
        outcome = maskgr("compare", shop, "--models", "neighbours", "--out", out)
    assert outcome.code == 2
    assert "popularity" in outcome.out
    assert "not measured so far: neighbours" in outcome.out
    assert outcome.err.splitlines()[-1].startswith("error: 1 of 2 trainings failed: training neigh")
    assert json.loads((out / "comparison.json").read_text())["missing"] == ["neighbours"]
    assert maskgr("compare", shop, "--models", "neighbours", "--out", out).code == 0
    assert json.loads((out / "comparison.json").read_text())["missing"] == []


def test_several_seeds_are_one_row(
    maskgr: Callable[..., Outcome], shop: Path, tmp_path: Path, commands: list[list[str]]
) -> None:
    out = tmp_path / "out"
    words = ("compare", shop, "--models", "neighbours", "--set", "sparsify=0.5", "--out", out)
    maskgr(*words, "--seed", 5)
    report = json.loads(maskgr(*words, "--seed", 4, "--seeds", 2, "--json").out)
    assert [command[9] for command in commands if "neighbours" in command] == ["5", "4"]
    model = report["models"][0]
    assert model["seeds"] == [4, 5]
    kept = [users(out, f"neighbours-cpu-{seed}")["all recall@10"] for seed in (4, 5)]
    values = np.stack([own.to_numpy() for own in kept])
    assert values[0].tolist() != values[1].tolist()
    assert model["protocols"]["all"]["recall@10"] == vars(mean_over_seeds(values))
    by_seed = [own["all"]["recall@10"] for own in model["by_seed"]]
    assert by_seed == values.mean(axis=1).tolist()


def test_changed_settings_are_trained_beside_the_old_ones(
    maskgr: Callable[..., Outcome], shop: Path, tmp_path: Path, commands: list[list[str]]
) -> None:
    words = ("compare", shop, "--models", "neighbours", "--out", tmp_path / "out")
    first = json.loads(maskgr(*words, "--json").out)
    other = json.loads(maskgr(*words, "--set", "most=3", "--json").out)
    assert other["models"][0]["runs"] != first["models"][0]["runs"]
    assert other["models"][1] == first["models"][1]  # popularity has no such setting
    commands.clear()
    assert json.loads(maskgr(*words, "--json").out) == first
    assert not commands


def test_run_that_exists_is_compared_as_it_is(
    maskgr: Callable[..., Outcome], shop: Path, tmp_path: Path, commands: list[list[str]]
) -> None:
    run = tmp_path / "mine"
    maskgr("train", shop, "--model", "neighbours", "--set", "most=2", "--out", run)
    words = ("compare", shop, "--models", f"neighbours,{run}", "--out", tmp_path / "out", "--json")
    found = json.loads(maskgr(*words).out)["models"]
    assert [row["model"] for row in found] == ["neighbours", str(run), "popularity"]
    assert [row["config"]["model"].get("most") for row in found] == [128, 2, None]
    assert len(commands) == 2


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--models", "magic"], "there is no model 'magic'; the models are maskgr, "),
        (["--models", "neighbours,sasrec:huge"], "sasrec has no preset 'huge'; its presets are"),
        (["--models", "sasrec", "--preset", "huge"], "sasrec has no preset 'huge'; its presets"),
        (["--models", " , "], "no model is named; give --models"),
        (["--models", "sasrec,sasrec:cpu"], "sasrec and sasrec:cpu are the same; name each model"),
        (["--models", "sasrec", "--minutes", "0"], "--minutes 0 leaves no time to train; "),
        (["--models", "sasrec", "--minutes", "inf"], "fit.minutes is inf; give a number from "),
        (["--models", "sasrec", "--set", "colour=1"], "--set colour=1: there is no setting colour"),
        (["--models", "sasrec", "--device", "abacus"], "there is no device 'abacus'; give auto"),
        (["--models", "sasrec", "--seeds", "0"], "Invalid value for '--seeds': "),
        (["--models", "sasrec", "--split", "train"], "Invalid value for '--split': "),
    ],
)  # fmt: skip
def test_mistakes_are_refused_before_anything_is_trained(
    maskgr: Callable[..., Outcome],
    tmp_path: Path,
    commands: list[list[str]],
    words: list[str],
    expected: str,
) -> None:
    outcome = maskgr("compare", "synthetic", *words, "--out", tmp_path / "out")
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.startswith(f"error: {expected}")
    assert outcome.err.count("\n") == 1
    assert not commands
    assert not (tmp_path / "out").exists()


def test_folders_and_runs_that_do_not_fit_are_refused_before_anything_is_trained(
    maskgr: Callable[..., Outcome], shop: Path, tmp_path: Path, commands: list[list[str]]
) -> None:
    other, out = tmp_path / "other", tmp_path / "out"
    fetch("synthetic", synthetic=SyntheticConfig(users=50, items=20)).save(other)
    assert maskgr("compare", other, "--models", "popularity", "--out", out).code == 0
    maskgr("train", other, "--model", "popularity", "--out", tmp_path / "run")
    pairs = ("--set", "leave_out=2")
    maskgr("train", shop, "--model", "popularity", "--out", tmp_path / "pairs", *pairs)
    commands.clear()
    run, sessions = tmp_path / "run", tmp_path / "pairs"
    for words, expected in (
        (("neighbours", "--out", out), f"{out} holds a comparison on other data ({other}); give"),
        (("neighbours", "--out", other), f"{other} exists and holds no comparison; give another"),
        ((f"neighbours,{run}", "--out", tmp_path / "new"), f"{run} was trained on other data"),
        (
            (f"neighbours,{sessions}", "--out", tmp_path / "new"),
            f"neighbours holds out 1 items of a user and {sessions} holds out 2, so",
        ),
        ((f"neighbours,{tmp_path}", "--out", tmp_path / "new"), f"{tmp_path} holds no trained mod"),
    ):
        outcome = maskgr("compare", shop, "--models", *words)
        assert outcome.code == 2
        assert outcome.err.startswith(f"error: {expected}"), outcome.err
    assert not commands
    assert not (tmp_path / "new").exists()


def test_preset_is_for_the_models_that_have_a_choice() -> None:
    found = entries(["popularity", "sasrec", "sasrec:published"], preset="tiny", minutes=3)
    assert [entry.jobs[0].preset for entry in found] == ["cpu", "tiny", "published"]
    assert [entry.jobs[0].config.fit.minutes for entry in found] == [3, 3, 3]


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def wait_for(condition: Callable[[], object], seconds: float = 600) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds processes in /proc")
def test_killed_comparison_leaves_no_process_and_goes_on_to_the_same_table(
    maskgr: Callable[..., Outcome], shop: Path, tmp_path: Path, commands: list[list[str]]
) -> None:
    # A checkpoint after every step, and too many steps to end before the kill.
    slow = ("--set", "fit.steps=120", "--set", "checkpoint_minutes=0", "--set", "validations=1")
    words = ["compare", str(shop), "--models", "neighbours,sasrec:tiny", *slow, "--out"]
    killed = tmp_path / "killed"
    process = subprocess.Popen(
        [sys.executable, "-m", "maskgr", *words, str(killed)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    training = []
    try:
        wait_for(lambda: any(killed.glob("runs/sasrec-*/training/checkpoints/0*")))
        training = children(process.pid)
        assert len(training) == 1
        process.kill()
        process.wait()
        wait_for(lambda: not is_alive(training[0]), seconds=60)
    finally:
        process.kill()
        process.wait()
        for pid in filter(is_alive, training):
            os.kill(pid, signal.SIGKILL)
    assert not any(killed.glob("runs/sasrec-*/recommender"))
    partial = json.loads((killed / "comparison.json").read_text())
    assert [row["model"] for row in partial["models"]] == ["neighbours"]
    assert partial["missing"] == ["sasrec:tiny", "popularity"]

    went_on = json.loads(maskgr(*words, killed, "--json").out)
    assert ["--resume" in command for command in commands] == [True, False]
    whole = json.loads(maskgr(*words, tmp_path / "whole", "--json").out)
    assert figures(went_on) == figures(whole)
    assert went_on["models"][0] == partial["models"][0]  # not measured again
