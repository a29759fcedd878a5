"""Every reader, with the inputs that are generated for it.

Each takes a generated value and an empty folder; what it returns does not matter.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from hypothesis import strategies as st

from maskgr import Dataset, Recommender
from maskgr.artefact import MANIFEST
from maskgr.cli.options import data_config
from maskgr.data.config import DataConfig
from maskgr.data.embeddings import align_embeddings
from maskgr.data.open import inspect_data
from maskgr.data.problems import Problems
from maskgr.data.tables import read_matrix, read_table
from maskgr.errors import MaskGRError
from maskgr.serving.answers import Asked, recommend_job
from maskgr.serving.batch import recommend_file
from maskgr.serving.model_card import Figures
from maskgr.serving.problems import ProblemError
from maskgr.serving.served import Served
from maskgr.settings import apply_settings
from maskgr.sids.semantic_ids import SemanticIds
from maskgr.update import prepare
from maskgr.where import matching

from .inputs import (
    BODIES,
    arrays,
    bodies,
    catalogues,
    changed,
    columns,
    conditions,
    configs,
    documents,
    formats,
    frames,
    history_lines,
    kept,
    logs,
    manifests,
    option_texts,
    requests,
    setting_pairs,
    shop,
    spoiled,
    vectors,
    write_table,
)


@cache
def recommender(model: str = "neighbours") -> Recommender:
    log = [("u", item, n) for n, item in enumerate("abcdab")]
    frame = pl.DataFrame(log, schema=["user_id", "item_id", "position"], orient="row")
    items = pl.DataFrame({"item_id": ["a", "b", "c", "d"], "title": ["A", "B", "C", "D"]})
    return Recommender.train(Dataset.from_frames(frame, items), model=model)


def read_tables(value: tuple[Any, ...], folder: Path) -> None:
    """A folder of a user's own files."""
    log, items, form, options = value
    write_table(log, folder / f"interactions.{form}")
    if items is not None:
        write_table(items, folder / f"items.{form}")
    config = DataConfig(**options)
    inspect_data(str(folder), config)  # collects problems, and never raises another error
    data = Dataset.load(folder, config=config)
    use(data, folder)


def use(data: Dataset, folder: Path) -> None:
    """What is accepted can be saved and comes back."""
    out = folder / ".." / f"{folder.name} saved"
    try:
        data.save(out)
        assert Dataset.load(out).fingerprint == data.fingerprint
    finally:
        shutil.rmtree(out, ignore_errors=True)


def read_frames(value: tuple[Any, ...], folder: Path) -> None:
    """Frames in memory: polars, or pandas with objects in it."""
    log, items, options, pandas = value
    if pandas:
        import pandas as pd

        log = pd.DataFrame({c: pd.Series(log[c].to_list(), dtype=object) for c in log.columns})
    data = Dataset.from_frames(log, items, config=DataConfig(**options))
    assert len(data.content) == 64


def read_times(column: pl.Series, folder: Path) -> None:
    users = ["u"] * len(column)
    frame = pl.DataFrame([pl.Series("user_id", users), pl.Series("item_id", users), column])
    Dataset.from_frames(frame)


def read_embeddings(value: Any, folder: Path) -> None:
    file = folder / ("embeddings.parquet" if isinstance(value, pl.DataFrame) else "embeddings.npy")
    if isinstance(value, pl.DataFrame):
        write_table(value, file)
    else:
        np.save(file, value)
    matrix = read_matrix(file)
    align_embeddings(matrix, shop().item_ids.head(6), Problems())
    shop().interactions().write_parquet(folder / "interactions.parquet")
    shop().items.write_parquet(folder / "items.parquet")
    Dataset.load(folder)


def read_settings(value: tuple[Any, list[str]], folder: Path) -> None:
    apply_settings(*value)


def read_options(value: dict[str, str], folder: Path) -> None:
    """The options of commands, as they are typed."""
    data_config(0, "error", "keep", "keep", **value)


@cache
def priced() -> pl.DataFrame:
    return pl.DataFrame(
        {
            "item_id": ["a", "b", "c"],
            "title": ["A", "é", None],
            "price": [1.5, float("nan"), None],
            "flag": [True, False, None],
            "tags": [["x"], [], None],
            "nothing": [None, None, None],
        }
    )


def read_where(value: str, folder: Path) -> None:
    assert len(matching(priced(), value)) == 3


def read_histories(value: tuple[list[str], str, dict[str, Any]], folder: Path) -> None:
    lines, name, options = value
    (folder / "in.jsonl").write_bytes("\n".join(lines).encode("utf-8", "surrogatepass"))
    unchanged = listing(folder)
    try:
        recommend_file(recommender(), folder / "in.jsonl", folder / name, 2, **options)
    except MaskGRError:
        assert listing(folder) == unchanged, "something was written although it was refused"
        raise


def listing(folder: Path) -> list[str]:
    return sorted(str(path) for path in folder.rglob("*"))


def read_requests(value: tuple[str, list[Any], dict[str, Any]], folder: Path) -> None:
    verb, words, options = value
    getattr(recommender(), verb)(*words, **options)


def read_new_items(value: tuple[Any, ...], folder: Path) -> None:
    """New items and events for a trained model."""
    events, items = value
    own = trained()
    if items is not None:
        own.add_items(items)
    if events is not None:
        prepare(own, events, items)


@cache
def trained() -> Recommender:
    return Recommender.load(kept() / "recommender")


@cache
def served() -> Served:
    return Served("shop", "one", trained())


def read_bodies(value: tuple[str, str], folder: Path) -> None:
    from pydantic import ValidationError

    kind, text = value
    try:
        body = BODIES[kind].model_validate_json(text)
        asked = Asked.check(served(), body, "request", time.monotonic())
        asked.allowed()
        if kind == "recommend":
            recommend_job(asked, time.monotonic() + 60)
    except ValidationError as error:
        said = ProblemError.invalid(error)
        json.dumps(said.to_dict("request"), allow_nan=False)
        raise MaskGRError(said.detail) from None
    except ProblemError as error:
        raise MaskGRError(error.detail) from None


LOADERS: dict[str, Callable[[Path], Any]] = {
    "shop": Dataset.load,
    "sids": SemanticIds.load,
    "recommender": Recommender.load,
    "recommender/sids": SemanticIds.load,
}


def read_manifests(value: tuple[str, str, Any], folder: Path) -> None:
    """With right checksums: what a program that writes such folders itself could get wrong."""
    name, file, content = value
    own = folder / "artefact"
    shutil.copytree(kept() / name, own)
    (own / file).write_text(json.dumps(content))
    if file != MANIFEST:
        about = json.loads((own / MANIFEST).read_text())
        written = (own / file).read_bytes()
        about["files"][file] = {"bytes": len(written), "sha256": digest(written)}
        (own / MANIFEST).write_text(json.dumps(about))
    (own / "maskgr.sha256").write_text(f"{digest((own / MANIFEST).read_bytes())}  {MANIFEST}\n")
    LOADERS[name](own)


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


FIGURES = {  # as evaluate --json prints them
    "model": "maskgr",
    "split": "test",
    "users": 7,
    "retrieval": "generative",
    "order": None,
    "steps": 1,
    "protocols": {"all": {"recall@10": {"mean": 0.5, "half_width": 0.1}}},
}


def read_figures(value: Any, folder: Path) -> None:
    """What `evaluate --json` printed, for a model card."""
    (folder / "figures.json").write_text(json.dumps(value))
    Figures.read(folder / "figures.json", "maskgr")


def read_bytes(value: tuple[str, bytes], folder: Path) -> None:
    """A file of any content."""
    name, content = value
    (folder / name).write_bytes(content)
    if name.startswith("embeddings"):
        read_matrix(folder / name)
    elif name.startswith("histories"):
        recommend_file(recommender(), folder / name, folder / "o.jsonl", 2, unknown="skip")
    elif name == MANIFEST:
        (folder / "maskgr.sha256").write_text(f"{digest(content)}  {MANIFEST}\n")
        Dataset.load(folder)
    else:
        read_table(folder / name)
        Dataset.load(folder)


READERS: dict[str, tuple[st.SearchStrategy[Any], Callable[[Any, Path], object]]] = {
    "tables": (st.tuples(logs(), st.none() | catalogues(), formats, configs()), read_tables),
    "frames": (st.tuples(logs(), st.none() | catalogues(), configs(), st.booleans()), read_frames),
    "timestamps": (st.integers(1, 6).flatmap(lambda n: columns("timestamp", n)), read_times),
    "embeddings": (arrays() | vectors(), read_embeddings),
    "settings": (setting_pairs(), read_settings),
    "options": (option_texts, read_options),
    "where": (conditions, read_where),
    "histories": (history_lines(), read_histories),
    "requests": (requests(), read_requests),
    "new items": (
        st.tuples(st.none() | logs(), st.none() | frames("item_id", "title", "price", rows=3)),
        read_new_items,
    ),
    "bodies": (bodies(), read_bodies),
    "manifests": (st.deferred(manifests), read_manifests),
    "figures": (documents | changed(FIGURES), read_figures),
    "bytes": (st.deferred(spoiled), read_bytes),
}
