"""What holds for every model that is trained: the contract of `Model` and of `Trainable`."""

from __future__ import annotations

import os
import signal
import socket
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from maskgr.data.splits import leave_out
from maskgr.evaluation.ranking import Query
from maskgr.models.base import MODELS, Model, TrainConfig, Training, model_class, train_config
from maskgr.training.batches import by_length
from maskgr.training.fit import Trainable
from maskgr.training.workspace import workspace
from tests.models.tiny import (
    HISTORIES,
    ITEMS,
    assert_same,
    queries,
    shop,
)
from tests.models.tiny import (
    workspace as here,
)
from tests.training.toy import start as start_process

NETWORKS = [name for name in MODELS if name not in ("popularity", "neighbours")]
ADDS_UP = [name for name in NETWORKS if name != "cadirec"]  # it contrasts users within a part
SHORT = ["fit.steps=12", "validations=2", "ema=0.9", "checkpoint_minutes=0", "history_limit=4"]
SIDS = ["levels=3", "codes=4"]


def short_config(name: str, *settings: str) -> TrainConfig:
    """The tiny preset, for twelve steps on the shop of fourteen items."""
    preset = next(own for own in model_class(name).presets if own.startswith("tiny"))
    own = SIDS if model_class(name).uses_sids else []
    config = train_config(preset, [*SHORT, *own, *settings], model=name, device="cpu")
    return replace(config, fit=replace(config.fit, token_budget=120))


def learn(config: TrainConfig, run: Path) -> Model:
    data = shop()
    training = Training(data, leave_out(data.histories), config, here(run))
    return model_class(config.name).learn(training)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    folder = tmp_path_factory.mktemp("models")
    return {name: learn(short_config(name), folder / name) for name in NETWORKS}


@pytest.mark.parametrize("name", NETWORKS)
def test_ranking_obeys_the_filters(models: dict[str, Model], name: str) -> None:
    for query in queries():
        ranked = models[name].rank(query)
        assert ranked.items.shape == ranked.scores.shape == (len(HISTORIES), query.top)
        for user, (items, scores) in enumerate(zip(ranked.items, ranked.scores, strict=True)):
            found = items[items >= 0]
            assert len(set(found)) == len(found)
            assert (items[len(found) :] == -1).all()
            assert (scores[len(found) :] == -np.inf).all()
            assert (np.diff(scores[: len(found)]) <= 0).all()
            left = np.ones(ITEMS, dtype=bool) if query.allowed is None else query.allowed.copy()
            if query.excluded is not None:
                left[query.excluded[user]] = False
            assert left[found].all()
            assert len(found) == min(query.top, left.sum())


@pytest.mark.parametrize("name", NETWORKS)
def test_an_answer_does_not_depend_on_other_users(models: dict[str, Model], name: str) -> None:
    together = models[name].rank(Query(HISTORIES, 6))
    for user in range(len(HISTORIES)):
        alone = models[name].rank(Query(HISTORIES.select(np.array([user])), 6))
        assert np.array_equal(alone.items[0], together.items[user])
        np.testing.assert_allclose(alone.scores[0], together.scores[user], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", NETWORKS)
def test_ranking_after_training_mode_is_the_same(models: dict[str, Model], name: str) -> None:
    model, query = models[name], Query(HISTORIES, 6)
    before = model.rank(query)
    if isinstance(model, torch.nn.Module):
        model.train()  # dropout is on, until it ranks
    torch.manual_seed(99)  # global random numbers do not matter
    assert_same(model.rank(query), before, exact=True)


@pytest.mark.parametrize("name", NETWORKS)
def test_no_users_get_no_items(models: dict[str, Model], name: str) -> None:
    nobody = Query(HISTORIES.select(np.zeros(0, dtype=np.int64)), 3)
    assert models[name].rank(nobody).items.shape == (0, 3)


@pytest.mark.parametrize("name", NETWORKS)
def test_saved_and_loaded_model_ranks_alike(
    models: dict[str, Model], name: str, tmp_path: Path
) -> None:
    models[name].save(tmp_path)
    loaded = model_class(name).load(tmp_path, short_config(name))
    for query in queries():
        assert_same(loaded.rank(query), models[name].rank(query), exact=True)


@pytest.mark.parametrize("name", [own for own in NETWORKS if own != "maskgr"])
def test_an_empty_part_has_no_loss_and_gradients_of_zero(
    models: dict[str, Model], name: str
) -> None:
    network = _network(models[name])
    batch = network.prepare(_sequences(), torch.Generator().manual_seed(0))
    network.zero_grad()
    loss = network(batch.part(np.zeros(0, dtype=np.int64)))
    loss.backward()
    assert loss == 0
    learned = [parameter for parameter in network.parameters() if parameter.requires_grad]
    assert all(own.grad is not None and not own.grad.any() for own in learned)


@pytest.mark.parametrize("name", [own for own in ADDS_UP if own != "maskgr"])
def test_losses_of_parts_sum_to_the_loss_of_the_batch(models: dict[str, Model], name: str) -> None:
    network = _network(models[name])
    batch = network.prepare(_sequences(), torch.Generator().manual_seed(0))
    rows = np.arange(len(batch.sequences))
    with torch.no_grad():
        parts = [network(batch.part(rows[part])) for part in (rows % 2 == 0, rows % 2 == 1)]
        whole = network(batch)
    torch.testing.assert_close(parts[0] + parts[1], whole, rtol=1e-4, atol=1e-4)


def _network(model: Model) -> Trainable:
    """The model's network with dropout off."""
    assert isinstance(model, Trainable)
    return model.eval()


def _sequences() -> Any:
    return by_length(leave_out(shop().histories).train.last(5))


# In processes that can be killed.
def train(name: str, run: Path, settings: tuple[str, ...], rank: int, size: int, port: int) -> None:
    """Trains, or goes on with a training, and writes the model into `saved`."""
    from maskgr.training import fit as module

    torch.set_num_threads(1)
    module._plot = lambda run: None
    place = {"WORLD_SIZE": size, "RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({key: str(value) for key, value in place.items()})
    data = shop()
    with workspace(run, device="cpu", resume=True) as work:
        config = short_config(name, *settings)
        training = Training(data, leave_out(data.histories), config, work)
        model = model_class(name).learn(training)
        if work.world.writes:
            (run / "saved").mkdir()
            model.save(run / "saved")


def start(name: str, run: Path, *settings: str, rank: int = 0, size: int = 1, port: int = 0) -> Any:
    return start_process(train, name, run, settings, rank, size, port)


@pytest.mark.parametrize("name", NETWORKS)
def test_killed_training_resumes_to_the_bits_of_one_that_was_not(name: str, tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    others, codes = [start(name, whole)], []
    for step in (1, 5):
        process = start(name, killed)
        while process.is_alive() and _checkpoint(killed) < step:
            time.sleep(0.002)
        process.kill()
        process.join(300)
        codes.append(process.exitcode)
    assert -signal.SIGKILL in codes
    others.append(start(name, killed))
    for process in others:
        process.join(300)
        assert process.exitcode == 0
    files = sorted(file.relative_to(whole) for file in (whole / "saved").rglob("*.safetensors"))
    assert files
    for file in files:
        assert (whole / file).read_bytes() == (killed / file).read_bytes(), file


def _checkpoint(run: Path) -> int:
    """The step of the newest checkpoint, 0 where there is none."""
    folders = [*run.glob("checkpoints/*"), *run.glob("*/checkpoints/*")]
    return max((int(folder.name) for folder in folders if folder.name.isdigit()), default=0)


@pytest.mark.parametrize("name", [own for own in ADDS_UP if model_class(own).supports_ddp])
def test_two_processes_train_like_one(name: str, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # Dropout differs between processes, so there is none.
    processes = [
        start(name, tmp_path / "one", "dropout=0"),
        *(start(name, tmp_path / "two", "dropout=0", rank=r, size=2, port=port) for r in (0, 1)),
    ]
    for process in processes:
        process.join(300)
        assert process.exitcode == 0
    config = short_config(name, "dropout=0")
    one, two = (
        model_class(name).load(tmp_path / run / "saved", config).rank(Query(HISTORIES, ITEMS))
        for run in ("one", "two")
    )
    by_item = [np.take_along_axis(own.scores, own.items.argsort(1), 1) for own in (one, two)]
    np.testing.assert_allclose(by_item[0], by_item[1], atol=2e-2)


def _weighted(network: Trainable, weights: Any) -> float:
    """The loss of a batch whose items have these weights, with what is drawn always alike."""
    batch = network.prepare(_sequences(), torch.Generator().manual_seed(0))
    sequences = replace(batch.sequences, weights=weights)
    with torch.no_grad():
        return float(network(replace(batch, sequences=sequences)))


@pytest.mark.parametrize("name", NETWORKS)
def test_an_event_of_weight_two_counts_twice_and_one_of_weight_zero_not_at_all(
    models: dict[str, Model], name: str
) -> None:
    network = _network(models[name])
    size = len(network.prepare(_sequences(), torch.Generator().manual_seed(0)).sequences.values)
    none, ones = np.zeros(size, np.float32), np.ones(size, np.float32)
    base = _weighted(network, none)  # cadirec has losses that are not about targets
    assert name == "cadirec" or base == 0
    alone = [_weighted(network, np.eye(size, dtype=np.float32)[n]) - base for n in range(size)]
    assert sum(abs(own) > 1e-3 for own in alone) > size / 5
    assert base + sum(alone) == pytest.approx(_weighted(network, None), rel=1e-4)
    assert _weighted(network, ones) == pytest.approx(_weighted(network, None), rel=1e-5)
    mixed = np.resize([0, 2, 0.5], size).astype(np.float32)
    assert _weighted(network, mixed) == pytest.approx(base + float(mixed @ alone), rel=1e-4)


@pytest.mark.parametrize("name", NETWORKS)
def test_a_step_is_divided_by_the_weights_of_its_targets(
    models: dict[str, Model], name: str
) -> None:
    network, sequences = _network(models[name]), _sequences()

    def weight(weights: Any) -> float:
        own = replace(sequences, weights=weights)
        return network.prepare(own, torch.Generator().manual_seed(0)).weight

    ones = np.ones(len(sequences.values), np.float32)
    assert weight(ones) == weight(None)
    assert weight(2 * ones) == 2 * weight(None)
    assert 0 < weight(np.resize([1, 0], len(ones)).astype(np.float32)) < weight(None)
