"""Dataset: the users' histories and the items."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
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


@dataclass(frozen=True, eq=False)
class Dataset:
    """Histories of item indices, with the IDs of users and items as the user wrote them.

    User `i` has the ID `users[i]` and the history `histories[i]`; item `j` is row `j` of `items`.
    """

    users: pl.Series
    items: pl.DataFrame  # item_id first, then text columns
    histories: Sequences  # one per user, oldest first
    timestamps: npt.NDArray[np.datetime64] | None = None  # (interactions,) as histories.values
    embeddings: npt.NDArray[np.floating[Any]] | None = None  # (items, dimensions)
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
        tables = Tables.of(interactions, items, embeddings, "the given")
        return cls.from_tables(tables, config or DataConfig(), Problems(), {"source": "frames"})

    @classmethod
    def load(cls, path: Path | str, *, config: DataConfig | None = None) -> Dataset:
        """From a folder that `save` wrote, or of a user's own files (see docs/data.md)."""
        path, config = Path(path), config or DataConfig()
        provenance: Mapping[str, Any] = {"source": str(path)}
        if is_artefact(path):
            provenance = read_manifest(path, KIND, SCHEMA).config
        return cls.from_tables(read_folder(path), config, Problems(), provenance)

    @classmethod
    def from_tables(
        cls,
        tables: Tables,
        config: DataConfig,
        problems: Problems,
        provenance: Mapping[str, Any],
    ) -> Dataset:
        """Checks, orders and filters the tables; `config` is appended to the provenance."""
        made = ingest(tables, config, problems)
        steps = [*provenance.get("steps", ()), asdict(config)]
        return cls(
            users=made.users,
            items=made.items,
            histories=made.events.histories(len(made.users)),
            timestamps=made.events.time,
            embeddings=made.embeddings,
            provenance={**provenance, "steps": steps},
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
                str(when.astype("datetime64[s]"))
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

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the IDs and histories; it does not depend on the file format."""
        digest = hashlib.sha256()
        for ids in (self.users, self.item_ids):
            digest.update(f"{ids.dtype}\0".encode())
            digest.update("\0".join(ids.cast(pl.String).to_list()).encode())
        digest.update(self.histories.values.tobytes())
        digest.update(self.histories.offsets.tobytes())
        return digest.hexdigest()

    def interactions(self) -> pl.DataFrame:
        """The log as a table: user_id, item_id, timestamp (if there are any), position."""
        columns = [
            self.users.gather(self.histories.owners),
            self.item_ids.gather(self.histories.values),
        ]
        if self.timestamps is not None:
            columns.append(pl.Series("timestamp", self.timestamps))
        position = pl.Series("position", self.histories.places, dtype=pl.Int32)
        return pl.DataFrame([*columns, position])

    def save(self, path: Path | str) -> None:
        """Writes Parquet (and .npy) files in the layout that `load` reads."""
        with write_folder(path, KIND, SCHEMA, self.provenance) as folder:
            self.interactions().write_parquet(folder / "interactions.parquet")
            self.items.write_parquet(folder / "items.parquet")
            if self.embeddings is not None:
                np.save(folder / "embeddings.npy", self.embeddings)
