"""The loop on a toy whose optimum is known, and on MaskGR killed, resumed and distributed."""

from __future__ import annotations

import contextlib
import random
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from maskgr.data.splits import Holdout
from maskgr.errors import ArtefactError, RequestError
from maskgr.training.batches import Batches
from maskgr.training.checkpoint import load_checkpoint
from maskgr.training.fit import Batch, FitConfig
from maskgr.training.log import read_log
from tests.training.toy import HOLDOUT, SEQUENCES, Toy, start, train_maskgr, train_toy


@pytest.fixture(autouse=True)
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The runs that a plot was asked for: drawing one takes longer than training a toy."""
    runs: list[Path] = []
    monkeypatch.setattr("maskgr.training.fit.draw", runs.append)
    return runs


def test_learns_the_distribution_and_logs_it(tmp_path: Path, drawn: list[Path]) -> None:
    truth = np.bincount(SEQUENCES.values) / len(SEQUENCES.values)

    def agreement(toy: Toy, holdout: Holdout) -> float:
        return -float((toy.logits.softmax(0) - torch.from_numpy(truth)).abs().sum())

    toy = Toy(on_validate=agreement)
    train_toy(tmp_path, toy, steps=200, learning_rate=0.1, clip=100, warmup=0.1)
    assert toy.logits.softmax(0).tolist() == pytest.approx(truth.tolist(), abs=0.03)
    rows = read_log(tmp_path)
    losses = [row["loss"] for row in rows if row["loss"] is not None]
    entropy = -(truth * np.log(truth)).sum()
    assert losses[0] > losses[-1]
    assert losses[-1] == pytest.approx(entropy, abs=0.1)
    assert [row["step"] for row in rows if row["recall@10"] is not None] == [50, 100, 150, 200]
    assert drawn == [tmp_path]


def test_held_out_and_training_figures_are_logged_apart(tmp_path: Path) -> None:
    def recall(toy: Toy, holdout: Holdout) -> float:
        return 0.25 if np.array_equal(holdout.users, HOLDOUT.users) else 0.75

    train_toy(tmp_path, Toy(on_validate=recall))
    rows = [row for row in read_log(tmp_path) if row["recall@10"] is not None]
    assert [(row["recall@10"], row["training_recall@10"]) for row in rows] == [(0.25, 0.75)] * 4


@pytest.mark.parametrize("piece_tokens", [None, 7])
def test_accumulated_batches_and_pieces_equal_one_large_batch(
    tmp_path: Path, piece_tokens: int | None
) -> None:
    def train(name: str, piece_tokens: int | None, **settings: int) -> torch.Tensor:
        gradients: list[torch.Tensor] = []
        toy = Toy(on_validate=lambda toy, _: gradients.append(toy.logits.grad) or 0.5)
        toy.piece_tokens = piece_tokens
        train_toy(tmp_path / name, toy, steps=1, warmup=0.0, **settings)
        return gradients[0]

    # All forty sequences in one batch, or in several: the same gradient either way.
    parts = len(Batches(SEQUENCES, 5, 25).epoch(0))
    assert parts > 3
    many = train("many", piece_tokens, token_budget=25, accumulate=parts)
    torch.testing.assert_close(train("one", None, token_budget=100), many)


def test_best_network_is_kept_and_patience_stops(tmp_path: Path) -> None:
    recalls, seen = iter([0.1, 0.4, 0.3, 0.2, 0.9]), []

    def recall(toy: Toy, holdout: Holdout) -> float:
        if toy.training or len(holdout.users) != len(HOLDOUT.users):
            return 0.0  # training items
        seen.append(toy.logits.detach().clone())
        return next(recalls)

    toy = Toy(on_validate=recall)
    found = train_toy(tmp_path, toy, steps=100, validations=10, patience=2)
    assert torch.equal(toy.logits, seen[1])
    assert not torch.equal(toy.logits, seen[0])
    assert found == {"recall@10": 0.9}  # asked again of the best network, after two in vain
    kept = load_checkpoint(tmp_path)
    assert kept is not None
    assert kept.state["best"] == pytest.approx(0.4)
    assert (kept.state["best_step"], kept.step) == (20, 40)


def test_resuming_takes_the_best_network_from_the_checkpoint(tmp_path: Path) -> None:
    train_toy(tmp_path, toy := Toy())
    best = tmp_path / "best.safetensors"
    content = best.read_bytes()
    best.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))  # nothing would notice
    train_toy(tmp_path, again := Toy(), resume=True)
    assert torch.equal(again.logits, toy.logits)
    assert best.read_bytes() == content


def test_averaged_weights_are_validated_and_kept(tmp_path: Path) -> None:
    before: list[torch.Tensor] = []
    validated: list[torch.Tensor] = []
    toy = Toy(
        on_forward=lambda toy: before.append(toy.logits.detach().clone()),
        on_validate=lambda toy, _: validated.append(toy.logits.detach().clone()) or 0.5,
    )
    train_toy(tmp_path, toy, steps=30, ema=0.5, learning_rate=0.5, validations=1)
    found = load_checkpoint(tmp_path)
    assert found is not None
    average, last = before[1], found.tensors["network.logits"]
    for count, current in enumerate([*before[2:], last], start=1):
        decay = min(0.5, (1 + count) / (10 + count))  # quicker in the first steps
        average = decay * average + (1 - decay) * current
    torch.testing.assert_close(validated[0], average)
    torch.testing.assert_close(toy.logits.detach(), average)
    assert not torch.allclose(average, last, atol=1e-3)


def test_without_averaging_the_network_itself_is_validated(tmp_path: Path) -> None:
    validated: list[int] = []
    toy = Toy(on_validate=lambda toy, _: validated.append(id(toy)) or 0.5)
    train_toy(tmp_path, toy, ema=0.0)
    assert set(validated) == {id(toy)}


class Clock:
    """Time that passes only where a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("maskgr.training.fit.time", SimpleNamespace(perf_counter=made))
    return made


def timed(run: Path, clock: Clock, minutes: float, user_seconds: float) -> tuple[int, float, int]:
    """The steps of a timed run with steps of a second, the seconds of its validations before the
    last step, and the number of its validations."""
    steps, spent = [0], []

    def step(toy: Toy) -> None:
        steps[0] += 1
        clock.now += 1

    def recall(toy: Toy, holdout: Holdout) -> float:
        clock.now += user_seconds * len(holdout.users)
        spent.append((steps[0], user_seconds * len(holdout.users)))
        return 0.5

    train_toy(
        run, Toy(step, recall), minutes=minutes, validations=20, token_budget=20,
        validation_users=16, steps=10**9,
    )  # fmt: skip
    rows = [row for row in read_log(run) if row["recall@10"] is not None]
    early = sum(seconds for at, seconds in spent if at < steps[0])
    return steps[0], early, len(rows)


def test_timed_run_keeps_its_minutes_and_the_schedule_reaches_its_end(
    tmp_path: Path, clock: Clock
) -> None:
    begun = clock.now
    steps, _, validations = timed(tmp_path, clock, minutes=4, user_seconds=0.0)
    assert steps == pytest.approx(240, abs=2)
    assert clock.now - begun == pytest.approx(240, abs=2)
    assert validations == 20
    rates = [row["learning_rate"] for row in read_log(tmp_path) if row["learning_rate"] is not None]
    assert rates[-1] < 0.05 * max(rates)


@pytest.mark.parametrize("minutes", [0.5, 1, 4])
def test_timed_run_is_not_spent_on_validation(tmp_path: Path, clock: Clock, minutes: float) -> None:
    """A validation asks ten users, and takes 20 seconds."""
    steps, spent, validations = timed(tmp_path, clock, minutes, user_seconds=2.0)
    assert spent <= 0.1 * 60 * minutes + 2.0  # the last: a user that tells what it costs
    assert steps >= 0.85 * 60 * minutes
    assert 1 <= validations <= 1 + 0.1 * 60 * minutes / 20


def test_run_of_given_steps_makes_all_its_validations(tmp_path: Path, clock: Clock) -> None:
    def recall(toy: Toy, holdout: Holdout) -> float:
        clock.now += 1000
        return 0.5

    train_toy(tmp_path, Toy(on_validate=recall), steps=40, validations=8)
    rows = [row["step"] for row in read_log(tmp_path) if row["recall@10"] is not None]
    assert rows == [5, 10, 15, 20, 25, 30, 35, 40]


@pytest.fixture
def hearing() -> Iterator[None]:
    """Ctrl-C is heard, also where the tests run in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("hearing")
def test_interrupted_run_finishes_its_step_and_resumes_as_if_never_stopped(tmp_path: Path) -> None:
    calls = [0]

    def interrupt(toy: Toy) -> None:
        calls[0] += 1
        if calls[0] == 23:  # in the midst of the 23rd step, which is finished first
            signal.raise_signal(signal.SIGINT)

    whole, rest = Toy(), Toy()
    train_toy(tmp_path / "whole", whole, steps=60, ema=0.9)
    with pytest.raises(KeyboardInterrupt):
        train_toy(tmp_path / "part", Toy(on_forward=interrupt), steps=60, ema=0.9)
    with pytest.raises(KeyboardInterrupt):  # heard at once again
        signal.raise_signal(signal.SIGINT)
    stopped = load_checkpoint(tmp_path / "part")
    assert stopped is not None
    assert stopped.step == calls[0] == 23
    train_toy(tmp_path / "part", rest, resume=True, steps=60, ema=0.9)
    assert torch.equal(whole.logits, rest.logits)
    timeless = [
        [{k: v for k, v in row.items() if "second" not in k} for row in read_log(tmp_path / name)]
        for name in ("whole", "part")
    ]
    # The loss is averaged over the steps since the last row, so the row after the stop differs.
    assert [r["step"] for r in timeless[0]] == [r["step"] for r in timeless[1]]
    assert timeless[0][-1] == timeless[1][-1]


def test_finished_run_resumes_without_training(tmp_path: Path) -> None:
    first = Toy()
    train_toy(tmp_path, first)
    steps: list[Toy] = []
    again = Toy(on_forward=steps.append)
    nn.init.zeros_(again.logits)
    train_toy(tmp_path, again, resume=True)
    assert not steps
    assert torch.equal(first.logits, again.logits)


def test_rows_of_a_run_without_a_checkpoint_are_dropped(tmp_path: Path) -> None:
    def stop(toy: Toy, holdout: Holdout) -> float:
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        train_toy(tmp_path, Toy(on_validate=stop), steps=40, validations=1)
    assert [row["step"] for row in read_log(tmp_path)] == [1, 10, 20, 30, 40]
    train_toy(tmp_path, Toy(), steps=20, validations=1)
    assert [row["step"] for row in read_log(tmp_path)] == [1, 10, 20, 20]


class WithData(Toy):
    """Has a buffer that is made anew when weights are loaded, as the basis of texts is."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("data", torch.ones(3), persistent=False)
        self.register_load_state_dict_post_hook(lambda module, _: module.make())

    def make(self) -> None:
        self.data = torch.ones(3)


@pytest.mark.usefixtures("hearing")
def test_average_shares_the_data_of_the_network_also_when_resumed(tmp_path: Path) -> None:
    places: list[int] = []

    def forward(toy: WithData) -> None:
        places.append(toy.data.data_ptr())
        if len(places) == 1:
            signal.raise_signal(signal.SIGINT)

    def validate(toy: WithData, holdout: Holdout) -> float:
        validated.append(toy.data.data_ptr() == places[-1])
        return 0.5

    for resume in (False, True):
        toy, validated = WithData(), []
        toy.on_forward, toy.on_validate = forward, validate
        with contextlib.suppress(KeyboardInterrupt):
            train_toy(tmp_path, toy, resume=resume, steps=4, validations=4, ema=0.9)
        assert all(validated[:2])  # of the average; the last are of the network with loaded weights
    assert len(places) == 4


class WithTable(Toy):
    """Its logits are looked up in a table with sparse gradients; a part of it is never learned."""

    def __init__(self, **calls: object) -> None:
        super().__init__(**calls)
        self.table = nn.Embedding(5, 1, sparse=True)
        self.fixed = nn.Linear(2, 2).requires_grad_(False)

    def forward(self, batch: Batch) -> torch.Tensor:
        items = torch.from_numpy(batch.sequences.values).long()
        return super().forward(batch) + self.table(items).square().sum()


@pytest.mark.usefixtures("hearing")
def test_large_tables_are_not_averaged_and_resume_to_the_bit(tmp_path: Path) -> None:
    def validate(toy: WithTable, holdout: Holdout) -> float:
        validated.append(toy)
        return 0.5

    def interrupt(toy: WithTable) -> None:
        if len(validated) == 2:
            signal.raise_signal(signal.SIGINT)

    validated: list[WithTable] = []
    whole, rest = WithTable(on_validate=validate), WithTable()
    train_toy(tmp_path / "whole", whole, steps=12, ema=0.9)
    average = validated[0]
    assert average is not whole
    assert average.table is whole.table
    assert average.fixed is whole.fixed
    assert average.logits is not whole.logits
    kept = load_checkpoint(tmp_path / "whole")
    assert kept is not None
    assert {n for n in kept.tensors if n.startswith("average.")} == {"average.logits"}
    validated.clear()
    stopped = WithTable(on_validate=validate, on_forward=interrupt)
    with pytest.raises(KeyboardInterrupt):
        train_toy(tmp_path / "part", stopped, steps=12, ema=0.9)
    train_toy(tmp_path / "part", rest, resume=True, steps=12, ema=0.9)
    for name, value in whole.state_dict().items():
        assert torch.equal(value, rest.state_dict()[name]), name


def test_last_validation_has_fewer_users_where_items_are_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[int] = []
    toy = Toy(on_validate=lambda toy, holdout: asked.append(len(holdout.users)) or 0.5)
    train_toy(tmp_path / "all", toy, validation_users=2)
    assert asked[-1] == len(HOLDOUT.users) == 6
    assert "all validation users" in capsys.readouterr().err
    for cells, users in ((20, 4), (1, 2)):  # of five items; never fewer than the other validations
        monkeypatch.setattr("maskgr.training.fit.LAST_CELLS", cells)
        train_toy(tmp_path / str(cells), toy, validation_users=2)
        assert asked[-1] == users
        assert f"{users} validation users" in capsys.readouterr().err


def test_of_equally_good_networks_the_last_is_kept(tmp_path: Path) -> None:
    validated: list[torch.Tensor] = []
    toy = Toy(on_validate=lambda toy, _: validated.append(toy.logits.detach().clone()) or 0.5)
    train_toy(tmp_path, toy, patience=2, validations=8)
    kept = load_checkpoint(tmp_path)
    assert kept is not None
    assert (kept.state["best_step"], kept.step) == (15, 15)  # two in vain after the first
    assert torch.equal(toy.logits, validated[-1])


def test_raises_when_the_checkpoint_is_of_another_network(tmp_path: Path) -> None:
    train_toy(tmp_path, Toy(), steps=2)
    with pytest.raises(ArtefactError, match="does not fit this network"):
        train_toy(tmp_path, Toy(items=7), resume=True)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("steps", 0), ("accumulate", 0), ("warmup", 1.0), ("ema", -0.1), ("clip", 0),
        ("learning_rate", np.nan), ("minutes", np.inf),
    ],
)  # fmt: skip
def test_raises_when_a_setting_is_out_of_range(name: str, value: float) -> None:
    with pytest.raises(RequestError, match=f"fit.{name} is {value}"):
        FitConfig(**{name: value})  # type: ignore[arg-type]


def test_raises_when_a_history_does_not_fit_the_token_budget(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"fit.token_budget is 4, .* has 5 tokens"):
        train_toy(tmp_path, Toy(), token_budget=4)


def test_killed_run_resumes_to_the_bits_of_one_that_was_not(tmp_path: Path) -> None:
    whole, run = start(train_maskgr, tmp_path / "whole", 0.2), tmp_path / "killed"
    whole.join(300)
    assert whole.exitcode == 0
    rng, kills = random.Random(0), 0
    for _ in range(3):
        before = set(run.glob("checkpoints/*"))
        process = start(train_maskgr, run, 0.2)
        while process.is_alive() and not set(run.glob("checkpoints/*")) - before:
            time.sleep(0.005)
        time.sleep(0.1 * rng.random())
        process.kill()
        process.join(300)
        kills += process.exitcode == -signal.SIGKILL
    assert kills
    last = start(train_maskgr, run, 0.2)
    last.join(300)
    assert last.exitcode == 0
    one, two = (tmp_path / name / "final.safetensors" for name in ("whole", "killed"))
    assert one.read_bytes() == two.read_bytes()


def test_two_processes_equal_one_up_to_rounding(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # Dropout differs between processes, so there is none.
    processes = [
        start(train_maskgr, tmp_path / "one", 0.0),
        *(start(train_maskgr, tmp_path / "two", 0.0, rank, 2, port) for rank in (0, 1)),
    ]
    for process in processes:
        process.join(300)
        assert process.exitcode == 0
    logs = [read_log(tmp_path / name) for name in ("one", "two")]
    for column in ("loss", "gradient_norm", "recall@10", "training_recall@10"):
        one, two = ([row[column] for row in rows if row[column] is not None] for rows in logs)
        assert one
        assert two == pytest.approx(one, rel=1e-3)
    one, two = (load_file(tmp_path / name / "final.safetensors") for name in ("one", "two"))
    for name in one:
        torch.testing.assert_close(one[name], two[name], atol=1e-4, rtol=1e-3)
