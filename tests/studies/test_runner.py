"""The runner: what it trains, reuses, resumes and keeps, and that it leaves no process behind."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import polars as pl
import pytest
from torch import nn

from maskgr.data.config import DataConfig, SyntheticConfig
from maskgr.data.dataset import Dataset
from maskgr.data.open import fetch
from maskgr.data.splits import leave_out
from maskgr.errors import RequestError
from maskgr.evaluation.metrics import recall
from maskgr.evaluation.protocol import evaluate
from maskgr.recommender import Recommender
from maskgr.studies import runner as module
from maskgr.studies.measures import Measure
from maskgr.studies.runner import Job, Runner, TrainingError, alone, run_bound
from maskgr.training.log import COLUMNS

NEIGHBOURS = Job("neighbours")


def test_same_training_is_found_again_and_a_changed_one_is_another_run(
    shop: Path, tmp_path: Path, commands: list[list[str]]
) -> None:
    runner = Runner.open(str(shop), tmp_path / "out")
    run = runner.train(NEIGHBOURS)
    assert Runner.open(str(shop), tmp_path / "out").train(Job("neighbours")) == run
    assert len(commands) == 1
    others = [
        Job("neighbours", settings=("most=5",)),
        Job("neighbours", seed=1),
        Job("neighbours", minutes=3),
        Job("popularity"),
    ]
    assert len({run, *map(runner.folder, others)}) == 5
    assert runner.load(runner.train(others[0])).config.model.most == 5
    assert runner.load(run).config.model.most == 128  # the first is as it was


def test_a_run_belongs_to_the_events_and_the_texts_that_it_was_trained_on(
    shop: Path, tmp_path: Path
) -> None:
    dataset = Dataset.load(shop)
    vectors = np.arange(60, dtype=np.float32).reshape(30, 2)
    folders = set()
    for other in (
        dataset,
        replace(dataset, histories=dataset.histories.last(4)),
        replace(dataset, items=dataset.items.with_columns(title=pl.lit("a title"))),
        replace(dataset, embeddings=vectors),
        replace(dataset, embeddings=vectors + 1),
    ):
        folders.add(Runner(tmp_path, "shop", other).folder(NEIGHBOURS))
    assert len(folders) == 5


def test_training_gets_every_setting_and_the_data_options(
    shop: Path, tmp_path: Path, commands: list[list[str]]
) -> None:
    config = DataConfig(k_core=2, repeats="drop")
    runner = Runner.open(str(shop), tmp_path / "out", config)
    job = Job("neighbours", "cpu", ("most=7", "sparsify=0.5"), minutes=2.5, seed=3, device="cpu")
    found = Recommender.load(runner.train(job))
    assert found.config == job.config
    assert (found.config.seed, found.config.fit.minutes, found.config.model.most) == (3, 2.5, 7)
    assert found.made["fingerprint"] == runner.dataset.fingerprint
    assert found.made["data_config"] == vars(config)


@pytest.mark.parametrize("minutes", [0, -1, float("nan")])
def test_raises_when_there_is_no_time_to_train(minutes: float) -> None:
    with pytest.raises(RequestError, match=r"leaves no time to train; give 0\.01 or more"):
        _ = Job("sasrec", minutes=minutes).config


def test_scores_are_those_of_an_evaluation_and_are_kept(
    shop: Path,
    tmp_path: Path,
    commands: list[list[str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    runner = Runner.open(str(shop), tmp_path / "out")
    run, measure = runner.train(NEIGHBOURS), Measure("validation", users=20, ks=(3,))
    found = runner.measure(run, measure)
    holdout = leave_out(runner.dataset.histories).validation.sample(20)
    ranker = Recommender.load(run).ranker()
    expected = evaluate(ranker, holdout, 30, ks=(3,))
    for protocol, values in expected.values.items():
        for name, own in values.items():
            np.testing.assert_array_equal(found.values[protocol][name], own)
    kept = next((tmp_path / "out" / "evaluations").iterdir()) / "users.parquet"
    frame = pl.read_parquet(kept)
    assert frame["user_id"].to_list() == runner.dataset.users.gather(holdout.users).to_list()
    items = Recommender.load(run).recommend(
        [runner.dataset.item_ids.gather(h).to_list() for h in holdout.histories],
        3,
        exclude_seen=False,
    )
    ids = np.array([[r.item_id for r in row] for row in items])
    targets = runner.dataset.item_ids.to_numpy()[holdout.targets]
    assert frame["all recall@3"].to_list() == recall(ids, targets, 3).tolist()

    def again(*_: object, **__: object) -> None:
        raise AssertionError("measured twice")

    with monkeypatch.context() as patch:
        patch.setattr(module, "measured", again)
        same = runner.measure(run, measure)
        assert same.users_per_second == found.users_per_second
        with pytest.raises(AssertionError, match="measured twice"):
            runner.measure(run, replace(measure, users=21))
    kept.write_bytes(b"damaged")
    assert runner.measure(run, measure).values["all"].keys() == found.values["all"].keys()
    assert "make the folder again; measuring again" in capsys.readouterr().err


def test_scores_belong_to_the_model_that_is_in_the_folder(
    shop: Path, tmp_path: Path, commands: list[list[str]]
) -> None:
    runner = Runner.open(str(shop), tmp_path / "out")
    run = runner.train(NEIGHBOURS)
    before = runner.measure(run, Measure())
    Recommender.train(runner.dataset, model="popularity").save(run / "recommender")
    after = runner.measure(run, Measure())
    assert before.config["name"] == "neighbours"
    assert after.config["name"] == "popularity"


def test_decoding_of_a_measure_is_used_and_named(shop: Path, tmp_path: Path) -> None:
    quick = ("fit.steps=2", "width=16", "heads=2", "codes=8", "levels=2", "layers=1")
    job = Job("maskgr", "tiny", quick)
    runner = Runner.open(str(shop), tmp_path / "out")
    Recommender.train(runner.dataset, config=job.config).save(tmp_path / "run")
    run = tmp_path / "run"
    found = runner.measure(run, Measure(protocols=("all",), decoding={"steps": 1}))
    assert list(found.values) == ["all"]
    assert found.decoding["steps"] == 1
    assert runner.measure(run, Measure(protocols=("all",))).decoding["steps"] == 2
    model = Recommender.load(run).model
    assert isinstance(model, nn.Module)
    assert found.parameters == sum(p.numel() for p in model.parameters()) > 0


def test_raises_when_a_run_is_of_other_data_or_not_finished(shop: Path, tmp_path: Path) -> None:
    other = fetch("synthetic", synthetic=SyntheticConfig(users=50, items=20))
    Recommender.train(other, model="popularity").save(tmp_path / "other")
    runner = Runner.open(str(shop), tmp_path / "out")
    with pytest.raises(RequestError, match="other was trained on other data than "):
        runner.measure(tmp_path / "other", Measure())
    with pytest.raises(module.ArtefactError, match="holds no trained model; finish its training"):
        runner.measure(tmp_path, Measure())


def test_minutes_of_a_resumed_training_have_its_earlier_parts(tmp_path: Path) -> None:
    for stage, seconds in (("history", 100.0), ("denoiser", 50.0)):
        folder = tmp_path / "training" / stage
        folder.mkdir(parents=True)
        header = ",".join(COLUMNS)
        folder.joinpath("log.csv").write_text(f"{header}\n1,0,{seconds},8,1,1,1,1,,,,\n")
    made = SimpleNamespace(made={"seconds": 30.0})  # since it was resumed
    assert module.training_minutes(tmp_path, made) == 2.5  # type: ignore[arg-type]
    assert module.training_minutes(tmp_path / "none", made) == 0.5  # type: ignore[arg-type]


def test_progress_tells_what_is_left(
    shop: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    runner = Runner.open(str(shop), tmp_path / "out")
    clock = [0.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: clock[0]))

    def train(own: Runner, job: Job) -> Path:
        clock[0] += 60 * (job.budget + 2)  # two minutes of other things
        if job.seed == 1:
            raise RequestError("no more memory")
        return own.folder(job)

    monkeypatch.setattr(Runner, "train", train)
    jobs = [Job("sasrec", minutes=40, seed=seed) for seed in range(3)]
    done = []
    with pytest.raises(TrainingError, match="1 of 3 trainings failed: no more memory"):
        done.extend(job for job, _ in runner.each_trained(jobs))
    assert done == [jobs[0], jobs[2]]  # a failure does not hold up the others
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "[1/3] sasrec, preset cpu, seed 0: training; at least 2 h 00 min left in all",
        "[2/3] sasrec, preset cpu, seed 1: training; about 1 h 24 min left in all",
        "error: no more memory",
        "[3/3] sasrec, preset cpu, seed 2: training; about 42 min left in all",
    ]


def test_failed_training_says_where_the_reason_is(shop: Path, tmp_path: Path) -> None:
    runner = Runner.open(str(shop), tmp_path / "out")
    for code, why in ((2, "the reason is above"), (-9, "signal 9 ended it")):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "run_bound", lambda _, code=code: code)
            with pytest.raises(RequestError, match=f"training neighbours, .* failed .{why}"):
                runner.train(NEIGHBOURS)


def test_two_processes_never_work_in_one_folder(tmp_path: Path) -> None:
    with alone(tmp_path / "out"):
        with (
            pytest.raises(RequestError, match=r"another process is at work in .*out; wait for it"),
            alone(tmp_path / "out"),
        ):
            pass
        with alone(tmp_path / "other"):
            pass
    with alone(tmp_path / "out"):
        pass


CHILD = """
import signal, sys, time
heard = []
signal.signal(signal.SIGINT, lambda *_: heard.append(1))
open(sys.argv[1], "w").close()
while not heard:
    time.sleep(0.01)
time.sleep(0.3)  # writes its checkpoint
open(sys.argv[1], "w").write(str(len(heard)))
"""


def test_ctrl_c_reaches_a_training_once_and_waits_for_its_checkpoint(tmp_path: Path) -> None:
    file = tmp_path / "heard"

    def interrupt() -> None:
        while not file.exists():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    # A shell that starts this in the background has it ignore Ctrl-C.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        run_bound([sys.executable, "-c", CHILD, str(file)])
    thread.join()
    signal.signal(signal.SIGINT, before)
    assert file.read_text() == "1"


def test_exit_code_of_a_command_is_returned() -> None:
    assert run_bound([sys.executable, "-c", "raise SystemExit(7)"]) == 7
