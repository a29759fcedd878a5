"""Item text to vectors, by the encoder that the configuration names.

- `auto` (the default): `embeddings` where the dataset has some, else `wordllama`.
- `wordllama`: static word vectors, shipped with the package, no network needed.
- `sentence-transformers:MODEL` and `huggingface:MODEL`: a name on the hub or a local folder.
- `embeddings`: nothing is encoded, the dataset's own matrix is used.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from maskgr.data.embeddings import check_embeddings
from maskgr.data.problems import Problems
from maskgr.errors import DataError, RequestError
from maskgr.sids import transformer_encoders
from maskgr.sids.config import EncoderConfig
from maskgr.sids.encoder_cache import EncoderCache, text_key
from maskgr.sids.text import item_texts
from maskgr.sids.transformer_encoders import Encode
from maskgr.sids.vectors import Floats

_BATCHES_PER_CALL = 4  # enough texts to sort by length, few enough to lose when killed


# Encodes lists of texts, each at once: the number of a list and its vectors, in any order.
EncodeAll = Callable[[EncoderConfig, str, Sequence[list[str]]], Iterator[tuple[int, Floats]]]


class NoTextError(DataError):
    """No item has any text."""


@dataclass(frozen=True)
class _Backend:
    identity: dict[str, Any]  # everything that determines its vectors: the key of its cache
    load: Callable[[], Encode]  # called only if a text is not in the cache


def resolved(config: EncoderConfig, *, given: bool) -> EncoderConfig:
    """Replaces the encoder `auto`: the dataset's own embeddings if `given`, else WordLlama."""
    if config.encoder != "auto":
        return config
    return replace(config, encoder="embeddings" if given else "wordllama")


def embed_items(
    items: pl.DataFrame,
    config: EncoderConfig,
    *,
    embeddings: npt.NDArray[Any] | None = None,
    device: str = "auto",
    cache: Path | None = None,
    progress: bool = False,
    encode_all: EncodeAll | None = None,
) -> Floats:
    """(items, d) a vector for every row of the items table.

    The encoder `embeddings` returns the given matrix after checks, all others encode the items'
    texts. The other arguments are those of `encode_items`.
    """
    if items.is_empty():
        raise DataError("there are no items to encode; check that the items table has rows")
    config = resolved(config, given=embeddings is not None)
    if config.encoder == "embeddings":
        if embeddings is None:
            raise RequestError(
                "the encoder is 'embeddings' and the dataset has none; put embeddings.npy beside "
                "its items, or name another encoder"
            )
        check_embeddings(embeddings, items["item_id"], "the dataset's matrix", Problems())
        return np.ascontiguousarray(embeddings, dtype=np.float32)
    how: dict[str, Any] = {"device": device, "cache": cache, "progress": progress}
    how["encode_all"] = encode_all
    texts = item_texts(items, config.template, config.text)
    known = np.array([bool(text) and not text.isspace() for text in texts])
    if known.all():
        return encode_items(texts, config, **how)
    if not known.any():
        raise NoTextError(
            f"none of the {len(texts):,} items has text; fill in a column, or name others with "
            "--text or a template"
        )
    warnings.warn(
        f"{len(texts) - known.sum():,} of {len(texts):,} items have no text (first: "
        f"{items['item_id'][int(known.argmin())]!r}); they get the mean of the others' vectors",
        stacklevel=2,
    )
    some = [text for text, own in zip(texts, known, strict=True) if own]
    encoded = encode_items(some, config, **how)
    vectors = np.tile(encoded.mean(axis=0), (len(texts), 1))
    vectors[known] = encoded
    return vectors


def encode_items(
    texts: Sequence[str],
    config: EncoderConfig,
    *,
    device: str = "auto",
    cache: Path | None = None,
    progress: bool = False,
    encode_all: EncodeAll | None = None,
) -> Floats:
    """(texts, d) a vector for every text.

    Models run on the `device` (WordLlama always on the CPU). Equal texts are encoded once. With a
    `cache` folder, texts that this encoder has met before are not encoded again, and an
    interrupted call continues where it stopped when it is called again. `encode_all` encodes
    elsewhere than in this process.
    """
    config = resolved(config, given=False)
    backend = _backend(config, device)
    unique = list(dict.fromkeys(texts))
    keys = [text_key(text) for text in unique]
    store = EncoderCache(cache, backend.identity)
    table = _Table(len(unique))
    for rows, vectors in store.read({key: row for row, key in enumerate(keys)}):
        table.put(rows, vectors)
    # Longest first: if memory runs out it does so at once, and the remaining time only shrinks.
    missing = sorted(table.missing(), key=lambda row: -len(unique[row]))
    if missing:
        step = config.batch_size * _BATCHES_PER_CALL
        calls = [missing[start : start + step] for start in range(0, len(missing), step)]
        lists = [[unique[row] for row in rows] for rows in calls]
        with store, _progress_bar(len(missing), progress) as advance:
            for call, vectors in (encode_all or _encode_here)(config, device, lists):
                rows = calls[call]
                _refuse_nan(vectors, lists[call], texts, config.encoder)
                table.put(rows, vectors)
                store.add([keys[row] for row in rows], vectors)
                advance(len(rows))
    if len(unique) == len(texts):
        return table.vectors
    number = {text: row for row, text in enumerate(unique)}
    return table.vectors[[number[text] for text in texts]]


def load_encoder(config: EncoderConfig, device: str) -> Encode:
    """The model that turns a list of texts into (texts, d) vectors."""
    return _backend(config, device).load()


def _encode_here(
    config: EncoderConfig, device: str, calls: Sequence[list[str]]
) -> Iterator[tuple[int, Floats]]:
    return enumerate(map(load_encoder(config, device), calls))


class _Table:
    """The vectors of the unique texts; their width is known when the first one arrives."""

    def __init__(self, rows: int) -> None:
        self.vectors: Floats = np.empty((rows, 0), dtype=np.float32)
        self._filled = np.zeros(rows, dtype=np.bool_)  # (rows,)

    def put(self, rows: list[int], vectors: Floats) -> None:
        if not self._filled.any():
            self.vectors = np.empty((len(self._filled), vectors.shape[1]), dtype=np.float32)
        self.vectors[rows] = vectors
        self._filled[rows] = True

    def missing(self) -> list[int]:
        return [int(row) for row in np.flatnonzero(~self._filled)]


def _backend(config: EncoderConfig, device: str) -> _Backend:
    if config.encoder == "wordllama":
        return _Backend(_wordllama_identity(config), lambda: _load_wordllama(config))
    kind, _, model = config.encoder.partition(":")
    if kind == "huggingface":
        pooling, load = "mean", transformer_encoders.load_huggingface
    else:
        assert kind == "sentence-transformers", config.encoder
        pooling, load = "the model's own", transformer_encoders.load_sentence_transformer
    identity = transformer_encoders.identity(model, config, device, pooling)
    return _Backend(identity, lambda: load(model, config, device))


def _wordllama_identity(config: EncoderConfig) -> dict[str, Any]:
    version = importlib.metadata.version("wordllama")
    return {"encoder": "wordllama", "version": version, "max_tokens": config.max_tokens}


def _load_wordllama(config: EncoderConfig) -> Encode:
    with _root_logger_untouched():
        import wordllama  # type: ignore[import-untyped]

    # The weights ship in the wheel; the tokenizer does too, but is only found as a "cache".
    folder = Path(wordllama.__file__).parent
    model = wordllama.WordLlama.load(cache_dir=folder, disable_download=True)
    model.tokenizer.enable_truncation(config.max_tokens)

    def encode(texts: list[str]) -> Floats:
        return np.asarray(model.embed(texts, batch_size=config.batch_size), dtype=np.float32)

    return encode


@contextlib.contextmanager
def _root_logger_untouched() -> Iterator[None]:
    # Importing wordllama calls logging.basicConfig, which would turn on the info messages of
    # every library in the user's program.
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


def _refuse_nan(vectors: Floats, encoded: list[str], texts: Sequence[str], encoder: str) -> None:
    bad = np.flatnonzero(~np.isfinite(vectors).all(axis=1))
    if len(bad):
        text = encoded[bad[0]]
        raise DataError(
            f"{encoder} gave NaN or infinity for row {list(texts).index(text)} "
            f"({text[:60]!r}) and {len(bad) - 1:,} more; give dtype float32 or another encoder"
        )


@contextlib.contextmanager
def _progress_bar(total: int, shown: bool) -> Iterator[Callable[[int], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    columns = ("encoding item texts", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not shown) as bar:
        task = bar.add_task("encoding", total=total)
        yield lambda done: bar.advance(task, done)
