"""SemanticIds: the table item <-> digits, and all that is needed to give new items theirs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
import polars as pl

from maskgr.artefact import read_manifest, write_folder
from maskgr.data.dataset import Dataset
from maskgr.data.download import cache_folder
from maskgr.data.tables import below, read_matrix, read_table
from maskgr.errors import ArtefactError, DataError, RequestError
from maskgr.sids.collaborative import Collaborative
from maskgr.sids.config import EncoderConfig, QuantizerConfig
from maskgr.sids.encoders import embed_items, resolved
from maskgr.sids.quantizers import Quantizer, fit_quantizer, load_quantizer, save_quantizer
from maskgr.sids.uniqueness import Policy, make_unique, place_new
from maskgr.sids.vectors import Digits, Floats

KIND, SCHEMA = "semantic-ids", 1


@dataclass(frozen=True, eq=False)
class SemanticIds:
    """Row `i` of every table is item `i` of the dataset that the IDs were made for."""

    items: pl.DataFrame  # item_id first, then the text columns
    digits: Digits  # (items, levels), after the uniqueness policy
    codebook_sizes: tuple[int, ...]  # codes a level, the appended one included
    embeddings: Floats  # (items, d) of the items' text
    quantizer: Quantizer
    unique: Policy
    encoder: EncoderConfig
    made: Mapping[str, Any] = field(default_factory=dict)  # quantiser settings, data, time spent
    learned: Collaborative | None = None  # what was quantised, if not the text

    @classmethod
    def make(
        cls,
        dataset: Dataset,
        *,
        encoder: EncoderConfig | None = None,
        quantizer: QuantizerConfig | None = None,
        unique: Policy = "append",
        cache: Path | None = None,
        progress: bool = False,
    ) -> SemanticIds:
        """Text -> vectors -> digits for every item of `dataset`; texts met before are cached."""
        encoder, quantizer = encoder or EncoderConfig(), quantizer or QuantizerConfig()
        encoder = resolved(encoder, given=dataset.embeddings is not None)
        if unique not in get_args(Policy):
            choices = ", ".join(get_args(Policy))
            raise RequestError(f"there is no policy {unique!r}; choose one of {choices}")
        vectors = embed_items(
            dataset.items,
            encoder,
            embeddings=dataset.embeddings,
            cache=cache or cache_folder() / "embeddings",
            progress=progress,
        )
        fitted, digits, sizes = _quantised(vectors, quantizer, unique, progress=progress)
        made = {"quantizer": asdict(quantizer), "fingerprint": dataset.fingerprint}
        return cls(dataset.items, digits, sizes, vectors, fitted, unique, encoder, made)

    def remade(
        self, vectors: Floats, quantizer: QuantizerConfig, *, progress: bool = False
    ) -> SemanticIds:
        """IDs of the same items made of `vectors` (items, any) that were learned from behaviour."""
        learned = Collaborative.of(vectors, self.embeddings)
        fitted, digits, sizes = _quantised(
            learned.vectors, quantizer, self.unique, progress=progress
        )
        return replace(
            self,
            digits=digits,
            codebook_sizes=sizes,
            quantizer=fitted,
            learned=learned,
            made={**self.made, "quantizer": asdict(quantizer)},
        )

    @property
    def vectors(self) -> Floats:
        """(items, any) what was quantised."""
        return self.embeddings if self.learned is None else self.learned.vectors

    @property
    def levels(self) -> int:
        return len(self.codebook_sizes)

    @cached_property
    def packed(self) -> npt.NDArray[np.int64]:
        """(items,) each tuple as one number, the first digit the most significant."""
        return pack(self.digits, self.codebook_sizes)

    @cached_property
    def _by_tuple(self) -> npt.NDArray[np.int64]:
        return np.argsort(self.packed, kind="stable")

    def with_prefix(self, prefix: Sequence[int]) -> npt.NDArray[np.int64]:
        """The items whose first digits are `prefix`, in the catalogue's order."""
        if len(prefix) > self.levels:
            raise RequestError(f"a prefix has at most {self.levels} digits, not {len(prefix)}")
        stride = math.prod(self.codebook_sizes[len(prefix) :])
        first = 0
        for digit, size in zip(prefix, self.codebook_sizes, strict=False):
            if not 0 <= digit < size:
                return np.empty(0, dtype=np.int64)
            first = first * size + digit
        ends = np.searchsorted(
            self.packed, [first * stride, (first + 1) * stride], sorter=self._by_tuple
        )
        return np.sort(self._by_tuple[ends[0] : ends[1]])

    def row(self, item_id: Any) -> int:
        """The number of an item, by its ID."""
        ids = self.items["item_id"]
        wanted = pl.Series([item_id], strict=False).cast(ids.dtype, strict=False)
        rows = (ids == wanted[0]).arg_true() if wanted[0] is not None else wanted.clear()
        if not len(rows):
            raise RequestError(f"item {item_id!r} has no semantic ID here; check the ID")
        return int(rows[0])

    def encode_new(
        self, items: pl.DataFrame, *, embeddings: npt.NDArray[Any] | None = None
    ) -> SemanticIds:
        """The same IDs with new items behind them: no old ID changes, nothing is fitted again."""
        if "item_id" not in items.columns:
            raise DataError(f"the new items have no column item_id (they have: {items.columns})")
        ids = items["item_id"].cast(self.items["item_id"].dtype, strict=False)
        known = ids.is_in(self.items["item_id"].implode()) | ids.is_duplicated() | ids.is_null()
        if known.any():
            first = items["item_id"][int(known.arg_max() or 0)]
            raise DataError(
                f"{int(known.sum())} of the new items are old, repeated or without an ID (first: "
                f"{first!r}); give each new item once"
            )
        vectors = embed_items(items, self.encoder, embeddings=embeddings)
        if vectors.shape[1] != self.embeddings.shape[1]:
            raise DataError(
                f"the new vectors have {vectors.shape[1]} dimensions where the old ones have "
                f"{self.embeddings.shape[1]}; use the same encoder"
            )
        learned, own = self.learned, vectors
        if learned is not None:
            own = learned.foretell(vectors)
            learned = learned.joined(own)
        digits = place_new(self.unique, self.digits, self.codebook_sizes, own, self.quantizer)
        return replace(
            self,
            learned=learned,
            items=below(self.items, items.with_columns(item_id=ids)),
            digits=np.concatenate([self.digits, digits]),
            embeddings=np.concatenate([self.embeddings, vectors]),
        )

    def save(self, path: Path | str, *, report: Mapping[str, Any] | None = None) -> None:
        """digits.parquet (item_id, digits), items, embeddings, the quantiser, the report."""
        config = {
            "unique": self.unique,
            "codebook_sizes": list(self.codebook_sizes),
            "encoder": asdict(self.encoder),
            "made": dict(self.made),
            "report": report,
        }
        with write_folder(path, KIND, SCHEMA, config) as folder:
            table = self.items.select("item_id", digits=pl.Series(self.digits.tolist()))
            table.write_parquet(folder / "digits.parquet")
            self.items.write_parquet(folder / "items.parquet")
            np.save(folder / "embeddings.npy", self.embeddings)
            if self.learned is not None:
                np.save(folder / "learned.npy", self.learned.vectors)
                np.save(folder / "text-to-learned.npy", self.learned.weights)
            save_quantizer(folder, self.quantizer)

    @classmethod
    def load(cls, path: Path | str) -> SemanticIds:
        path = Path(path)
        config = read_manifest(path, KIND, SCHEMA).config
        try:
            learned = None
            if (path / "learned.npy").exists():
                files = (path / "learned.npy", path / "text-to-learned.npy")
                learned = Collaborative(*(read_matrix(file).values for file in files))
            return cls(
                learned=learned,
                items=read_table(path / "items.parquet"),
                digits=np.array(read_table(path / "digits.parquet")["digits"].to_list(), np.int32),
                codebook_sizes=tuple(config["codebook_sizes"]),
                embeddings=read_matrix(path / "embeddings.npy").values,
                quantizer=load_quantizer(path),
                unique=config["unique"],
                encoder=EncoderConfig(**config["encoder"]),
                made=config["made"],
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ArtefactError(f"{path} is damaged ({error}); make the IDs again") from error


def _quantised(
    vectors: Floats, config: QuantizerConfig, unique: Policy, *, progress: bool
) -> tuple[Quantizer, Digits, tuple[int, ...]]:
    """A fitted quantiser, the digits under the policy, and the codes of each level."""
    fitted = fit_quantizer(vectors, config, progress=progress)
    digits = make_unique(unique, fitted.encode(vectors), vectors, fitted)
    sizes = fitted.codebook_sizes
    if digits.shape[1] > len(sizes):
        sizes = (*sizes, int(digits[:, -1].max()) + 1)
    return fitted, digits, sizes


def pack(digits: Digits, sizes: Sequence[int]) -> npt.NDArray[np.int64]:
    """(n,) mixed-radix numbers; equal for equal tuples, and sorted as the tuples are."""
    if math.prod(sizes) >= 2**63:
        raise RequestError(
            f"{len(sizes)} levels of {' × '.join(map(str, sizes))} codes do not fit 64 bits; use "
            "fewer levels or codes"
        )
    packed = np.zeros(len(digits), dtype=np.int64)
    for level, size in enumerate(sizes):
        packed = packed * size + digits[:, level]
    return packed


def unpack(packed: npt.NDArray[np.int64], sizes: Sequence[int]) -> Digits:
    """(n, levels) the digits that `pack` made a number of."""
    digits = np.empty((len(packed), len(sizes)), dtype=np.int32)
    for level in reversed(range(len(sizes))):
        packed, digits[:, level] = np.divmod(packed, sizes[level])
    return digits
