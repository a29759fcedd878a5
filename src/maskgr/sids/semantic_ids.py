"""SemanticIds: the digits of every item, and all that is needed to give digits to new items."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from maskgr.artefact import read_manifest, write_folder
from maskgr.cards import card
from maskgr.data.config import MAX_SEED
from maskgr.data.dataset import Dataset
from maskgr.data.ingest import cast_ids
from maskgr.data.tables import below, read_matrix, read_table
from maskgr.devices import pick_device
from maskgr.errors import ArtefactError, DataError, RequestError
from maskgr.sids.collaborative import Collaborative
from maskgr.sids.config import EncoderConfig, Policy, SidsConfig
from maskgr.sids.encoders import EncodeAll
from maskgr.sids.item_text import ItemText
from maskgr.sids.quantizers import Quantizer, fit_quantizer, load_quantizer, save_quantizer
from maskgr.sids.uniqueness import fitting_policy, make_unique, place_new
from maskgr.sids.vectors import Digits, Floats

KIND, SCHEMA = "semantic-ids", 2


@dataclass(frozen=True, eq=False)
class SemanticIds:
    """Row `i` of every table is item `i` of the dataset that the IDs were made for."""

    items: pl.DataFrame  # item_id first, then the text columns
    digits: Digits  # (items, levels), after the uniqueness policy
    codebook_sizes: tuple[int, ...]  # codes per level, the appended level included
    embeddings: Floats  # (items, d) of the items' text
    quantizer: Quantizer
    unique: Policy
    encoder: EncoderConfig
    made: Mapping[str, Any] = field(default_factory=dict)  # quantiser settings, seed, data
    learned: Collaborative | None = None  # the vectors that were quantised in place of the text

    @classmethod
    def make(
        cls,
        dataset: Dataset,
        config: SidsConfig | None = None,
        *,
        seed: int = 0,
        device: str = "auto",
        cache: Path | None = None,
        progress: bool = False,
        encode_all: EncodeAll | None = None,
    ) -> SemanticIds:
        """Text -> vectors -> digits for every item of `dataset`.

        The same seed gives the same digits. Texts whose vectors are in the folder `cache` are not
        encoded again; `encode_all` encodes them elsewhere than in this process.
        """
        config = config or SidsConfig()
        if isinstance(seed, bool) or not 0 <= seed <= MAX_SEED:
            raise RequestError(f"seed is {seed!r}; give a whole number from 0 to {MAX_SEED:,}")
        pick_device(device)  # a wrong device is refused now, not when a model needs it
        how: dict[str, Any] = {"device": device, "cache": cache, "progress": progress}
        text = ItemText.make(dataset, config.encoder, encode_all=encode_all, **how)
        vectors = text.embeddings
        quantizer = fit_quantizer(
            vectors, config.quantizer, normalise=True, seed=seed, device=device, progress=progress
        )
        unique = fitting_policy(config.unique, len(vectors), quantizer.codebook_sizes)
        digits, sizes = _unique_digits(quantizer, vectors, unique)
        made = {
            "quantizer": asdict(config.quantizer),
            "seed": seed,
            "fingerprint": dataset.fingerprint,
        }
        return cls(dataset.items, digits, sizes, vectors, quantizer, unique, text.encoder, made)

    @classmethod
    def from_learned(
        cls,
        items: pl.DataFrame,
        vectors: Floats,
        text: ItemText,
        config: SidsConfig,
        *,
        seed: int = 0,
        device: str = "auto",
        progress: bool = False,
    ) -> SemanticIds:
        """IDs quantised from `vectors` (items, any) that were learned from behaviour.

        The length of a learned vector has a meaning, so vectors are quantised as they are: without
        normalising, in all components. New items get theirs from their text.
        """
        quantizer = replace(config.quantizer, components=0)
        learned = Collaborative.fit(vectors, text.embeddings)
        fitted = fit_quantizer(
            learned.vectors, quantizer, normalise=False, seed=seed, device=device, progress=progress
        )
        unique = fitting_policy(config.unique, len(vectors), fitted.codebook_sizes)
        digits, sizes = _unique_digits(fitted, learned.vectors, unique)
        made = {"quantizer": asdict(quantizer), "seed": seed}
        return cls(
            items,
            digits,
            sizes,
            text.embeddings,
            fitted,
            unique,
            text.encoder,
            made,
            learned,
        )

    def __deepcopy__(self, memo: object) -> SemanticIds:
        return self  # never changes; an averaged copy of a model would double the embeddings

    def __repr__(self) -> str:
        sizes = " x ".join(map(str, self.codebook_sizes))
        return f"SemanticIds({len(self.items):,} items, {self.levels} digits: {sizes} codes)"

    def _repr_html_(self) -> str:
        different = len(np.unique(self.digits, axis=0))
        facts = {
            "items": len(self.items),
            "digits": self.levels,
            "codes of each digit": self.codebook_sizes,
            "different IDs": different,
            "items with equal digits": self.unique,
            "quantiser": self.quantizer.name,
            "made of": "text" if self.learned is None else "vectors learned from behaviour",
        }
        rows = [
            {"digits": "-".join(map(str, digits)), **row}
            for digits, row in zip(
                self.digits[:5].tolist(), self.items.head(5).iter_rows(named=True), strict=True
            )
        ]
        return card("Semantic IDs", "the digits that stand for each item", facts, rows=rows)

    @property
    def vectors(self) -> Floats:
        """(items, any) the vectors that were quantised: text embeddings or learned vectors."""
        return self.embeddings if self.learned is None else self.learned.vectors

    @property
    def levels(self) -> int:
        return len(self.codebook_sizes)

    def with_prefix(self, prefix: Sequence[int]) -> npt.NDArray[np.int64]:
        """Rows of the items whose first digits are `prefix`, in ascending order."""
        if len(prefix) > self.levels:
            raise RequestError(f"a prefix has at most {self.levels} digits, not {len(prefix)}")
        rows = np.arange(len(self.digits))
        for level, digit in enumerate(prefix):
            rows = rows[self.digits[rows, level] == digit]
        return rows

    def row(self, item_id: Any) -> int:
        """The row of the item with this ID."""
        ids = self.items["item_id"]
        wanted = cast_ids(pl.Series([item_id], strict=False), ids.dtype)
        rows = (ids == wanted[0]).arg_true() if wanted[0] is not None else wanted.clear()
        if not len(rows):
            raise RequestError(f"item {item_id!r} has no semantic ID here; check the ID")
        return int(rows[0])

    def encode_new(
        self,
        items: pl.DataFrame,
        *,
        embeddings: npt.NDArray[Any] | None = None,
        device: str = "auto",
    ) -> SemanticIds:
        """A copy with new items behind the old: no old ID changes, nothing is fitted again."""
        if "item_id" not in items.columns:
            raise DataError(f"the new items have no column item_id (they have: {items.columns})")
        ids = cast_ids(items["item_id"], self.items["item_id"].dtype)
        known = ids.is_in(self.items["item_id"].implode()) | ids.is_duplicated() | ids.is_null()
        if known.any():
            first = items["item_id"][int(known.arg_max() or 0)]
            raise DataError(
                f"{int(known.sum())} of the new items are old, repeated or without an ID (first: "
                f"{first!r}); give each new item once"
            )
        text = ItemText(self.embeddings, self.encoder).with_items(items, embeddings, device)
        vectors = text.embeddings[len(self.embeddings) :]
        learned, own = self.learned, vectors
        if learned is not None:
            own = learned.predict_from_text(vectors)
            learned = learned.extended(own)
        digits = place_new(self.unique, self.digits, self.codebook_sizes, own, self.quantizer)
        return replace(
            self,
            learned=learned,
            items=below(self.items, items.with_columns(item_id=ids)),
            digits=np.concatenate([self.digits, digits]),
            embeddings=text.embeddings,
        )

    def save(self, path: Path | str, *, report: Mapping[str, Any] | None = None) -> None:
        """Writes digits.parquet (item_id, digits), items, embeddings, quantiser and report."""
        config = {
            "unique": self.unique,
            "codebook_sizes": list(self.codebook_sizes),
            "encoder": asdict(self.encoder),
            "made": dict(self.made),
            "report": report,
        }
        with write_folder(path, KIND, SCHEMA, config) as folder:
            digits = pl.Series("digits", self.digits).arr.to_list()
            table = self.items.select("item_id", digits)
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
                digits=_read_digits(path / "digits.parquet", len(config["codebook_sizes"])),
                codebook_sizes=tuple(config["codebook_sizes"]),
                embeddings=read_matrix(path / "embeddings.npy").values,
                quantizer=load_quantizer(path),
                unique=config["unique"],
                encoder=EncoderConfig(**config["encoder"]),
                made=config["made"],
            )
        except (
            KeyError,
            TypeError,
            ValueError,
            RequestError,
            pl.exceptions.PolarsError,
        ) as error:
            raise ArtefactError(f"{path} is damaged ({error}); make the IDs again") from error


def _read_digits(file: Path, levels: int) -> Digits:
    """(items, levels), without a Python object an item."""
    values = read_table(file)["digits"].explode(empty_as_null=False).to_numpy()
    return np.array(values.reshape(-1, levels), dtype=np.int32)  # a copy, which can be written to


def _unique_digits(
    quantizer: Quantizer, vectors: Floats, unique: Policy
) -> tuple[Digits, tuple[int, ...]]:
    """(items, levels) the digits under the policy, and the number of codes at each level."""
    digits = make_unique(unique, quantizer.encode(vectors), vectors, quantizer)
    sizes = quantizer.codebook_sizes
    if digits.shape[1] > len(sizes):
        sizes = (*sizes, int(digits[:, -1].max()) + 1)
    return digits, sizes
