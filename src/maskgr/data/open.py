"""Opens a dataset by name: a folder, or a built-in source."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from maskgr.artefact import is_artefact, read_manifest
from maskgr.data.config import DataConfig, SyntheticConfig
from maskgr.data.dataset import KIND, SCHEMA, Dataset
from maskgr.data.download import cache_folder
from maskgr.data.inspect import Inspection, inspect_dataset
from maskgr.data.problems import Problem, Problems
from maskgr.data.sources import SOURCES, check_counts, read_source
from maskgr.data.synthetic import Shop, generate
from maskgr.data.tables import Tables, read_folder
from maskgr.errors import ArtefactError, DataError, SourceError

SYNTHETIC = "synthetic"


def open_dataset(data: str, config: DataConfig | None = None, *, progress: bool = True) -> Dataset:
    """Loads the folder `data` if it exists, else the source of that name, filtered by `config`."""
    config = config or DataConfig()
    if is_artefact(data) or Path(data).exists():
        return Dataset.load(data, config=config)
    dataset = fetch(data, progress=progress)
    if config == DataConfig():
        return dataset
    log, items = dataset.interactions(), dataset.items
    tables = Tables.of(log, items, dataset.embeddings, data, config.columns)
    return Dataset.from_tables(tables, config, Problems(), dataset.provenance)


def fetch(name: str, *, synthetic: SyntheticConfig | None = None, progress: bool = True) -> Dataset:
    """A built-in source as a Dataset; the downloads and the finished dataset are cached."""
    if name == SYNTHETIC:
        return from_shop(generate(synthetic or SyntheticConfig()))
    if name not in SOURCES:
        known = ", ".join([SYNTHETIC, *SOURCES])
        raise SourceError(f"{name!r} is neither a folder nor a source; the sources are {known}")
    ready, source = cache_folder() / "datasets" / name, SOURCES[name]
    if is_artefact(ready):
        return Dataset.load(ready, config=DataConfig(text=source.text))
    tables = Tables.of(*read_source(source, progress=progress), None, name)
    config = DataConfig(k_core=source.k_core, text=source.text)
    dataset = Dataset.from_tables(tables, config, Problems(), {"source": name})
    check_counts(source, len(dataset.users), len(dataset.items), len(dataset.histories.values))
    try:
        dataset.save(ready)
    except ArtefactError as error:  # the dataset is usable without a cache
        warnings.warn(f"{name} is not cached: {error}", stacklevel=2)
    return dataset


def from_shop(shop: Shop) -> Dataset:
    """The generated shop as a Dataset; its provenance holds the config to generate it again."""
    tables = Tables.of(shop.interactions, shop.items, None, SYNTHETIC)
    provenance = {"source": SYNTHETIC, SYNTHETIC: asdict(shop.config)}
    config = DataConfig(text=tuple(shop.items.columns[1:]))  # the price, too
    return Dataset.from_tables(tables, config, Problems(), provenance)


def shop_of(dataset: Dataset) -> Shop | None:
    """Generates the shop of a synthetic dataset again, for its true probabilities.

    None for real data, and for a synthetic dataset whose items were filtered.
    """
    if dataset.provenance.get("source") != SYNTHETIC:
        return None
    shop = generate(SyntheticConfig(**dataset.provenance[SYNTHETIC]))
    return shop if shop.items["item_id"].equals(dataset.item_ids) else None


def inspect_data(data: str, config: DataConfig | None = None) -> Inspection:
    """Statistics and all problems of a dataset; does not stop at the first error."""
    saved = is_artefact(data)
    if not saved and not Path(data).exists():
        return inspect_dataset(open_dataset(data, config))
    problems, config = Problems(strict=False), config or DataConfig()
    provenance: Mapping[str, Any] = {"source": data}
    try:
        if saved:  # checks every file against its checksum
            provenance = read_manifest(data, KIND, SCHEMA).config
        tables = read_folder(Path(data), config.columns)
        return inspect_dataset(Dataset.from_tables(tables, config, problems, provenance))
    except (DataError, ArtefactError) as error:
        # Nothing more can be read: report the problems found so far.
        message, _, fix = str(error).rpartition("; ")
        found = (*problems.found, Problem("error", message, fix))
        return Inspection(users=None, items=None, interactions=None, problems=found)
