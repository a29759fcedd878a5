"""The one training loop: budget, schedule, averaging, validation, checkpoints, resuming.

Nothing random is carried from step to step: batches follow from (seed, epoch), noise and dropout
from (seed, step). So a run that was killed and resumed ends with the bits of one that was not.
"""

from __future__ import annotations

import contextlib
import copy
import math
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from maskgr.artefact import write_file
from maskgr.data.sequences import Sequences
from maskgr.data.splits import Holdout, Split, last_targets
from maskgr.devices import keep_freed_memory
from maskgr.errors import ArtefactError, RequestError
from maskgr.nn.optimizer import build_optimizer, clip_gradients
from maskgr.nn.weights import load_weights, save_weights
from maskgr.settings import require_numbers
from maskgr.training.batches import Batches, Place
from maskgr.training.checkpoint import State, load_checkpoint, save_checkpoint
from maskgr.training.log import RunLog
from maskgr.training.plot import draw
from maskgr.training.workspace import Workspace

BEST = "best.safetensors"
PROBE = 8  # steps after which the speed is known well enough to fit the schedule to it
VALIDATION_SHARE = 0.1  # of a timed run's time, at most; the last validation comes on top
PROBED_USERS = 16  # one in so many users tells what a validation costs
LAST_CELLS = 2**31  # users x items of the last validation, at most: minutes


@dataclass(frozen=True)
class FitConfig:
    """How long and how a network is trained."""

    steps: int = 1000
    """Optimiser steps; the learning rate falls to zero over them."""
    minutes: float = 0.0
    """If set, a wall-clock budget instead of `steps`: the schedule is fitted to it."""
    token_budget: int = 16_384
    """Tokens of a batch, at most."""
    accumulate: int = 1
    """Batches an optimiser step."""
    learning_rate: float = 1e-3
    """Peak, after warm-up."""
    warmup: float = 0.05
    """Share of the steps over which the learning rate rises."""
    weight_decay: float = 1e-3
    """On matrices only."""
    clip: float = 1.0
    """Largest norm of the gradient."""
    ema: float = 0.999
    """Decay of the averaged weights, which are validated and kept; 0 keeps the last."""
    validations: int = 20
    """Validations on a fixed sample of users, evenly over the steps; a timed run leaves some out
    where they would take more than a tenth of its time."""
    validation_users: int = 2000
    """Users of that sample."""
    patience: int = 0
    """Stop after this many validations without a better network; 0 never does."""
    checkpoint_minutes: float = 2.0
    """Minutes between checkpoints, from which an interrupted run resumes."""

    def __post_init__(self) -> None:
        require_numbers(
            self,
            "fit.",
            steps=(1, 10**9),
            minutes=(0, 10**6),
            token_budget=(1, 10**9),
            accumulate=(1, 10**5),
            learning_rate=(0, 1),
            warmup=(0, 0.99),
            weight_decay=(0, 10),
            clip=(1e-6, 1e6),
            ema=(0, 0.999999),
            validations=(1, 10**5),
            validation_users=(1, 10**9),
            patience=(0, 10**6),
            checkpoint_minutes=(0, 10**5),
        )


@dataclass(frozen=True)
class Fitted:
    """How a training ended."""

    steps: int  # after which the network was the best on validation, and was kept
    total: int  # that the schedule was made for
    metrics: dict[str, float]  # of the kept network with the last validation's users, if any


@dataclass(frozen=True, eq=False)
class Batch:
    """Sequences with everything that was drawn for them, alike in every process."""

    sequences: Sequences
    weight: float  # the step's summed loss is divided by the sum of these

    def part(self, rows: np.ndarray) -> Batch:
        """The same for some of the sequences."""
        return replace(self, sequences=self.sequences.select(rows))

    def target_weights(self, device: torch.device) -> Tensor | None:
        """(items,) the factor on the loss of each item of the sequences; None: all 1."""
        weights = self.sequences.weights
        return None if weights is None else torch.from_numpy(weights).to(device)


class Trainable(nn.Module):
    """A network that `fit` can train. `forward(batch)` is the summed loss of a batch, or part."""

    tokens_per_item: int = 1  # what an item costs of a batch's token budget
    piece_tokens: int | None = None  # tokens that go through at once; None: a whole batch
    weighs_events: bool = False  # whether `forward` multiplies losses by `Batch.target_weights`

    def prepare(self, sequences: Sequences, generator: torch.Generator) -> Batch:
        """Draws everything that is random about a batch, with a generator of the CPU."""
        return Batch(sequences, sequences.total_weight)

    def validate(self, holdout: Holdout) -> dict[str, float]:
        """Means over the questions; the network with the highest `recall@10` is kept."""
        raise AssertionError(f"{type(self).__name__} has no validation")


def fit(
    network: Trainable,
    split: Split,
    config: FitConfig,
    work: Workspace,
    *,
    history_limit: int,
    seed: int,
    label: str = "training",
    chosen: Fitted | None = None,
) -> Fitted:
    """Trains `network` in place, and leaves it with the weights that were best on validation, or,
    where the split has no validation users, with the last. In several processes each calls this.

    chosen: an earlier training, whose number of steps and schedule this one has.
    """
    if chosen is not None:
        config = replace(config, steps=chosen.total, minutes=0.0, patience=0)
    if split.train.weights is not None and not network.weighs_events:
        raise RequestError(
            f"{type(network).__name__} cannot weigh events, and these data have weights; leave "
            "--events, --targets and the column weight out, or train another model"
        )
    budget = config.token_budget // network.tokens_per_item
    if budget < history_limit + 1:
        tokens = (history_limit + 1) * network.tokens_per_item
        raise RequestError(
            f"fit.token_budget is {config.token_budget}, and a full history with the next item has "
            f"{tokens} tokens; raise it, or lower history_limit"
        )
    batches = Batches(split.train, history_limit + 1, budget, seed)
    writes = work.world.writes
    if writes:
        count = sum(p.numel() for p in network.parameters())
        print(f"{label}: {count:,} parameters on {work.world.device}", file=sys.stderr)
    with RunLog(work.run, work.world, label=label, progress=work.progress) as log:
        last = None if chosen is None else chosen.steps
        trainer = Trainer(network.to(work.world.device), split, batches, config, work, log, last)
        if not (work.resume and trainer.resume()):
            log.rewind(0)  # rows of an earlier run that came to no checkpoint
        found = trainer.train()
    if writes:
        words = ", ".join(f"{name} {value:.4f}" for name, value in found.metrics.items())
        users = len(trainer.asked_last.users)
        many = "all" if users == len(split.validation.users) else f"{users:,}"
        words = f"the best network, {many} validation users: {words}"
        if not found.metrics:
            words = f"{found.steps:,} steps, without validation"
        print(f"{label}: {words}", file=sys.stderr)
        _plot(work.run)
    return found


@dataclass
class Trainer:
    """The moving parts, for as long as training lasts."""

    network: Trainable
    split: Split
    batches: Batches
    config: FitConfig
    work: Workspace
    log: RunLog
    last: int | None = None  # the step to stop after, where it comes before the schedule's end
    state: State = field(default_factory=State)

    def __post_init__(self) -> None:
        config, self.world, self.run = self.config, self.work.world, self.work.run
        self.optimizer = build_optimizer(self.network, config.learning_rate, config.weight_decay)
        self.average = _averaged(self.network, config.ema) if config.ema else None
        self.wrapped = self.world.wrap(self.network)
        seed, users = self.batches.seed, config.validation_users
        self.sample = self.split.validation.sample(users, seed)
        self.trained_on = last_targets(self.split.train).sample(math.ceil(users / 4), seed)
        items = int(self.split.train.values.max(initial=0)) + 1  # that is, the highest number
        self.asked_last = self.split.validation.sample(max(users, LAST_CELLS // items), seed)
        self.saved_at = time.perf_counter()

    def train(self) -> Fitted:
        """Runs to the end of the budget."""
        keep_freed_memory()
        start = time.perf_counter() - self.state.seconds
        if not self.state.total:
            # The speed is not known yet: a number that makes the first steps a start of any run.
            steps = 1000 * PROBE if self.config.minutes else self.config.steps
            self.state = replace(self.state, total=steps)
        stream = self.batches.from_place(self.state.place)
        with _interrupts() as interrupted:
            while not (self._finished(start) or self.world.agree(interrupted.is_set())):
                self._step(list(islice(stream, self.config.accumulate)))
                self._fit_schedule(time.perf_counter() - start)
                if self._due(time.perf_counter() - start):
                    self._validate()
                self.state = replace(self.state, seconds=time.perf_counter() - start)
                self._checkpoint()
            if self.world.agree(interrupted.is_set()):
                self._checkpoint(now=True)
                raise KeyboardInterrupt
        return self._finish()

    def _step(self, micro: list[tuple[Place, Sequences]]) -> None:
        """One optimiser step over a few batches; each process computes its share of each."""
        step, world, seed = self.state.step, self.world, self.batches.seed
        factor = schedule(step, self.state.total, math.ceil(self.config.warmup * self.state.total))
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.learning_rate * factor
        self.network.train()
        self.optimizer.zero_grad(set_to_none=True)
        # Drawn on the CPU for the whole batch: the same numbers on every device and process count.
        batches = [
            self.network.prepare(batch, torch.Generator().manual_seed(_mix(seed, step, number)))
            for number, (_, batch) in enumerate(micro)
        ]
        parts = [part for batch in batches for part in self._parts(batch)]
        # DistributedDataParallel averages over the processes, and the sum over all is wanted.
        # A batch in which no target was drawn has no loss to divide.
        scale = world.size / (sum(batch.weight for batch in batches) or 1.0)
        torch.manual_seed(_mix(seed, step, world.rank, -1))  # dropout differs between processes
        total = torch.zeros((), device=world.device)
        for number, part in enumerate(parts):
            with self._without_sync(number + 1 < len(parts)), self._autocast():
                loss = self.wrapped(part) * scale
            loss.backward()
            total += loss.detach()
        norm = clip_gradients(self.network.parameters(), self.config.clip)
        self.optimizer.step()
        if self.average is not None:
            self.average.update_parameters(self.network)
        items = sum(len(batch.sequences.values) for batch in batches)
        tokens = self.state.tokens + items * self.network.tokens_per_item
        self.state = replace(self.state, step=step + 1, place=micro[-1][0], tokens=tokens)
        self.log.step(self.state, total, norm, self.config.learning_rate * factor)

    def _parts(self, batch: Batch) -> list[Batch]:
        """This process's share of a batch, in pieces whose hidden states stay near the CPU."""
        rows = np.arange(self.world.rank, len(batch.sequences), self.world.size)
        limit = self.network.piece_tokens if self.world.device.type == "cpu" else None
        if limit is None:
            return [batch.part(rows)]
        tokens = batch.sequences.lengths[rows] * self.network.tokens_per_item
        filled = (np.cumsum(tokens) - 1) // limit
        pieces = np.split(rows, np.flatnonzero(np.diff(filled)) + 1)
        return [batch.part(piece) for piece in pieces]

    def _without_sync(self, wanted: bool) -> contextlib.AbstractContextManager[None]:
        """Processes exchange gradients once a step, with the last piece."""
        if wanted and isinstance(self.wrapped, nn.parallel.DistributedDataParallel):
            return self.wrapped.no_sync()
        return contextlib.nullcontext()

    def _autocast(self) -> torch.autocast:
        device = self.world.device.type
        return torch.autocast(device, torch.bfloat16, enabled=device == "cuda")

    def _fit_schedule(self, seconds: float) -> None:
        """Fits the number of steps to the minutes; looked at again as the run goes on."""
        step = self.state.step
        powers = step >= PROBE and step & (step - 1) == 0
        if self.config.minutes and (powers or self._reached() > self.state.validated):
            fitting = int(step * 60 * self.config.minutes / max(seconds, 1e-9))
            total = self.world.agree(max(step, fitting))
            self.state = replace(self.state, total=total)

    def _reached(self) -> int:
        """How many of the schedule's validations are passed."""
        return self.state.step * self.config.validations // self.state.total

    def _due(self, seconds: float) -> bool:
        state = self.state
        if not self._validates:
            return False
        if state.step == state.total:
            return True
        if self._reached() <= state.validated:
            return False
        if not self.config.minutes:
            return True
        after = state.validation_seconds + self._validation_cost
        return bool(self.world.agree(after <= VALIDATION_SHARE * seconds))

    @cached_property
    def _validation_cost(self) -> float:
        """Seconds of a validation, estimated with a few of its users."""
        start, users = time.perf_counter(), len(self.sample.users)
        few = self.sample.select(np.arange(0, users, PROBED_USERS))
        self._measure(self._kept_network(), few)
        users += len(self.trained_on.users)
        return (time.perf_counter() - start) * users / len(few.users)

    @property
    def _validates(self) -> bool:
        return len(self.sample.users) > 0

    def _validate(self) -> None:
        start = time.perf_counter()
        network = self._kept_network()
        found = self._measure(network, self.sample)
        seen = self._measure(network, self.trained_on)
        score, best = found["recall@10"], self.state.best
        better = best is None or score > best
        kept = better or score == best  # of equals the later one, which has seen more
        if kept:
            self._keep(network)
        self.state = replace(
            self.state,
            best=score if better else best,
            best_step=self.state.step if kept else self.state.best_step,
            waited=0 if better else self.state.waited + 1,
            validated=self._reached(),
            validated_step=self.state.step,
            validation_seconds=self.state.validation_seconds + time.perf_counter() - start,
        )
        self.log.validation(self.state, found | {f"training_{k}": v for k, v in seen.items()})

    def _keep(self, network: Trainable) -> None:
        if self.world.writes:
            with write_file(self.run / BEST) as draft:
                save_weights(network, draft)

    def _kept_network(self) -> Trainable:
        """The averaged weights, where there are some."""
        network = self.network if self.average is None else self.average.module
        assert isinstance(network, Trainable)
        return network

    @torch.no_grad()
    def _measure(self, network: Trainable, holdout: Holdout) -> dict[str, float]:
        """Means over all questions; each process answers its share of them."""
        network.eval()
        rows = np.arange(self.world.rank, len(holdout.users), self.world.size)
        weight = len(rows)
        found = network.validate(holdout.select(rows if weight else np.arange(1)))
        sums = torch.tensor([value * weight for value in found.values()], dtype=torch.float64)
        if self.world.device.type == "mps":
            sums = sums.float()
        network.eval()  # drops what it kept for the questions, such as a table of all items
        means = self.world.total(sums.to(self.world.device)) / len(holdout.users)
        return dict(zip(found, means.tolist(), strict=True))

    def _finished(self, start: float) -> bool:
        state, config = self.state, self.config
        late = bool(config.minutes) and time.perf_counter() - start >= 60 * config.minutes
        impatient = 0 < config.patience <= state.waited
        last = state.total if self.last is None else min(self.last, state.total)
        return bool(self.world.agree(state.step >= last or late or impatient))

    def _finish(self) -> Fitted:
        state = self.state
        if not self._validates:
            self._keep(self._kept_network())
        elif state.validated_step < state.step:  # the time was over before the last one
            self._validate()
        self._checkpoint(now=True)
        self.world.wait()
        load_weights(self.network, self.run / BEST)
        self.network.zero_grad()  # else they count in the gradient of what is built on this network
        if not self._validates:
            return Fitted(state.step, state.total, {})
        metrics = self._measure(self.network, self.asked_last)
        return Fitted(self.state.best_step, self.state.total, metrics)

    def _checkpoint(self, *, now: bool = False) -> None:
        due = time.perf_counter() - self.saved_at >= 60 * self.config.checkpoint_minutes
        if self.world.writes and (due or now):
            # With the best network, which a step after this one may replace before a kill.
            best = [] if self.state.best is None else [self.run / BEST]
            save_checkpoint(self.run, self.state.step, asdict(self.state), self._tensors(), best)
            self.saved_at = time.perf_counter()

    def _tensors(self) -> dict[str, Tensor]:
        tensors = {f"network.{name}": value for name, value in self.network.state_dict().items()}
        if self.average is not None:
            tensors["average"] = self.average.n_averaged
            for name, value in self._averages():
                tensors[f"average.{name}"] = value.detach()
        for name, parameter in self.network.named_parameters():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                tensors[f"optimizer.{key}.{name}"] = value
        return tensors

    def _averages(self) -> Iterator[tuple[str, Tensor]]:
        """The averaged parameters by name; what is not averaged is the network's own."""
        assert self.average is not None
        own = dict(self.network.named_parameters())
        for name, value in self.average.module.named_parameters():
            if value is not own[name]:
                yield name, value

    def resume(self) -> bool:
        """Goes on from the newest checkpoint, if there is one."""
        found = load_checkpoint(self.run)
        if found is None:
            return False
        try:
            self._load(found.tensors)
            self.state = State.of(found.state)
        except (KeyError, TypeError, RuntimeError) as error:
            raise ArtefactError(
                f"the checkpoint of {self.run} does not fit this network ({error}); resume with "
                "the settings it was started with"
            ) from error
        if self.world.writes and (found.folder / BEST).exists():
            with write_file(self.run / BEST) as draft:
                shutil.copyfile(found.folder / BEST, draft)
        self.log.rewind(self.state.step, self.state.tokens)
        self.world.wait()  # until all have read what the next checkpoint may replace
        return True

    def _load(self, tensors: dict[str, Tensor]) -> None:
        names = self.network.state_dict()
        self.network.load_state_dict({name: tensors[f"network.{name}"] for name in names})
        if self.average is not None:
            _share_buffers(self.network, self.average.module)
            self.average.n_averaged.copy_(tensors["average"])
            with torch.no_grad():
                for name, mean in self._averages():
                    mean.copy_(tensors[f"average.{name}"])
        for name, parameter in self.network.named_parameters():
            self.optimizer.state[parameter] = {
                # AdamW counts its steps on the CPU.
                key: value.clone() if key == "step" else value.to(parameter.device)
                for key in ("step", "exp_avg", "exp_avg_sq")
                if (value := tensors.get(f"optimizer.{key}.{name}")) is not None
            }


def schedule(step: int, total: int, warmup: int) -> float:
    """Factor on the peak learning rate at `step` (from 0): linear warm-up, then cosine decay.

    The first step has 1 / warmup rather than 0, the last is close to 0.
    """
    if step < warmup:
        return (step + 1) / warmup
    done = min((step - warmup) / max(total - warmup, 1), 1.0)
    return 0.5 * (1 + math.cos(math.pi * done))


def _averaged(network: Trainable, decay: float) -> AveragedModel:
    """An exponential moving average of the weights, quicker in the first steps: it would otherwise
    be mostly the random start.

    What is not learned is the network's own instead of a copy, and so are tables with sparse
    gradients: to average all rows in every step would take longer than the step.
    """

    def update(average: Any, current: Any, count: Tensor | int) -> None:
        own = min(decay, (1 + int(count)) / (10 + int(count)))
        for mean, value in zip(average, current, strict=True):
            if mean.data_ptr() != value.data_ptr():
                mean.lerp_(value, 1 - own)

    shared: list[Any] = [*network.buffers()]
    for module in network.modules():
        learned = [parameter.requires_grad for parameter in module.parameters()]
        if getattr(module, "sparse", False) or (learned and not any(learned)):
            shared += [module, *module.parameters()]
    average = AveragedModel(nn.Module(), multi_avg_fn=torch.no_grad()(update))
    average.module = copy.deepcopy(network, {id(part): part for part in shared})
    return average


def _share_buffers(network: nn.Module, average: nn.Module) -> None:
    """Gives the average the network's buffers again, which loading may have made anew.

    A buffer that two modules share has two names, and is set under both.
    """
    for name, buffer in network.named_buffers(remove_duplicate=False):
        owner, _, attribute = name.rpartition(".")
        setattr(average.get_submodule(owner), attribute, buffer)


@contextlib.contextmanager
def _interrupts() -> Iterator[threading.Event]:
    """Delays the first Ctrl-C to the end of a step, where a checkpoint is consistent."""
    heard, before = threading.Event(), signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before == signal.SIG_IGN:
        yield heard  # signals do not reach this thread, or are ignored, as in the background
        return

    def hear(*_: object) -> None:
        heard.set()
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, hear)
    try:
        yield heard
    finally:
        signal.signal(signal.SIGINT, before)


def _mix(*numbers: int) -> int:
    """Hashes numbers into one seed; neighbouring steps get unrelated ones."""
    mixed = 0x9E3779B97F4A7C15
    for number in numbers:
        mixed = (mixed ^ number) * 0xBF58476D1CE4E5B9 % 2**64
        mixed ^= mixed >> 31
    return mixed % 2**63


def _plot(run: Path) -> None:
    try:
        draw(run)
    except RequestError as error:
        print(f"note: {error}", file=sys.stderr)  # a run without a plot is still a run
