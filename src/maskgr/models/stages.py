"""How MaskGR is trained: semantic IDs, then the network, in one stage or two, then the weights.

In two stages the dense head learns first, semantic IDs are made of what it learned, and the digits
learn alone (`maskgr.models.collaborative`). Each stage has a folder that it can be resumed from.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from maskgr.artefact import is_artefact
from maskgr.config import LoopConfig, TrainConfig
from maskgr.data.dataset import Dataset
from maskgr.data.splits import Split
from maskgr.errors import ArtefactError, RequestError
from maskgr.models.base import Workspace
from maskgr.models.causal import check_copies
from maskgr.models.collaborative import carry_over, check_collaborative, score_space
from maskgr.models.distillation import check_distillation
from maskgr.models.followers import Followers
from maskgr.models.network import Part, build_network, flops_per_token, load_network
from maskgr.models.task import BEST, Task
from maskgr.models.weighing import weigh
from maskgr.sids.semantic_ids import SemanticIds
from maskgr.training.batches import Batches, by_length
from maskgr.training.distributed import World, world
from maskgr.training.fit import Trainer
from maskgr.training.log import RunLog
from maskgr.training.plot import draw

if TYPE_CHECKING:
    from maskgr.models.maskgr import MaskGR

FIRST = "item-vectors"  # where a run keeps the training of the dense head alone
ASKING = 4096  # users whose queries say what of the items' vectors matters


def train(
    kind: type[MaskGR], data: Dataset, split: Split, config: TrainConfig, work: Workspace
) -> MaskGR:
    """All stages, in every process that takes part; the model of the one that writes is whole."""
    check_collaborative(config)
    check_distillation(config)
    check_copies(config)
    with world(config.loop.device) as here:
        if here.writes:
            work.require_fresh()
        sids = _semantic_ids(data, config, work, here)
        _check_room(config, len(sids.codebook_sizes))
        torch.manual_seed(config.seed)
        model = kind(build_network(config, sids).to(here.device), sids, config)
        loop = config.loop
        part: Part | None = None  # of the network; None is all
        if config.collaborative and work.sids is None:
            part = "digits"
            first, loop = _two_stages(config)
            model = _with_learned_ids(model, split, first, work, here)
        if here.writes:
            print(_about(model, split, part), file=sys.stderr)
        found = _run(Task(model, split, here, part), loop, work, work.run, "training")
        if here.writes:
            words = ", ".join(f"{name} {value:.2%}" for name, value in found.items())
            print(
                f"the best network on validation, all users, digits in one step: {words}",
                file=sys.stderr,
            )
            _draw(work.run, *([] if part is None else [work.run / FIRST]))
    if model.network.dense and here.writes:
        if config.dense.followers:
            model.followers = Followers.of(split.train, len(sids.digits), config.dense.followers)
        model.forget()
        model = model.with_weights(weigh(model, split))
    return model


def _with_learned_ids(
    model: MaskGR, split: Split, loop: LoopConfig, work: Workspace, here: World
) -> MaskGR:
    """The same model after its dense head was trained alone, with semantic IDs made of what that
    learned."""
    folder = work.run / FIRST
    made = folder / "sids"
    if work.resume and is_artefact(made):
        load_network(model.network, folder / BEST)
    else:
        _run(Task(model, split, here, "dense"), loop, work, folder, "item vectors")
        if here.writes:
            _draw(folder)
            vectors = _item_vectors(model, split)
            model.sids.remade(vectors, model.config.quantizer, progress=work.progress).save(made)
        here.wait()
    sids = SemanticIds.load(made)
    torch.manual_seed(model.config.seed)
    network = build_network(model.config, sids).to(here.device)
    other = type(model)(network, sids, model.config)
    carry_over(model.network, model.digits, network, other.digits)
    return other


@torch.no_grad()
def _item_vectors(model: MaskGR, split: Split) -> npt.NDArray[np.float32]:
    """(items, width) what the dense head learned of the items, as its scores see it."""
    network = model.network.eval()
    rng = np.random.default_rng(model.config.seed)
    users = rng.permutation(np.flatnonzero(split.train.lengths))[:ASKING]
    histories = split.train.select(users).last(model.config.history_limit + 1)
    queries = []
    for rows in model.portions(histories):
        numbers, layout = model.batch(by_length(histories.select(rows)))
        past = network.remember(model.digits[numbers], layout, numbers)
        queries.append(network.queries(past).cpu())
    return score_space(network.table(model.digits).cpu().numpy(), torch.cat(queries).numpy())


def _check_room(config: TrainConfig, digits: int) -> None:
    """Before a first stage is trained, that the second has room for a history too."""
    tokens = (config.history_limit + 1) * digits * config.objective.copies
    if config.loop.token_budget < tokens:
        raise RequestError(
            f"loop.token_budget is {config.loop.token_budget}, and a history of "
            f"{config.history_limit} items with the next, in objective.copies="
            f"{config.objective.copies}, has {tokens} tokens; raise it, or lower history_limit or "
            "the copies"
        )


def _two_stages(config: TrainConfig) -> tuple[LoopConfig, LoopConfig]:
    """The budget of the dense head alone, and what is left for the digits."""
    loop, share = config.loop, config.collaborative
    steps = max(1, round(share * loop.steps))
    return (
        replace(loop, steps=steps, minutes=share * loop.minutes),
        replace(loop, steps=max(1, loop.steps - steps), minutes=(1 - share) * loop.minutes),
    )


def _run(
    task: Task, loop: LoopConfig, work: Workspace, folder: Path, label: str
) -> dict[str, float]:
    """Trains in `folder`, from its checkpoints where it goes on; the best network's validation."""
    config, here = task.model.config, task.world
    budget = loop.token_budget // task.tokens_per_item
    batches = Batches(task.split.train, config.history_limit + 1, budget, config.seed)
    with RunLog(folder, label=label, writes=here.writes, progress=work.progress) as log:
        trainer = Trainer(task, batches, loop, folder, here, log)
        if not (work.resume and trainer.resume()):
            log.rewind(0)  # an earlier one that came to no checkpoint
        return trainer.train()


def _about(model: MaskGR, split: Split, part: Part | None) -> str:
    network = model.network
    window = model.config.history_limit + 1
    lengths = np.minimum(split.train.lengths, window) * network.digits
    length = float((lengths**2).sum() / lengths.sum())  # of the sequence that a token is in
    objective = model.config.objective
    flops = flops_per_token(
        network, length, part=part, taught=objective.distil > 0, copies=objective.copies
    )
    return (
        f"{sum(p.numel() for p in network.parameters()):,} parameters, {flops / 1e6:.1f} million "
        f"floating-point operations a token, on {model.device}"
    )


def _draw(run: Path, *earlier: Path) -> None:
    try:
        draw(run, *earlier)
    except RequestError as error:
        print(f"note: {error}", file=sys.stderr)  # a run without a picture is still a run


def _semantic_ids(data: Dataset, config: TrainConfig, work: Workspace, here: World) -> SemanticIds:
    """Given, or made by one process and kept in the run, where the others find them."""
    folder = work.run / "sids"
    if here.writes and not (work.resume and is_artefact(folder)):
        sids = work.sids or SemanticIds.make(
            data,
            encoder=config.encoder,
            quantizer=config.quantizer,
            unique=config.unique,
            progress=work.progress,
        )
        sids.save(folder)
    here.wait()
    sids = SemanticIds.load(folder)
    if not sids.items["item_id"].equals(data.item_ids):
        raise ArtefactError(
            "the semantic IDs were made for other items than the dataset's; make them again"
        )
    return sids
