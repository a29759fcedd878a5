"""A small shop with texts and pictures, two models of it, and services of them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import polars as pl
import pytest
from starlette.testclient import TestClient

from maskgr import Dataset, Recommender
from maskgr.data.config import SyntheticConfig
from maskgr.data.open import from_shop
from maskgr.data.synthetic import generate
from maskgr.models.base import train_config
from maskgr.serving.app import create_app
from maskgr.serving.served import Served
from maskgr.serving.server import Server, listen
from maskgr.serving.service import Service, ServiceConfig

PICTURE = (
    "data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 8 8'%3E"
    "%3Ccircle cx='4' cy='4' r='3'/%3E%3C/svg%3E"
)
BRIEF = ["fit.steps=40", "validations=1", "width=32", "codes=8"]


@pytest.fixture(autouse=True)
def _own_logging() -> Iterator[None]:
    """The command sets up logging for its process, which is that of the tests."""
    yield
    for name in ("maskgr.serving", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [], True


@pytest.fixture(scope="session")
def shop() -> Dataset:
    """200 items; every third has a picture, one an ID with a slash."""
    made = from_shop(generate(SyntheticConfig(users=300, items=200)))
    number = pl.int_range(pl.len())
    items = made.items.with_columns(
        image_url=pl.when(number % 3 == 0).then(pl.lit(PICTURE)),
        item_id=pl.when(number == 7).then(pl.lit("a/b c?")).otherwise(pl.col("item_id")),
    )
    names = dict(zip(made.items["item_id"], items["item_id"], strict=True))
    events = made.interactions().with_columns(pl.col("item_id").replace(names))
    return Dataset.from_frames(events.drop("timestamp"), items)


@pytest.fixture(scope="session")
def recommender(shop: Dataset) -> Recommender:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("maskgr.training.fit._plot", lambda run: None)
        return Recommender.train(shop, config=train_config("tiny", BRIEF))


@pytest.fixture(scope="session")
def models(shop: Dataset, recommender: Recommender) -> list[Served]:
    popularity = Recommender.train(shop, model="popularity")
    return [Served("shop", "one", recommender), Served("popularity", "two", popularity)]


@pytest.fixture
def client(models: list[Served]) -> Iterator[TestClient]:
    with client_of(models) as own:
        yield own


@contextmanager
def client_of(models: list[Served], **config: Any) -> Iterator[TestClient]:
    """A client in this process."""
    service = Service(models, ServiceConfig(**{"seconds": 120, **config}))
    with TestClient(create_app(service), raise_server_exceptions=False) as client:
        yield client


@contextmanager
def running(models: list[Served], **config: Any) -> Iterator[str]:
    """The address of a service that listens."""
    where, server = (
        listen("127.0.0.1", 0),
        Server(Service(models, ServiceConfig(**{"seconds": 120, **config}))),
    )
    thread = threading.Thread(target=server.run, args=([where],))
    thread.start()
    while not server.started and thread.is_alive():
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{where.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="session")
def address(models: list[Served]) -> Iterator[str]:
    """The address of a service with both models."""
    with running(models) as url:
        yield url
