"""Generated inputs: tables, arrays, settings, conditions, histories, requests, manifests, files."""

from __future__ import annotations

import datetime as dt
import gzip
import json
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from hypothesis import strategies as st

from maskgr import Dataset
from maskgr.artefact import MANIFEST
from maskgr.data.config import SyntheticConfig
from maskgr.data.open import fetch
from maskgr.models.base import MODELS, model_class
from maskgr.serving import schemas
from maskgr.settings import setting_paths
from maskgr.sids.config import SidsConfig

KEPT = Path(__file__).parents[2] / "tests" / "artefacts"
ARTEFACTS = ("shop", "sids", "recommender", "recommender/sids")  # of a release


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


def mostly(usual: st.SearchStrategy[Any], odd: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """An odd value now and then: what is refused at once shows little."""
    return st.integers(0, 11).flatmap(lambda dice: usual if dice else odd)


KINDS: dict[str, tuple[st.SearchStrategy[Any], Any]] = {
    "ids": (ids, pl.String),
    "recent": (st.datetimes(dt.datetime(2020, 1, 1), dt.datetime(2026, 1, 1)), pl.Datetime("us")),
    "epoch": (st.integers(1_600_000_000, 1_700_000_000), pl.Int64),
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
    "user_id": ("ids", "small"),
    "item_id": ("ids",),
    "timestamp": ("recent", "epoch"),
    "position": ("small",),
    "weight": ("small",),
    "event_type": ("ids",),
    "title": ("ids", "text"),
    "price": ("real", "small"),
    "vectors": ("vectors",),
}


@st.composite
def columns(draw: st.DrawFn, name: str, rows: int) -> pl.Series:
    """A column of any kind, mostly of the usual one, with nulls."""
    usual = USUAL.get(name, tuple(KINDS))
    kind = draw(mostly(st.sampled_from(usual), st.sampled_from(sorted(KINDS))))
    values, dtype = KINDS[kind]
    if not draw(st.integers(0, 11)):
        values = values | st.none()
    drawn = draw(st.lists(values, min_size=rows, max_size=rows))
    try:
        return pl.Series(name, drawn, dtype=dtype, strict=False)
    except Exception:  # polars itself has no such column
        return pl.Series(name, [None] * rows, dtype=pl.String)


@st.composite
def frames(draw: st.DrawFn, *names: str, rows: int = 12) -> pl.DataFrame:
    """A table that has most of the columns `names`, and now and then others."""
    kept = [name for name in names if draw(st.integers(0, 40))]
    names_ = st.lists(texts.filter(lambda name: name not in names), max_size=2, unique=True)
    more = draw(mostly(st.just([]), names_))
    count = draw(mostly(st.integers(1, rows), st.just(0)))
    return pl.DataFrame([draw(columns(name, count)) for name in [*kept, *more]])


@st.composite
def logs(draw: st.DrawFn) -> pl.DataFrame:
    order = draw(st.sampled_from([("timestamp",), ("position",), ("timestamp", "position")]))
    more = draw(
        mostly(st.just([]), st.lists(st.sampled_from(["weight", "event_type"]), unique=True))
    )
    return draw(frames("user_id", "item_id", *order, *more))


@st.composite
def catalogues(draw: st.DrawFn) -> pl.DataFrame:
    """Mostly one row an item."""
    made = draw(frames("item_id", "title", "price", rows=6))
    if "item_id" in made.columns and not made["item_id"].dtype.is_nested() and draw(st.booleans()):
        made = made.unique("item_id", maintain_order=True)
    return made


def configs() -> st.SearchStrategy[dict[str, Any]]:
    """Options of a dataset, as keyword arguments."""
    names = st.sampled_from(["user_id", "item_id", "timestamp", "title", "weight"]) | texts
    unknown = {"unknown_items": st.sampled_from(["drop", "keep"])}
    good = {
        "k_core": st.integers(0, 2),
        "unused_items": st.sampled_from(["keep", "drop"]),
        "repeats": st.sampled_from(["keep", "drop", "dedupe"]),
    }
    odd = {
        "k_core": st.integers(-1, 4) | whole,
        "unknown_items": texts,
        "columns": st.dictionaries(names, names, max_size=2),
        "events": st.dictionaries(ids | texts, real | whole, max_size=3),
        "targets": st.lists(ids | texts, max_size=2),
        "text": st.lists(names, max_size=2),
    }
    usual = st.fixed_dictionaries(unknown, optional=good)
    return mostly(usual, st.fixed_dictionaries({}, optional=odd))


# JSON of any shape
plain = st.none() | st.booleans() | whole | real | texts
documents = st.recursive(
    plain,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=8,
)
pointless = st.just("\ud800")  # half a character: JSON has it, UTF-8 has not
listed = st.lists(ids, max_size=4)
histories = mostly(listed, st.lists(ids | plain | pointless, max_size=4) | documents)

WORDS = """price title item_id flag tags nothing 1 'a' null true - and or not = < >= <> + / % ( ) in
between like is case when then end cast as int abs( length( , * select from read_csv('/etc/passwd')
:: array_length(tags) 1e400 99999999999999999999 x'00'"""
PHRASES = ["price is null", "date '2024-01-01'", "interval '1 day'", "price < 30 and flag"]
where_words = st.sampled_from([*WORDS.split(), *PHRASES])
atoms = st.builds(
    "{} {} {}".format,
    st.sampled_from(["price", "title", "item_id", "flag", "tags", "nothing"]),
    st.sampled_from(["<", "=", "<>", ">=", "is", "in", "like", "and"]),
    st.sampled_from(["1", "1.5", "'a'", "null", "true", "price", "('a', 'b')", "'%a'"]),
)
joined = st.builds("({} {} {})".format, atoms, st.sampled_from(["and", "or", "and not"]), atoms)
loose = st.lists(where_words, max_size=9).map(" ".join) | texts | st.text(max_size=60)
conditions = atoms | joined | loose


@cache
def shop() -> Dataset:

    return fetch(
        "synthetic", synthetic=SyntheticConfig(users=12, items=6, max_length=8, mean_length=6)
    )


@cache
def kept() -> Path:
    """What the last release saved."""
    return max(path.parent for path in KEPT.glob("*/expected.json"))


def write_table(frame: pl.DataFrame, file: Path) -> None:
    """In the format of the file's name; where polars cannot write a column so, without it."""
    form = file.name.removesuffix(".gz").rpartition(".")[2]
    if form != "parquet":
        frame = frame.select(c for c in frame.columns if frame.schema[c] != pl.Binary)
    if form == "csv":
        frame = frame.select(c for c in frame.columns if not frame.schema[c].is_nested())
    writers = {"parquet": "write_parquet", "csv": "write_csv", "jsonl": "write_ndjson"}
    try:
        getattr(frame, writers[form])(file)
    except BaseException:  # polars panics for some
        file.write_text("")
    if file.suffix == ".gz":
        file.write_bytes(gzip.compress(file.read_bytes(), mtime=0))


formats = st.sampled_from(["parquet", "csv", "jsonl", "csv.gz", "jsonl.gz"])
DTYPES = "f4 f8 f2 i8 u1 ? c8 U3 S2 M8[s] m8[D] f4,i4 V3 g >f4"


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray[Any, Any]:
    shape = draw(st.sampled_from([(6, 3), (6, 0), (0, 3), (5, 3), (6,), (), (6, 3, 1)]))
    made = np.zeros(shape, dtype=draw(st.sampled_from(sorted(DTYPES.split()))))
    if made.dtype.kind == "f" and made.size:
        made[...] = 1
        with np.errstate(all="ignore"):
            made.flat[draw(st.integers(0, made.size - 1))] = draw(mostly(st.just(2.5), real))
    return made


@st.composite
def vectors(draw: st.DrawFn) -> pl.DataFrame:
    """Parquet with an item and its vector a row."""
    rows = draw(mostly(st.just(6), st.integers(0, 7)))
    ids_ = pl.Series("item_id", (shop().item_ids.to_list() * 2)[:rows])
    return pl.DataFrame(
        [draw(mostly(st.just(ids_), columns("item_id", rows))), draw(columns("vectors", rows))]
    )


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


typed = st.lists(ids | texts | st.sampled_from(["=", ",", "a=1", "user_id=u", "a=-1"]), max_size=4)
option_texts = st.fixed_dictionaries(
    {name: st.none() | typed.map(",".join) for name in ("columns", "events", "targets", "text")}
)


@st.composite
def history_lines(draw: st.DrawFn) -> tuple[list[str], str, dict[str, Any]]:
    users = mostly(ids, plain | pointless)
    good = st.fixed_dictionaries({"user_id": users, "history": histories})
    odd = st.builds(json.dumps, documents) | texts | st.just("[" * 10_000)
    lines = mostly(st.builds(json.dumps, good), odd)
    options = st.fixed_dictionaries(
        {}, optional={"unknown": st.sampled_from(["skip", "raise"]), "where": conditions}
    )
    name = st.sampled_from(["o.jsonl", "o.parquet"])
    return draw(st.lists(lines, max_size=4)), draw(name), draw(options)


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, list[Any], dict[str, Any]]:
    verb = draw(st.sampled_from(["recommend", "recommend_users", "similar_items", "digits_of"]))
    some = mostly(st.lists(ids, max_size=3), st.lists(ids | plain, max_size=3) | documents)
    options = {
        "exclude_seen": mostly(st.booleans(), plain),
        "allow": some,
        "deny": some,
        "where": conditions,
        "unknown": mostly(st.sampled_from(["raise", "skip"]), texts),
    }
    kept_ = st.fixed_dictionaries({}, optional=options if verb == "recommend" else {})
    usual = {"recommend": histories, "recommend_users": st.lists(st.just("u"), max_size=2)}
    first = mostly(usual.get(verb, ids), histories | st.lists(histories, max_size=2) | plain)
    asks = verb != "digits_of" and draw(st.booleans())
    top = [draw(mostly(st.integers(0, 4), plain))] if asks else []
    return verb, [draw(first), *top], draw(kept_)


BODIES = {
    "recommend": schemas.RecommendRequest,
    "sessions": schemas.SessionsRequest,
    "explain": schemas.ExplainRequest,
}


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


@cache
def json_files() -> tuple[tuple[str, str], ...]:
    """An artefact and a JSON file of it, for each."""
    return tuple(
        (name, file.name) for name in ARTEFACTS for file in sorted((kept() / name).glob("*.json"))
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
