"""The training loop of every network here: budget, schedule, averaging, validation, resuming.

Nothing random is carried from step to step: batches follow from (seed, epoch), noise and dropout
from (seed, step). So a run that was killed and resumed ends with the bits of one that was not.
"""

from __future__ import annotations

import contextlib
import math
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from maskgr.config import LoopConfig
from maskgr.data.sequences import Sequences
from maskgr.devices import keep_freed_memory
from maskgr.errors import ArtefactError, RequestError
from maskgr.nn.optimizer import build_optimizer, clip_gradients, schedule
from maskgr.training.batches import Batches, Place
from maskgr.training.checkpoint import load_checkpoint, save_checkpoint
from maskgr.training.distributed import World
from maskgr.training.log import RunLog

PROBE = 8  # steps after which the speed is first known well enough to fit the schedule to it


class Task(Protocol):
    """What is trained: a network, its loss, and how good it is."""

    network: nn.Module

    def prepare(self, batch: Sequences, seed: int) -> tuple[list[Any], float]:
        """This process's share of `batch` in pieces, with all randomness from `seed`, and what
        the sum of all processes' losses is to be divided by."""
        ...

    def loss(self, piece: Any) -> Tensor:
        """The summed loss of a piece."""
        ...

    def tokens(self, batch: Sequences) -> int:
        """The tokens of the whole batch."""
        ...

    def validate(self, *, everyone: bool) -> dict[str, float]:
        """`recall@10`, what `score` needs and whatever else is worth a column, of the network as it
        is."""
        ...

    def score(self, found: dict[str, float]) -> float:
        """How good what `validate` found is: the network with the highest is kept."""
        ...

    def keep(self, run: Path) -> None:
        """Saves the network as it is: the best so far."""
        ...

    def restore(self, run: Path) -> None:
        """Takes the network back from what `keep` saved."""
        ...


@dataclass(frozen=True)
class State:
    """All that a checkpoint says beside the tensors."""

    step: int = 0
    place: Place = field(default_factory=Place)
    total: int = 0  # steps that the schedule is made for
    seconds: float = 0.0
    tokens: int = 0
    best: float | None = None  # the task's score
    best_step: int = 0
    waited: int = 0  # validations since the best
    validated: int = 0  # of the validations that the schedule has, those reached
    validated_step: int = 0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, values: dict[str, Any]) -> State:
        return cls(**{**values, "place": Place(**values["place"])})


@dataclass
class Trainer:
    """The moving parts, for as long as training lasts."""

    task: Task
    batches: Batches
    config: LoopConfig
    run: Path
    world: World
    log: RunLog
    state: State = field(default_factory=State)

    def __post_init__(self) -> None:
        _check(self.config)
        network = self.task.network
        self.optimizer = build_optimizer(
            network, self.config.learning_rate, self.config.weight_decay
        )
        self.average = {n: p.detach().clone() for n, p in network.named_parameters()}
        self.wrapped = self.world.wrap(_Forward(self.task))
        self.saved_at = time.perf_counter()

    def train(self) -> dict[str, float]:
        """To the end of the budget; returns the full validation of the best network."""
        keep_freed_memory()
        start = time.perf_counter() - self.state.seconds
        if not self.state.total:
            # Of a timed run nothing is known yet: a number that the first steps are the start of.
            steps = 1000 * PROBE if self.config.minutes else self.config.steps
            self.state = replace(self.state, total=steps)
        stream = self.batches.from_place(self.state.place)
        with _interrupts() as interrupted:
            while not (self._finished(start) or self.world.agree(interrupted.is_set())):
                self._step(list(islice(stream, self.config.accumulate)))
                self._fit_schedule(time.perf_counter() - start)
                if self._due():
                    self._validate()
                self.state = replace(self.state, seconds=time.perf_counter() - start)
                self._checkpoint()
            if self.world.agree(interrupted.is_set()):
                self._checkpoint(now=True)
                raise KeyboardInterrupt
        return self._finish()

    def _step(self, micro: list[tuple[Place, Sequences]]) -> None:
        step, world = self.state.step, self.world
        factor = schedule(step, self.state.total, math.ceil(self.config.warmup * self.state.total))
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.learning_rate * factor
        self.task.network.train()
        self.optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), device=world.device)
        weight, pieces = 0.0, []
        for number, (_, batch) in enumerate(micro):
            share, tokens = self.task.prepare(batch, _mix(self.batches.seed, step, number))
            pieces += share
            weight += tokens
        # Dropout differs between processes; all else is drawn alike.
        torch.manual_seed(_mix(self.batches.seed, step, world.rank, -1))
        for number, piece in enumerate(pieces):
            with self._apart(last=number + 1 == len(pieces)):
                loss = self.wrapped(piece)
                loss.backward()
            total += loss.detach()
        # DistributedDataParallel averages over processes, and the sum over all is wanted. It is
        # divided only now, since what it is divided by is the sum over all batches of the step.
        gradients = [p.grad for p in self.task.network.parameters() if p.grad is not None]
        torch._foreach_mul_(gradients, world.size / weight)
        norm = clip_gradients(self.task.network, self.config.clip)
        self.optimizer.step()
        self._update_average(step)
        seen = self.state.tokens + sum(self.task.tokens(batch) for _, batch in micro)
        self.state = replace(self.state, step=step + 1, place=micro[-1][0], tokens=seen)
        loss = world.total(total) / weight
        self.log.step(self.state, loss, norm, self.config.learning_rate * factor)

    def _apart(self, *, last: bool) -> contextlib.AbstractContextManager[None]:
        """Processes exchange gradients once a step, with the last piece."""
        if last or not isinstance(self.wrapped, nn.parallel.DistributedDataParallel):
            return contextlib.nullcontext()
        return self.wrapped.no_sync()

    def _update_average(self, step: int) -> None:
        # The average of the first steps would otherwise be mostly the random start.
        decay = min(self.config.ema, (1 + step) / (10 + step))
        with torch.no_grad():
            own: list[Tensor] = list(self.task.network.parameters())
            torch._foreach_lerp_(list(self.average.values()), own, 1 - decay)

    def _fit_schedule(self, seconds: float) -> None:
        """The number of steps that fits the minutes, looked at again as the run goes on."""
        step = self.state.step
        powers = step >= PROBE and step & (step - 1) == 0
        if self.config.minutes and (powers or self._due()):
            fitting = int(step * 60 * self.config.minutes / max(seconds, 1e-9))
            total = self.world.agree(max(step, fitting))
            self.state = replace(self.state, total=total)

    def _due(self) -> bool:
        """Evenly over the steps, however often their number is fitted anew."""
        state = self.state
        reached = state.step * self.config.validations // state.total
        return reached > state.validated or state.step == state.total

    def _validate(self) -> None:
        with self.averaged():
            found = self.task.validate(everyone=False)
            score = self.task.score(found)
            better = self.state.best is None or score > self.state.best
            if better and self.world.writes:
                self.task.keep(self.run)
        reached = self.state.step * self.config.validations // self.state.total
        state = replace(self.state, waited=self.state.waited + 1, validated=reached)
        state = replace(state, validated_step=state.step)
        if better:
            state = replace(state, best=score, best_step=state.step, waited=0)
        self.state = state
        self.log.validation(self.state, found)

    def _finished(self, start: float) -> bool:
        state, config = self.state, self.config
        late = bool(config.minutes) and time.perf_counter() - start >= 60 * config.minutes
        bored = 0 < config.patience <= state.waited
        return bool(self.world.agree(int(state.step >= state.total or late or bored)))

    def _finish(self) -> dict[str, float]:
        if self.state.validated_step < self.state.step:  # the time was over before its end
            self._validate()
        self._checkpoint(now=True)
        self.world.wait()
        self.task.restore(self.run)
        return self.task.validate(everyone=True)

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """The network with the averaged weights for the length of the block."""
        if not self.config.ema:
            yield
            return
        own = {n: p.detach().clone() for n, p in self.task.network.named_parameters()}
        _copy(self.average, self.task.network)
        try:
            yield
        finally:
            _copy(own, self.task.network)

    def _checkpoint(self, *, now: bool = False) -> None:
        due = time.perf_counter() - self.saved_at >= 60 * self.config.checkpoint_minutes
        if self.world.writes and (due or now):
            save_checkpoint(self.run, self.state.step, self.state.to_dict(), self._tensors())
            self.saved_at = time.perf_counter()

    def _tensors(self) -> dict[str, Tensor]:
        tensors = {f"average.{name}": value for name, value in self.average.items()}
        state = self.task.network.state_dict()
        tensors |= {f"network.{name}": value for name, value in state.items()}
        for name, parameter in self.task.network.named_parameters():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                tensors[f"optimizer.{key}.{name}"] = value
        return tensors

    def resume(self) -> bool:
        """Goes back to the newest whole checkpoint; False if there is none."""
        found = load_checkpoint(self.run)
        if found is None:
            return False
        network = self.task.network
        try:
            network.load_state_dict(
                {name: found.tensors[f"network.{name}"] for name in network.state_dict()}
            )
            with torch.no_grad():
                for name, parameter in network.named_parameters():
                    self.average[name].copy_(found.tensors[f"average.{name}"])
                    self.optimizer.state[parameter] = {
                        # AdamW counts its steps on the CPU.
                        key: value.clone() if key == "step" else value.to(parameter.device)
                        for key in ("step", "exp_avg", "exp_avg_sq")
                        if (value := found.tensors.get(f"optimizer.{key}.{name}")) is not None
                    }
            self.state = State.of(found.state)
        except (KeyError, TypeError, RuntimeError) as error:
            raise ArtefactError(
                f"the checkpoint of {self.run} does not fit this network ({error}); resume with "
                "the settings it was started with"
            ) from error
        self.log.rewind(self.state.step, self.state.tokens)
        return True


@contextlib.contextmanager
def _interrupts() -> Iterator[threading.Event]:
    """Ctrl-C is heard between steps, where what a checkpoint says is true; a second one at once."""
    heard, before = threading.Event(), signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before == signal.SIG_IGN:
        yield heard  # not for this thread, or, as in the background, not for this process
        return

    def hear(*_: object) -> None:
        heard.set()
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, hear)
    try:
        yield heard
    finally:
        signal.signal(signal.SIGINT, before)


class _Forward(nn.Module):
    """The loss as a module's forward: what DistributedDataParallel knows how to wrap."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.network = task.network
        self._loss = task.loss

    def forward(self, piece: Any) -> Tensor:
        return self._loss(piece)


def _copy(values: dict[str, Tensor], network: nn.Module) -> None:
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            parameter.copy_(values[name])


def _mix(*numbers: int) -> int:
    """One seed of several; neighbouring steps get unrelated ones."""
    mixed = 0x9E3779B97F4A7C15
    for number in numbers:
        mixed = (mixed ^ number) * 0xBF58476D1CE4E5B9 % 2**64
        mixed ^= mixed >> 31
    return mixed % 2**63


def _check(config: LoopConfig) -> None:
    for name, least in (
        ("steps", 1), ("minutes", 0), ("token_budget", 1), ("accumulate", 1), ("learning_rate", 0),
        ("warmup", 0), ("weight_decay", 0), ("clip", 0), ("ema", 0), ("validations", 1),
        ("validation_users", 1), ("patience", 0), ("checkpoint_minutes", 0),
    ):  # fmt: skip
        value = getattr(config, name)
        if not value >= least or not math.isfinite(value):
            raise RequestError(f"{name} is {value}; it must be {least} or more")
    for name in ("warmup", "ema"):
        if getattr(config, name) >= 1:
            raise RequestError(f"{name} is {getattr(config, name)}; it must be below 1")
    if config.clip == 0:
        raise RequestError("clip is 0, which leaves no gradient; it must be above 0")
