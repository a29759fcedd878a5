"""Generated inputs for every reader: each is accepted, or refused by one sentence.

    python benchmarks/fuzz.py [--inputs 10000] [--only tables,where] [--seed 0] [--quick] [--json]

hypothesis makes tables, settings, requests and manifests; atheris (`pip install 'maskgr[fuzz]'`)
changes the bytes of files, led by the code that they reach. Exit code 1 where an input ended in
anything but a result or a MaskGRError of one sentence, took too long, or was refused only after
something had been written. tests/test_fuzz.py has a few hundred of these inputs.
"""

from __future__ import annotations

import argparse
import datetime as dt
import faulthandler
import gzip
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from maskgr import Dataset, Recommender
from maskgr.artefact import MANIFEST
from maskgr.cli.options import data_config
from maskgr.data.config import DataConfig, SyntheticConfig
from maskgr.data.embeddings import align_embeddings
from maskgr.data.open import inspect_data
from maskgr.data.problems import Problems
from maskgr.data.tables import read_matrix, read_table
from maskgr.errors import MaskGRError
from maskgr.models.base import MODELS, model_class
from maskgr.serving import schemas
from maskgr.serving.answers import Asked, recommend_job
from maskgr.serving.batch import recommend_file
from maskgr.serving.model_card import Figures
from maskgr.serving.problems import ProblemError
from maskgr.serving.served import Served
from maskgr.settings import apply_settings, setting_paths
from maskgr.sids.config import SidsConfig
from maskgr.sids.semantic_ids import SemanticIds
from maskgr.update import prepare
from maskgr.where import matching

KEPT = Path(__file__).parents[1] / "tests" / "artefacts"
SECONDS = 60.0  # that no input may take
LONGEST = 2000  # characters of a sentence
BYTES = 0.3  # of all inputs are made by atheris


# What is generated

odd_texts = st.sampled_from(
    ["", " ", "\0", "a\nb", "é", "日本", "\U0001f9e6", "e\u0301", "nan", "inf", "1e999", "007", "7",
     "-0", "null", "2024-02-30", "31/12/2024", "2024-05-01T12:30:00+25:00", "x" * 5000, "'; --"]
)  # fmt: skip
texts = odd_texts | st.text(max_size=8)
whole = st.integers(-(2**63), 2**63 - 1) | st.integers(-3, 3) | st.sampled_from([10**9, 10**18])
real = st.floats(allow_nan=True, allow_infinity=True) | st.sampled_from([1.5, 1e9, 1e308, -0.0])
dates = st.dates() | st.just(dt.date(2024, 5, 1))
moments = st.datetimes() | st.just(dt.datetime(2024, 5, 1, 12, 30))
ids = st.sampled_from(["a", "b", "c", "d"])
KINDS: dict[str, tuple[st.SearchStrategy[Any], Any]] = {
    "ids": (ids, pl.String),
    "text": (texts, pl.String),
    "whole": (whole, pl.Int64),
    "small": (st.integers(0, 5), pl.UInt8),
    "real": (real, pl.Float64),
    "float32": (real, pl.Float32),
    "flag": (st.booleans(), pl.Boolean),
    "date": (dates, pl.Date),
    "moment": (moments, pl.Datetime("us")),
    "zoned": (moments, pl.Datetime("ns", "Europe/Berlin")),
    "time": (st.times(), pl.Time),
    "span": (st.timedeltas(), pl.Duration("us")),
    "decimal": (st.decimals(-1000, 1000, places=2), pl.Decimal(20, 2)),
    "bytes": (st.binary(max_size=4), pl.Binary),
    "category": (ids, pl.Categorical),
    "list": (st.lists(texts, max_size=3), pl.List(pl.String)),
    "vectors": (st.lists(real, min_size=2, max_size=2), pl.Array(pl.Float64, 2)),
    "struct": (st.fixed_dictionaries({"x": whole}), pl.Struct({"x": pl.Int64})),
    "nothing": (st.none(), pl.Null),
}
USUAL = {  # column -> the kinds that it mostly has
    "user_id": ("ids", "whole"),
    "item_id": ("ids",),
    "timestamp": ("moment", "whole", "text"),
    "position": ("small",),
    "weight": ("real", "small"),
    "event_type": ("ids",),
}


@st.composite
def columns(draw: st.DrawFn, name: str, rows: int) -> pl.Series:
    """A column of any kind, mostly of the usual one, with nulls."""
    usual = USUAL.get(name, tuple(KINDS))
    kind = draw(st.sampled_from(usual) | st.sampled_from(sorted(KINDS)))
    values, dtype = KINDS[kind]
    holes = draw(st.sampled_from([0, 0, 0, 1]))
    values = values | st.none() if holes else values
    drawn = draw(st.lists(values, min_size=rows, max_size=rows))
    try:
        return pl.Series(name, drawn, dtype=dtype, strict=False)
    except Exception:  # polars itself has no such column
        return pl.Series(name, [None] * rows, dtype=pl.String)


@st.composite
def frames(draw: st.DrawFn, *names: str, rows: int = 12) -> pl.DataFrame:
    """A table that has most of the columns `names`, and now and then others."""
    kept = [name for name in names if draw(st.integers(0, 19)) > 0]
    more = draw(st.lists(texts.filter(lambda name: name not in names), max_size=2, unique=True))
    count = draw(st.integers(0, rows))
    return pl.DataFrame([draw(columns(name, count)) for name in [*kept, *more]])


@st.composite
def logs(draw: st.DrawFn) -> pl.DataFrame:
    order = draw(st.sampled_from([("timestamp",), ("position",), ("timestamp", "position"), ()]))
    more = draw(st.lists(st.sampled_from(["weight", "event_type"]), unique=True))
    return draw(frames("user_id", "item_id", *order, *more))


catalogues = frames("item_id", "title", "price", rows=6)


def configs() -> st.SearchStrategy[dict[str, Any]]:
    """Options of a dataset, as keyword arguments."""
    names = st.sampled_from(["user_id", "item_id", "timestamp", "title", "weight"]) | texts
    return st.fixed_dictionaries(
        {},
        optional={
            "k_core": st.integers(-1, 4),
            "unknown_items": st.sampled_from(["error", "drop", "keep", "x"]),
            "unused_items": st.sampled_from(["keep", "drop", "error"]),
            "repeats": st.sampled_from(["keep", "drop", "dedupe"]),
            "columns": st.dictionaries(names, names, max_size=2),
            "events": st.dictionaries(ids | texts, real | whole, max_size=3),
            "targets": st.lists(ids | texts, max_size=2),
            "text": st.lists(names, max_size=2),
        },
    )


# JSON of any shape
plain = st.none() | st.booleans() | whole | real | texts
documents = st.recursive(
    plain,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=8,
)
pointless = st.just("\ud800")  # half a character: JSON has it, UTF-8 has not
histories = st.lists(ids | plain | pointless, max_size=4) | documents

LEAVES = ("price", "title", "item_id", "flag", "tags", "nothing", "1", "'a'", "null", "true", "-")
where_words = st.sampled_from(
    [*LEAVES, "and", "or", "not", "=", "<", ">=", "<>", "+", "/", "%", "(", ")", "in", "between",
     "like", "is", "case", "when", "then", "end", "cast", "as", "int", "abs(", "length(", ",", "*",
     "select", "from", "read_csv('/etc/passwd')", "date '2024-01-01'", "interval '1 day'", "::",
     "array_length(tags)", "1e400", "99999999999999999999", "x'00'", "price is null"]
)  # fmt: skip
conditions = st.lists(where_words, max_size=9).map(" ".join) | texts | st.text(max_size=60)


# What reads it. Each takes a generated value and an empty folder; what it returns does not matter.


@cache
def shop() -> Dataset:
    from maskgr.data.open import fetch

    return fetch("synthetic", synthetic=SyntheticConfig(users=12, items=6, max_length=8))


@cache
def recommender(model: str = "neighbours") -> Recommender:
    log = [("u", item, n) for n, item in enumerate("abcdab")]
    frame = pl.DataFrame(log, schema=["user_id", "item_id", "position"], orient="row")
    items = pl.DataFrame({"item_id": ["a", "b", "c", "d"], "title": ["A", "B", "C", "D"]})
    return Recommender.train(Dataset.from_frames(frame, items), model=model)


@cache
def kept() -> Path:
    """What the last release saved."""
    return max(path.parent for path in KEPT.glob("*/expected.json"))


def write_table(frame: pl.DataFrame, file: Path) -> None:
    """In the format of the file's name; where polars cannot write a column so, without it."""
    form = file.name.removesuffix(".gz").rpartition(".")[2]
    if form == "csv":
        frame = frame.select(c for c in frame.columns if not frame.schema[c].is_nested())
        frame = frame.select(c for c in frame.columns if frame.schema[c] != pl.Binary)
    writers = {"parquet": "write_parquet", "csv": "write_csv", "jsonl": "write_ndjson"}
    try:
        getattr(frame, writers[form])(file)
    except BaseException:  # polars panics for some
        file.write_text("")
    if file.suffix == ".gz":
        file.write_bytes(gzip.compress(file.read_bytes(), mtime=0))


formats = st.sampled_from(["parquet", "csv", "jsonl", "csv.gz", "jsonl.gz"])


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


ARRAYS = st.sampled_from(
    ["f4", "f8", "f2", "i8", "u1", "?", "c8", "U3", "S2", "M8[s]", "m8[D]", "f4,i4", "V3", "g", ">f4"]
)


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray[Any, Any]:
    shape = draw(st.sampled_from([(6, 3), (6, 0), (0, 3), (5, 3), (6,), (), (6, 3, 1)]))
    made = np.zeros(shape, dtype=draw(ARRAYS))
    if made.dtype.kind == "f" and made.size and draw(st.booleans()):
        made[...] = 1
        made.flat[draw(st.integers(0, made.size - 1))] = draw(real)
    return made


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


@st.composite
def setting_pairs(draw: st.DrawFn) -> tuple[Any, list[str]]:
    kinds = [SyntheticConfig(), SidsConfig()]
    for name in MODELS:
        kinds += model_class(name).presets.values()
    config = draw(st.sampled_from(kinds))
    keys = st.sampled_from([".".join(path) for path in setting_paths(config)])
    ends = keys.map(lambda key: key.rpartition(".")[2])
    values = whole.map(str) | real.map(str) | texts | st.sampled_from(["true", "auto", "1_0", "٣"])
    pairs = st.tuples(keys | ends | texts, values).map("=".join) | texts
    return config, draw(st.lists(pairs, max_size=3))


def read_settings(value: tuple[Any, list[str]], folder: Path) -> None:
    apply_settings(*value)


def read_options(value: dict[str, str], folder: Path) -> None:
    """The options of commands, as they are typed."""
    data_config(0, "error", "keep", "keep", **value)


typed = st.lists(ids | texts | st.sampled_from(["=", ",", "a=1", "user_id=u", "a=-1"]), max_size=4)
option_texts = st.fixed_dictionaries(
    {name: st.none() | typed.map(",".join) for name in ("columns", "events", "targets", "text")}
)


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


@st.composite
def history_lines(draw: st.DrawFn) -> tuple[list[str], str, dict[str, Any]]:
    good = st.fixed_dictionaries({"user_id": ids | plain | pointless, "history": histories})
    lines = st.builds(json.dumps, good | documents) | texts | st.just("[" * 10_000)
    options = st.fixed_dictionaries(
        {}, optional={"unknown": st.sampled_from(["skip", "raise"]), "where": conditions}
    )
    name = st.sampled_from(["o.jsonl", "o.parquet"])
    return draw(st.lists(lines, max_size=4)), draw(name), draw(options)


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


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, list[Any], dict[str, Any]]:
    verb = draw(st.sampled_from(["recommend", "recommend_users", "similar_items", "digits_of"]))
    some = st.lists(ids | plain, max_size=3) | documents
    options = {
        "exclude_seen": st.booleans() | plain,
        "allow": some,
        "deny": some,
        "where": conditions,
        "unknown": st.sampled_from(["raise", "skip"]) | texts,
    }
    kept_ = st.fixed_dictionaries({}, optional=options if verb == "recommend" else {})
    first = histories | st.lists(histories, max_size=2)
    top = [draw(st.integers(0, 6) | plain)] if draw(st.booleans()) and verb != "digits_of" else []
    return verb, [draw(first), *top], draw(kept_)


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


BODIES = {
    "recommend": schemas.RecommendRequest,
    "sessions": schemas.SessionsRequest,
    "explain": schemas.ExplainRequest,
}


@cache
def served() -> Served:
    return Served("shop", "one", trained())


@st.composite
def bodies(draw: st.DrawFn) -> tuple[str, str]:
    kind = draw(st.sampled_from(sorted(BODIES)))
    some = st.lists(st.sampled_from(["SKU-00001", "SKU-00002", "x"]) | whole, max_size=3)
    values = {
        "history": some,
        "allow": some,
        "deny": some,
        "where": conditions,
        "top": st.integers(0, 600),
        "steps": st.integers(0, 9),
        "beams": st.integers(0, 2000),
        "fields": st.lists(st.sampled_from(["title", "price", "x"]), max_size=2),
    }
    names = st.sampled_from(list(BODIES[kind].model_fields))
    any_values = {name: own | documents for name, own in values.items()}
    body = draw(st.fixed_dictionaries({}, optional=any_values))
    body |= draw(st.dictionaries(names, documents, max_size=1))
    return kind, json.dumps(draw(st.just(body) | documents))


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


@cache
def json_files() -> tuple[tuple[str, str], ...]:
    """An artefact and a JSON file of it, for each."""
    return tuple(
        (name, file.name) for name in LOADERS for file in sorted((kept() / name).glob("*.json"))
    )


@st.composite
def manifests(draw: st.DrawFn) -> tuple[str, str, Any]:
    """A JSON file of an artefact with some values changed, removed or added."""
    name, file = draw(st.sampled_from(json_files()))
    content = json.loads((kept() / name / file).read_text())
    for _ in range(draw(st.integers(1, 3))):
        content = draw(changed(content))
    return name, file, content


@st.composite
def changed(draw: st.DrawFn, value: Any) -> Any:
    """The same document with one change somewhere in it."""
    if isinstance(value, dict) and value and draw(st.integers(0, 9)):
        key = draw(st.sampled_from(sorted(value)))
        if not draw(st.integers(0, 5)):
            return {name: own for name, own in value.items() if name != key}
        return {**value, key: draw(changed(value[key]))}
    if isinstance(value, list) and value and draw(st.integers(0, 9)):
        place = draw(st.integers(0, len(value) - 1))
        return [*value[:place], draw(changed(value[place])), *value[place + 1 :]]
    return draw(documents)


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


def read_figures(value: Any, folder: Path) -> None:
    """What `evaluate --json` printed, for a model card."""
    (folder / "figures.json").write_text(json.dumps(value))
    Figures.read(folder / "figures.json", "maskgr")


# Files as bytes


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


@cache
def good_files() -> dict[str, bytes]:
    """A small file of each kind, to be changed."""
    with tempfile.TemporaryDirectory() as folder:
        log = shop().interactions().head(8)
        for form in ("parquet", "csv", "jsonl", "csv.gz"):
            write_table(log, Path(folder) / f"interactions.{form}")
        np.save(Path(folder) / "embeddings.npy", np.ones((2, 2), dtype=np.float32))
        lists = pl.DataFrame({"item_id": ["a", "b"], "vector": [[1.0, 2.0], [3.0, 4.0]]})
        lists.write_parquet(Path(folder) / "embeddings.parquet")
        line = '{"user_id": 1, "history": ["a"]}\n'
        (Path(folder) / "histories.jsonl").write_text(2 * line)
        shutil.copy(kept() / "shop" / MANIFEST, folder)
        return {file.name: file.read_bytes() for file in sorted(Path(folder).iterdir())}


@st.composite
def spoiled(draw: st.DrawFn) -> tuple[str, bytes]:
    """A good file with bytes changed, inserted or cut."""
    name = draw(st.sampled_from(sorted(good_files())))
    content = bytearray(good_files()[name])
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, len(content)))
        much = draw(st.integers(0, 8))
        content[place : place + much] = draw(st.binary(max_size=8))
    return name, bytes(content[: draw(st.integers(0, len(content)) | st.just(len(content)))])


READERS: dict[str, tuple[st.SearchStrategy[Any], Callable[[Any, Path], object]]] = {
    "tables": (st.tuples(logs(), st.none() | catalogues, formats, configs()), read_tables),
    "frames": (st.tuples(logs(), st.none() | catalogues, configs(), st.booleans()), read_frames),
    "timestamps": (st.integers(1, 6).flatmap(lambda n: columns("timestamp", n)), read_times),
    "embeddings": (arrays() | frames("item_id", "vectors", rows=6), read_embeddings),
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
    "figures": (documents, read_figures),
    "bytes": (st.deferred(spoiled), read_bytes),
}


# Counting


@dataclass
class Tally:
    reader: str
    accepted: int = 0
    refused: int = 0
    failures: dict[str, str] = field(default_factory=dict)  # what happened -> the shortest input

    @property
    def inputs(self) -> int:
        return self.accepted + self.refused


def try_input(
    read: Callable[[Any, Path], object], value: Any, folder: Path, tally: Tally, seconds: float
) -> None:
    """Reads one input in an empty folder and notes what became of it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    faulthandler.dump_traceback_later(seconds, exit=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            read(value, folder)
        tally.accepted += 1
    except MaskGRError as error:
        tally.refused += 1
        said = str(error)
        if "\n" in said or not said.strip() or len(said) > LONGEST:
            note(tally, f"not one sentence: {said[:200]!r}", value)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # polars' panics are no Exceptions
        tally.refused += 1
        frames_ = traceback.extract_tb(error.__traceback__)
        ours = [f for f in frames_ if "maskgr" in f.filename] or frames_
        where = f"{Path(ours[-1].filename).name}:{ours[-1].lineno}"
        note(tally, f"{type(error).__name__} at {where}: {str(error)[:150]!r}", value)
    finally:
        faulthandler.cancel_dump_traceback_later()


def note(tally: Tally, what: str, value: Any) -> None:
    shown = repr(value)
    if what not in tally.failures or len(shown) < len(tally.failures[what]):
        tally.failures[what] = shown[:1000]


def fuzz(
    name: str, inputs: int, number: int, folder: Path, seconds: float = SECONDS
) -> Tally:
    """`inputs` generated inputs for one reader, the same for the same seed."""
    values, read = READERS[name]
    tally = Tally(name)

    @seed(number)
    @settings(
        max_examples=inputs,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(values)
    def run(value: Any) -> None:
        try_input(read, value, folder / "input", tally, seconds)

    run()
    return tally


# atheris: in a process of its own, which it ends


def fuzz_bytes(name: str, inputs: int, number: int, folder: Path, seconds: float) -> Tally:
    """The file `name` with bytes that atheris chooses."""
    corpus, report = folder / "corpus", folder / "report.json"
    shutil.rmtree(corpus, ignore_errors=True)
    corpus.mkdir()
    (corpus / "good").write_bytes(good_files()[name])
    report.unlink(missing_ok=True)
    words = ["--bytes", name, "--inputs", str(inputs), "--seed", str(number), "--folder", folder]
    done = subprocess.run(
        [sys.executable, __file__, *map(str, words), "--seconds", str(seconds)],
        capture_output=True,
        text=True,
        errors="replace",
    )
    tally = Tally(f"bytes of {name}")
    if report.exists():
        tally = Tally(**json.loads(report.read_text()))
    if done.returncode or not report.exists():
        tally.failures[f"exit code {done.returncode}"] = done.stderr[-1000:]
    return tally


def run_atheris(name: str, inputs: int, number: int, folder: Path, seconds: float) -> None:
    import atheris

    tally = Tally(f"bytes of {name}")
    report = folder / "report.json"

    def one(content: bytes) -> None:
        try_input(read_bytes, (name, content), folder / "input", tally, seconds)
        if tally.inputs % 50 == 0 or tally.inputs >= inputs:
            report.write_text(json.dumps(asdict(tally)))

    for module in ("tables", "ingest", "timestamps", "embeddings", "events", "dataset"):
        for own in vars(sys.modules[f"maskgr.data.{module}"]).values():
            if getattr(own, "__module__", None) == f"maskgr.data.{module}" and callable(own):
                if hasattr(own, "__code__"):
                    atheris.instrument_func(own)
    limits = [f"-runs={inputs}", f"-seed={number + 1}", "-max_len=4096", "-rss_limit_mb=4096"]
    atheris.Setup([sys.argv[0], *limits, "-verbosity=0", str(folder / "corpus")], one)
    atheris.Fuzz()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--inputs", type=int, default=10_000, help="over all readers")
    parser.add_argument("--only", help=f"some of {', '.join(READERS)}, atheris")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="that an input may take")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="a few of each: does it run?")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--bytes", help=argparse.SUPPRESS)  # in the process that atheris ends
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    random.seed(options.seed)
    if options.bytes:
        words = (options.bytes, options.inputs, options.seed, options.folder, options.seconds)
        run_atheris(*words)
        return
    if options.quick:
        options.inputs = 300
    os.environ["MASKGR_CACHE"] = "/nonexistent"  # nothing is cached, nobody's cache is read
    with tempfile.TemporaryDirectory(prefix="maskgr-fuzz-") as folder:
        tallies = fuzz_all(options, Path(folder))
    if options.json:
        print(json.dumps([asdict(tally) for tally in tallies], indent=2))
    else:
        show(tallies)
    failures = [(t.reader, what, value) for t in tallies for what, value in t.failures.items()]
    for reader, what, value in failures:
        print(f"FAILED: {reader}: {what}\n    {value}", file=sys.stderr)
    sys.exit(1 if failures else 0)


def fuzz_all(options: argparse.Namespace, folder: Path) -> list[Tally]:
    asked = set(options.only.split(",")) if options.only else {*READERS, "atheris"}
    if unknown := asked - {*READERS, "atheris"}:
        sys.exit(f"{', '.join(unknown)}: choose from {', '.join((*READERS, 'atheris'))}")
    readers = [name for name in READERS if name in asked]
    files = list(good_files()) if "atheris" in asked else []
    if files and find_spec("atheris") is None:
        print("atheris is not installed (maskgr[fuzz]): its share is left out", file=sys.stderr)
        files = []
    share = (BYTES if readers else 1.0) if files else 0.0
    tallies = []
    for name in readers:
        count = max(1, round(options.inputs * (1 - share) / len(readers)))
        tallies.append(fuzz(name, count, options.seed, folder, options.seconds))
    for name in files:
        count = max(1, round(options.inputs * share / len(files)))
        tallies.append(fuzz_bytes(name, count, options.seed, folder, options.seconds))
    return tallies


def show(tallies: list[Tally]) -> None:
    rows = [(t.reader, t.inputs, t.accepted, t.refused, len(t.failures)) for t in tallies]
    total = [sum(column) for column in list(zip(*rows, strict=True))[1:]]
    print(f"{'reader':32}{'inputs':>8}{'accepted':>10}{'refused':>9}{'failures':>10}")
    for name, *numbers in [*rows, ("all", *total)]:
        inputs, accepted, refused, failures = numbers
        print(f"{name:32}{inputs:8,}{accepted:10,}{refused:9,}{failures:10,}")


if __name__ == "__main__":
    main()
