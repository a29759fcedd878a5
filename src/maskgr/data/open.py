"""Opens a dataset by name: a folder, or a built-in source."""

from __future__ import annotations

import warnings
from dataclasses import asdict
from pathlib import Path

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
    tables = Tables.of(dataset.interactions(), dataset.items, dataset.embeddings, data)
    return Dataset.from_tables(tables, config, Problems(), dataset.provenance)


def fetch(name: str, *, synthetic: SyntheticConfig | None = None, progress: bool = True) -> Dataset:
    """A built-in source as a Dataset; the downloads and the finished dataset are cached."""
    if name == SYNTHETIC:
        return from_shop(generate(synthetic or SyntheticConfig()))
    if name not in SOURCES:
        known = ", ".join([SYNTHETIC, *SOURCES])
        raise SourceError(f"{name!r} is neither a folder nor a source; the sources are {known}")
    ready = cache_folder() / "datasets" / name
    if is_artefact(ready):
        return Dataset.load(ready)
    source = SOURCES[name]
    tables = Tables.of(*read_source(source, progress=progress), None, name)
    config = DataConfig(k_core=source.k_core)
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
    return Dataset.from_tables(tables, DataConfig(), Problems(), provenance)


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
    problems = Problems(strict=False)
    try:
        if saved:
            read_manifest(data, KIND, SCHEMA)  # checks every file against its checksum
        tables = read_folder(Path(data))
        dataset = Dataset.from_tables(tables, config or DataConfig(), problems, {"source": data})
        return inspect_dataset(dataset)
    except (DataError, ArtefactError) as error:
        # Nothing more can be read: report the problems found so far.
        message, _, fix = str(error).rpartition("; ")
        found = (*problems.found, Problem("error", message, fix))
        return Inspection(users=None, items=None, interactions=None, problems=found)
