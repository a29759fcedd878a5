"""From item text to vectors: the encoder is a name in the configuration.

- `auto` (the default): `embeddings` where the dataset has some, else `wordllama`.
- `wordllama`: static word vectors, in the package, no network.
- `sentence-transformers:MODEL` and `huggingface:MODEL`: a name on the hub or a local folder.
- `embeddings`: nothing is encoded, the dataset's own matrix is used.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
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
from maskgr.sids.encoder_cache import EncoderCache, Vectors, text_key
from maskgr.sids.text import item_texts, require_text, without_text
from maskgr.sids.transformer_encoders import Encode

_NAMES = "wordllama, sentence-transformers:MODEL, huggingface:MODEL or embeddings"
_BATCHES_A_CALL = 4  # enough texts to sort by length, few enough to lose when killed


@dataclass(frozen=True)
class _Backend:
    identity: dict[str, Any]  # all that decides its vectors: the name of its cache
    load: Callable[[], Encode]  # called only if a text is not in the cache


def resolved(config: EncoderConfig, *, given: bool) -> EncoderConfig:
    """What `auto` stands for, where the dataset's own embeddings are `given` or not."""
    if config.encoder != "auto":
        return config
    return replace(config, encoder="embeddings" if given else "wordllama")


def embed_items(
    items: pl.DataFrame,
    config: EncoderConfig,
    *,
    embeddings: npt.NDArray[Any] | None = None,
    cache: Path | None = None,
    progress: bool = False,
) -> Vectors:
    """A vector for every row of the items table: `(items, d)`.

    From its text, or for the encoder `embeddings` the given matrix after checks. The arguments
    `cache` and `progress` are those of `encode_items`.
    """
    config = resolved(config, given=embeddings is not None)
    if config.encoder == "embeddings":
        if embeddings is None:
            raise RequestError(
                "the encoder is 'embeddings' and the dataset has none; put embeddings.npy beside "
                "its items, or name another encoder"
            )
        check_embeddings(embeddings, items["item_id"], "the dataset's matrix", Problems())
        return np.ascontiguousarray(embeddings, dtype=np.float32)
    texts = item_texts(items, config.template)
    require_text(texts, items["item_id"].cast(pl.String).to_list())
    return encode_items(texts, config, cache=cache, progress=progress)


def encode_items(
    texts: Sequence[str],
    config: EncoderConfig,
    *,
    cache: Path | None = None,
    progress: bool = False,
) -> Vectors:
    """A vector for every text: `(items, d)`.

    Equal texts are encoded once. With a `cache` folder, texts that this encoder has met before
    are not encoded again, and an interrupted call goes on where it was when called again.
    """
    config = resolved(config, given=False)
    _check_request(texts, config)
    backend = _backend(config)
    unique = list(dict.fromkeys(texts))
    keys = [text_key(text) for text in unique]
    store = EncoderCache(cache, backend.identity)
    table = _Table(len(unique))
    for rows, vectors in store.read({key: row for row, key in enumerate(keys)}):
        table.put(rows, vectors)
    # Longest first: if memory runs out it does so at once, and the remaining time only shrinks.
    missing = sorted(table.missing(), key=lambda row: -len(unique[row]))
    if missing:
        encode = backend.load()
        step = config.batch_size * _BATCHES_A_CALL
        with store, _progress_bar(len(missing), progress) as advance:
            for start in range(0, len(missing), step):
                rows = missing[start : start + step]
                vectors = encode([unique[row] for row in rows])
                _refuse_nan(vectors, [unique[row] for row in rows], texts, config)
                table.put(rows, vectors)
                store.add([keys[row] for row in rows], vectors)
                advance(len(rows))
    if len(unique) == len(texts):
        return table.vectors
    number = {text: row for row, text in enumerate(unique)}
    return table.vectors[[number[text] for text in texts]]


class _Table:
    """The vectors of the unique texts; their width is known when the first one arrives."""

    def __init__(self, rows: int) -> None:
        self.vectors: Vectors = np.empty((rows, 0), dtype=np.float32)
        self._filled = np.zeros(rows, dtype=np.bool_)  # (rows,)

    def put(self, rows: list[int], vectors: Vectors) -> None:
        if not self._filled.any():
            self.vectors = np.empty((len(self._filled), vectors.shape[1]), dtype=np.float32)
        self.vectors[rows] = vectors
        self._filled[rows] = True

    def missing(self) -> list[int]:
        return [int(row) for row in np.flatnonzero(~self._filled)]


def _check_request(texts: Sequence[str], config: EncoderConfig) -> None:
    for name in ("batch_size", "max_tokens"):
        if getattr(config, name) < 1:
            raise RequestError(f"{name} is {getattr(config, name)}; give 1 or more")
    dtypes = ("auto", "float32", "bfloat16", "float16")
    if config.dtype not in dtypes:
        raise RequestError(f"there is no dtype {config.dtype!r}; give one of {', '.join(dtypes)}")
    if not texts:
        raise DataError("there are no items to encode; check that the items table has rows")
    blank = without_text(texts)
    if blank:
        raise DataError(
            f"the text of row {blank[0]} is empty ({len(blank):,} of {len(texts):,} are); "
            "give every item a text, or drop these items"
        )


def _backend(config: EncoderConfig) -> _Backend:
    kind, _, model = config.encoder.partition(":")
    if config.encoder == "wordllama":
        return _Backend(_wordllama_identity(config), lambda: _load_wordllama(config))
    if kind == "huggingface" and model:
        identity = transformer_encoders.identity(model, config, "mean")
        return _Backend(identity, lambda: transformer_encoders.load_huggingface(model, config))
    if kind == "sentence-transformers" and model:
        identity = transformer_encoders.identity(model, config, "the model's own")
        return _Backend(
            identity, lambda: transformer_encoders.load_sentence_transformer(model, config)
        )
    if config.encoder == "embeddings":
        raise RequestError(
            "the encoder 'embeddings' reads the dataset's own matrix and cannot encode texts; "
            "name another encoder"
        )
    raise RequestError(f"there is no encoder {config.encoder!r}; give {_NAMES}")


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

    def encode(texts: list[str]) -> Vectors:
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


def _refuse_nan(
    vectors: Vectors, encoded: list[str], texts: Sequence[str], config: EncoderConfig
) -> None:
    bad = np.flatnonzero(~np.isfinite(vectors).all(axis=1))
    if len(bad):
        text = encoded[bad[0]]
        raise DataError(
            f"{config.encoder} gave NaN or infinity for row {list(texts).index(text)} "
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
