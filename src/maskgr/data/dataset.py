"""Dataset: the users' histories and the items."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from maskgr.artefact import is_artefact, read_manifest, write_folder
from maskgr.cards import card
from maskgr.data.config import DataConfig
from maskgr.data.ingest import ingest
from maskgr.data.problems import Problem, Problems
from maskgr.data.sequences import Sequences
from maskgr.data.tables import Tables, read_folder

KIND, SCHEMA = "dataset", 1
HASHED = 10_000  # items hashed at once


@dataclass(frozen=True, eq=False)
class Dataset:
    """Histories of item indices, with the IDs of users and items as the user wrote them.

    User `i` has the ID `users[i]` and the history `histories[i]`; item `j` is row `j` of `items`.
    """

    users: pl.Series
    items: pl.DataFrame  # item_id first, then any columns
    histories: Sequences  # one per user, oldest first, with the weights of events as targets
    timestamps: npt.NDArray[np.datetime64] | None = None  # (interactions,) as histories.values
    embeddings: npt.NDArray[np.floating[Any]] | None = None  # (items, dimensions)
    text: tuple[str, ...] = ()  # the columns of the items that are text
    provenance: Mapping[str, Any] = field(default_factory=dict)  # how it was made
    notes: tuple[Problem, ...] = ()  # warnings from reading

    @classmethod
    def from_frames(
        cls,
        interactions: Any,
        items: Any = None,
        *,
        embeddings: npt.NDArray[Any] | None = None,
        config: DataConfig | None = None,
    ) -> Dataset:
        """From polars or pandas frames; `embeddings` has one row for each row of `items`."""
        config = config or DataConfig()
        tables = Tables.of(interactions, items, embeddings, "the given", config.columns)
        return cls.from_tables(tables, config, Problems(), {"source": "frames"})

    @classmethod
    def load(cls, path: Path | str, *, config: DataConfig | None = None) -> Dataset:
        """From a folder that `save` wrote, or of a user's own files (see docs/data.md)."""
        path, config = Path(path), config or DataConfig()
        provenance: Mapping[str, Any] = {"source": str(path)}
        if is_artefact(path):
            provenance = read_manifest(path, KIND, SCHEMA).config
        tables = read_folder(path, config.columns)
        return cls.from_tables(tables, config, Problems(), provenance)

    @classmethod
    def from_tables(
        cls,
        tables: Tables,
        config: DataConfig,
        problems: Problems,
        provenance: Mapping[str, Any],
    ) -> Dataset:
        """Checks, orders and filters the tables; `config` is appended to the provenance, which says
        what is text unless `config` does."""
        if config.text is None and "text" in provenance:
            config = replace(config, text=tuple(provenance["text"]) or None)
        made = ingest(tables, config, problems)
        steps = [*provenance.get("steps", ()), asdict(config)]
        return cls(
            users=made.users,
            items=made.items,
            histories=made.events.histories(len(made.users)),
            timestamps=made.events.time,
            embeddings=made.embeddings,
            text=made.text,
            provenance={**provenance, "text": list(made.text), "steps": steps},
            notes=tuple(problems.found),
        )

    def __repr__(self) -> str:
        events = len(self.histories.values)
        return f"Dataset({len(self.users):,} users, {len(self.items):,} items, {events:,} events)"

    def _repr_html_(self) -> str:
        lengths = self.histories.lengths
        facts: dict[str, Any] = {
            "users": len(self.users),
            "items": len(self.items),
            "events": len(self.histories.values),
            "items a user": f"{lengths.mean():.1f} on average, {lengths.max(initial=0)} at most"
            if len(lengths)
            else None,
            "columns of items": self.items.columns,
        }
        if self.timestamps is not None and len(self.timestamps):
            facts["from"], facts["to"] = (
                str(when.astype("datetime64[s]")).replace("T", " ")
                for when in (np.nanmin(self.timestamps), np.nanmax(self.timestamps))
            )
        if self.embeddings is not None:
            facts["embeddings"] = f"{self.embeddings.shape[1]} numbers an item"
        source = str(self.provenance.get("source", ""))
        rows, notes = self.items.head(3).to_dicts(), [str(note) for note in self.notes]
        return card("Dataset", source, facts, rows=rows, notes=notes)

    @property
    def item_ids(self) -> pl.Series:
        return self.items["item_id"]

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the IDs, histories and weights; it does not depend on the file format."""
        digest = hashlib.sha256()
        for ids in (self.users, self.item_ids):
            digest.update(f"{ids.dtype}\0".encode())
            digest.update("\0".join(ids.cast(pl.String).to_list()).encode())
        digest.update(self.histories.values.tobytes())
        digest.update(self.histories.offsets.tobytes())
        if self.histories.weights is not None:
            digest.update(self.histories.weights.tobytes())
        return digest.hexdigest()

    @cached_property
    def content(self) -> str:
        """SHA-256 of the fingerprint and of all that is known about the items."""
        digest = hashlib.sha256(self.fingerprint.encode())
        # Bytes and Python objects are never text, and cannot be written as JSON.
        odd = [c for c, t in self.items.schema.items() if re.search("Binary|Object", str(t))]
        for part in self.items.drop(odd).iter_slices(HASHED):
            digest.update(part.write_ndjson().encode())
        if self.embeddings is not None:
            digest.update(np.ascontiguousarray(self.embeddings).data)
        return digest.hexdigest()

    def interactions(self) -> pl.DataFrame:
        """The log as a table: user_id, item_id, timestamp and weight (if any), position."""
        columns = [
            self.users.gather(self.histories.owners),
            self.item_ids.gather(self.histories.values),
        ]
        if self.timestamps is not None:
            columns.append(pl.Series("timestamp", self.timestamps))
        if self.histories.weights is not None:
            columns.append(pl.Series("weight", self.histories.weights))
        position = pl.Series("position", self.histories.places, dtype=pl.Int32)
        return pl.DataFrame([*columns, position])

    def save(self, path: Path | str) -> None:
        """Writes Parquet (and .npy) files in the layout that `load` reads."""
        with write_folder(path, KIND, SCHEMA, self.provenance) as folder:
            self.interactions().write_parquet(folder / "interactions.parquet")
            self.items.write_parquet(folder / "items.parquet")
            if self.embeddings is not None:
                np.save(folder / "embeddings.npy", self.embeddings)
