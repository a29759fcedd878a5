"""The loop on a toy whose optimum is known, and on MaskGR killed, resumed and distributed."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from maskgr.config import LoopConfig
from maskgr.data.sequences import Sequences
from maskgr.errors import ArtefactError, RequestError
from maskgr.models.stages import FIRST
from maskgr.training.batches import Batches
from maskgr.training.distributed import World, processes_for
from maskgr.training.fit import Trainer
from maskgr.training.log import RunLog, read_log
from tests.conftest import Outcome

HERE = World(0, 1, torch.device("cpu"))
SEQUENCES = Sequences.of([[n % 5] * (1 + n % 4) for n in range(40)])


class Toy:
    """Learns how often each of five items occurs; its loss is the cross-entropy."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.network: nn.Module = nn.Sequential(nn.Embedding(1, 5))
        self.kept: list[float] = []
        self.recalls: list[float] = []
        self.bounds: list[float] = []
        self.by_bound = False

    def prepare(self, batch: Sequences, seed: int) -> tuple[list[Sequences], float]:
        halves = np.array_split(np.arange(len(batch)), 2)
        return [batch.select(half) for half in halves], float(len(batch.values))

    def loss(self, piece: Sequences) -> Tensor:
        items = torch.from_numpy(piece.values).long()
        log_probs = self.network(torch.zeros(1, dtype=torch.int64)).log_softmax(-1)[0]
        total: Tensor = -log_probs[items].sum()
        return total

    def tokens(self, batch: Sequences) -> int:
        return len(batch.values)

    def validate(self, *, everyone: bool) -> dict[str, float]:
        recall = self.recalls.pop(0) if self.recalls else 0.5
        return {"recall@10": recall, "bound": self.bounds.pop(0) if self.bounds else 1.0}

    def score(self, found: dict[str, float]) -> float:
        return -found["bound"] if self.by_bound else found["recall@10"]

    def keep(self, run: Path) -> None:
        self.kept.append(sum(float(p.detach().sum()) for p in self.network.parameters()))

    def restore(self, run: Path) -> None: ...


def trainer(run: Path, task: Toy | None = None, **config: float) -> Trainer:
    settings = replace(LoopConfig(steps=40, token_budget=20, validations=4), **config)  # type: ignore[arg-type]
    batches = Batches(SEQUENCES, 5, settings.token_budget)
    log = RunLog(run)
    log.__enter__()
    return Trainer(task or Toy(), batches, settings, run, HERE, log)


def test_it_learns_and_tells(tmp_path: Path) -> None:
    toy = Toy()
    trainer(tmp_path, toy, steps=300, learning_rate=0.1, clip=100, warmup=0.1).train()
    learned = toy.network(torch.zeros(1, dtype=torch.int64)).softmax(-1)[0]
    truth = np.bincount(SEQUENCES.values) / len(SEQUENCES.values)
    assert learned.tolist() == pytest.approx(truth.tolist(), abs=0.03)
    rows = read_log(tmp_path)
    losses = [row["loss"] for row in rows if row["loss"] is not None]
    entropy = -(truth * np.log(truth)).sum()
    assert losses[0] > losses[-1]
    assert losses[-1] == pytest.approx(entropy, abs=0.1)
    assert [row["step"] for row in rows if row["recall@10"] is not None] == [75, 150, 225, 300]


def test_accumulated_batches_are_one_large_batch(tmp_path: Path) -> None:
    toys = [Toy(), Toy()]
    # All forty sequences in one batch, or in five: the same gradient either way.
    one = trainer(tmp_path / "a", toys[0], steps=1, token_budget=100, warmup=0.0)
    parts = len(Batches(SEQUENCES, 5, 25).epoch(0))
    many = trainer(tmp_path / "b", toys[1], steps=1, token_budget=25, accumulate=parts, warmup=0.0)
    one.train()
    many.train()
    for a, b in zip(toys[0].network.parameters(), toys[1].network.parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        torch.testing.assert_close(a.grad, b.grad)


def test_the_best_is_kept_and_patience_ends(tmp_path: Path) -> None:
    toy = Toy()
    toy.recalls = [0.1, 0.4, 0.3, 0.2, 0.9]
    run = trainer(tmp_path, toy, steps=100, validations=10, patience=2)
    run.train()
    assert len(toy.kept) == 2  # at 0.1 and at 0.4
    assert (run.state.best, run.state.best_step, run.state.step) == (0.4, 20, 40)


def test_the_best_is_what_the_task_says(tmp_path: Path) -> None:
    toy = Toy()
    toy.by_bound, toy.recalls, toy.bounds = True, [0.4, 0.3, 0.2], [8.5, 8.0, 8.2]
    run = trainer(tmp_path, toy, steps=30, validations=3)
    run.train()
    assert len(toy.kept) == 2
    assert (run.state.best, run.state.best_step) == (-8.0, 20)


def test_averaged_weights_are_what_is_validated(tmp_path: Path) -> None:
    run = trainer(tmp_path, steps=20, ema=0.9, learning_rate=0.5)
    run.train()
    own = [p.detach().clone() for p in run.task.network.parameters()]
    with run.averaged():
        inside = [p.detach().clone() for p in run.task.network.parameters()]
        assert torch.equal(inside[0], next(iter(run.average.values())))
    assert not torch.equal(own[0], inside[0])
    assert torch.equal(own[0], next(run.task.network.parameters()))


def test_minutes_are_kept_and_the_schedule_reaches_its_end(tmp_path: Path) -> None:
    run = trainer(tmp_path, minutes=0.02, steps=10**9)
    start = time.perf_counter()
    run.train()
    assert time.perf_counter() - start < 30  # it ends at all; how precisely is the machine's affair
    rows = [row for row in read_log(tmp_path) if row["learning_rate"] is not None]
    assert rows[-1]["learning_rate"] < 0.5 * max(row["learning_rate"] for row in rows)
    assert run.state.step >= 8
    assert run.state.validated_step == run.state.step  # also where the time was over before


@pytest.fixture
def hearing() -> Iterator[None]:
    """Ctrl-C is heard, also where the tests run in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("hearing")
def test_resumed_is_as_if_never_stopped(tmp_path: Path) -> None:
    whole, first, second = Toy(), Toy(), Toy()
    trainer(tmp_path / "whole", whole, steps=60).train()
    part = trainer(tmp_path / "part", first, steps=60)
    update = part._update_average

    def interrupted(step: int) -> None:
        if step == 22:  # in the midst of the 23rd step, which is finished first
            signal.raise_signal(signal.SIGINT)
        update(step)

    part._update_average = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        part.train()
    with pytest.raises(KeyboardInterrupt):  # heard at once again
        signal.raise_signal(signal.SIGINT)
    rest = trainer(tmp_path / "part", second, steps=60)
    assert rest.resume()
    assert rest.state.step == 23
    rest.train()
    for a, b in zip(whole.network.parameters(), second.network.parameters(), strict=True):
        assert torch.equal(a, b)
    timeless = [
        [{k: v for k, v in row.items() if "second" not in k} for row in read_log(tmp_path / name)]
        for name in ("whole", "part")
    ]
    # The loss is averaged over the steps since the last row, so the row after the stop differs.
    assert [r["step"] for r in timeless[0]] == [r["step"] for r in timeless[1]]
    assert timeless[0][-1] == timeless[1][-1]


def test_a_checkpoint_of_another_network_is_refused(tmp_path: Path) -> None:
    trainer(tmp_path, steps=2).train()
    other = Toy()
    other.network = nn.Sequential(nn.Embedding(1, 7))
    with pytest.raises(ArtefactError, match="does not fit this network"):
        trainer(tmp_path, other).resume()


@pytest.mark.parametrize(
    ("name", "value"),
    [("steps", 0), ("accumulate", 0), ("warmup", 1.0), ("ema", -0.1), ("learning_rate", np.nan)],
)
def test_impossible_settings(tmp_path: Path, name: str, value: float) -> None:
    with pytest.raises(RequestError, match=f"{name} is {value}; it must be"):
        trainer(tmp_path, **{name: value})


# --- MaskGR itself, as a user runs it

SMALL = {
    "steps": 24, "token_budget": 600, "validations": 3, "checkpoint_minutes": 0,
    "layers": 1, "width": 16, "heads": 2, "hidden": 32, "levels": 2, "codes": 8,
}  # fmt: skip


def command(shop: Path, run: Path, *more: str) -> list[str]:
    words = ["train", str(shop), "--preset", "tiny", "--out", str(run), *more]
    return [*words, *(word for k, v in SMALL.items() for word in ("--set", f"{k}={v}"))]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from maskgr.data.config import SyntheticConfig
    from maskgr.data.open import fetch

    folder = tmp_path_factory.mktemp("data") / "shop"
    fetch("synthetic", synthetic=SyntheticConfig(users=120, items=40)).save(folder)
    return folder


def weights(run: Path) -> bytes:
    return (run / "recommender" / "network.safetensors").read_bytes()


def checkpoints(run: Path) -> set[Path]:
    """Of all stages."""
    return set(run.glob("training/checkpoints/*")) | set(run.glob("training/*/checkpoints/*"))


STAGES = [
    "network.attention=causal", "network.history=pooled", "network.history_layers=1",
    "dense.table=learned", "dense.text_input=true", "dense.repeat_bias=true", "collaborative=0.5",
    # With k-means a rounding error can decide on an item's cluster, and on all that follows.
    "quantizer=random", "unique=reassign",
    "objective.distil=0.5", "objective.catalogue_aware=true", "objective.copies=2",
]  # fmt: skip


@pytest.mark.parametrize("settings", [[], STAGES], ids=["one stage", "two"])
def test_killed_at_random_and_resumed_equals_uninterrupted(
    shop: Path, tmp_path: Path, settings: list[str]
) -> None:
    words = [word for setting in settings for word in ("--set", setting)]

    def start(run: Path, *more: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", "maskgr", *command(shop, run, *words, *more)],
            env=environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    assert start(tmp_path / "whole").wait() == 0
    rng, run = random.Random(0), tmp_path / "killed"
    begun, kills = False, 0
    for _ in range(3):
        process = start(run, *(["--resume"] if begun else []))
        before = checkpoints(run)
        while process.poll() is None:  # until it gets somewhere, then a little longer
            begun = begun or (run / "training" / "run.json").exists()
            if checkpoints(run) - before:
                break
            time.sleep(0.01)
        time.sleep(0.1 * rng.random())
        kills += process.poll() is None
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert kills
    assert start(run, "--resume").wait() == 0
    assert weights(run) == weights(tmp_path / "whole")


TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.mark.parametrize(
    ("start", "end", "settings"),
    [(TORCHRUN, [], []), ([], ["--processes", "2"], STAGES)],
    ids=["torchrun", "processes"],
)
def test_two_processes_do_what_one_does(
    shop: Path, tmp_path: Path, start: list[str], end: list[str], settings: list[str]
) -> None:
    still = ["dropout=0", *settings]  # dropout differs between processes
    words = [word for setting in still for word in ("--set", setting)]
    for name, before, after in (("one", [], []), ("two", start, end)):
        done = subprocess.run(
            [
                *(sys.executable, *before, "-m", "maskgr"),
                *(*command(shop, tmp_path / name, *words), *after),
            ],
            timeout=120,
            env=environment(),
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("trained maskgr") == 1  # one writer
    folders = ["training", f"training/{FIRST}"] if settings else ["training"]
    for folder in folders:
        one, two = (read_log(tmp_path / name / folder) for name in ("one", "two"))
        columns = ["loss", "gradient_norm", "recall@10"]
        for column in columns if folder != "training" else [*columns, "bound"]:
            values = [[r[column] for r in rows if r[column] is not None] for rows in (one, two)]
            assert values[0]
            assert values[1] == pytest.approx(values[0], rel=1e-2)


def test_a_companion_that_stops_is_told(shop: Path, tmp_path: Path) -> None:
    script = (
        "from maskgr.training.distributed import companions, world\n"
        "import sys\n"
        "with companions(2, [sys.executable, '-c', 'raise SystemExit(7)']):\n"
        "    with world('cpu'): print('never')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "a process that trains with this one stopped (exit code 7)" in done.stderr
    assert "never" not in done.stdout


def test_how_many_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 16)
    assert processes_for(90, "cpu") == 4
    assert processes_for(1, "cpu") == 1  # not worth it
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert processes_for(90, "cpu") == 1  # torchrun has started them


def test_a_run_is_resumed_with_the_ids_it_was_given(
    shop: Path, tmp_path: Path, maskgr: Callable[..., Outcome]
) -> None:
    for seed in (0, 1):
        words = ("sids", shop, "--out", tmp_path / f"sids{seed}", "--quantizer", "random")
        assert maskgr(*words, "--levels", 2, "--codes", 8, "--seed", seed).code == 0
    train, own = command(shop, tmp_path / "run"), ("--sids", tmp_path / "sids0")
    assert maskgr(*train, *own).code == 0
    for other in ((), ("--sids", tmp_path / "sids1")):
        outcome = maskgr(*train, "--resume", *other)
        assert outcome.code == 2
        assert "was started with other --sids; use those it was started with" in outcome.err
    assert maskgr(*train, "--resume", *own).code == 0
