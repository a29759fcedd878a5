"""A generated shop, runs and exports of it, and the commands that write: small, so that a thousand
kills are affordable."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from maskgr.artefact import CHECKSUM, MANIFEST, is_artefact, is_draft, read_manifest

USERS, ITEMS, WIDTH, HISTORIES = 60, 40, 8, 2100
NETWORK = ("width=16", "heads=2", "levels=3", "codes=8")
STEPS = ("fit.steps=8", "validations=2", "checkpoint_minutes=0")


def settings(*pairs: str) -> tuple[str, ...]:
    return tuple(word for pair in pairs for word in ("--set", pair))


TRAIN = ("--preset", "tiny", *settings(*NETWORK, *STEPS))
NEW = ("items.jsonl", "--embeddings", "vectors.npy")


@dataclass(frozen=True)
class Job:
    """A command that writes, started in a folder like the template."""

    name: str
    words: tuple[str, ...]
    out: str  # what it writes: an artefact, or a file
    run: str | None = None  # the run folder that it trains in
    kills: int = 1  # of one folder, at most, before a command may finish
    processes: int = 1

    def after_kill(self, folder: Path) -> tuple[str, ...]:
        """The command that goes on: the same, with --resume where a training has begun."""
        begun = self.run is not None and (folder / self.run / "training" / "run.json").exists()
        return (*self.words, "--resume") if begun else self.words


def _jobs() -> Iterator[Job]:
    train = ("train", "shop", *TRAIN, "--out", "new")
    yield Job("train", train, "new/recommender", "new", kills=5)
    together = (*train, "--processes", "2")
    yield Job("train, two processes", together, "new/recommender", "new", kills=5, processes=2)
    update = ("update", "run", "--events", "events.jsonl", "--items", *NEW, *settings(*STEPS))
    yield Job("update", (*update, "--out", "new"), "new/recommender", "new", kills=5)
    yield Job("sids", ("sids", "shop", "--levels", "3", "--codes", "8", "--out", "sids"), "sids")
    batch = ("recommend", "run", "--input", "histories.jsonl", "--output")
    yield Job("recommend, JSONL", (*batch, "out.jsonl"), "out.jsonl", kills=3)
    yield Job("recommend, Parquet", (*batch, "out.parquet"), "out.parquet", kills=3)
    yield Job("add-items", ("add-items", "run", *NEW), "run/recommender")
    export = ("export", "run", "--format")
    yield Job("export, hub", (*export, "hub", "--out", "hub"), "hub")
    yield Job("export, ONNX", (*export, "onnx", "--out", "onnx"), "onnx")


JOBS = {job.name: job for job in _jobs()}
# What stands where a job will write, so that a kill could lose it.
OLD = (
    ("train", "shop", "--model", "popularity", "--out", "other"),
    ("sids", "shop", "--levels", "2", "--codes", "4", "--out", "sids"),
    ("export", "other", "--format", "hub", "--out", "hub"),
)


def write_inputs(folder: Path) -> None:
    """The dataset `shop`, and new events, items, vectors and histories beside it."""
    import numpy as np
    import polars as pl

    from maskgr.data.config import SyntheticConfig
    from maskgr.data.dataset import Dataset
    from maskgr.data.synthetic import generate

    rng = np.random.default_rng(0)
    shop = generate(SyntheticConfig(users=USERS, items=ITEMS + 4))
    items, more = shop.items.head(ITEMS), shop.items.tail(4)
    known = pl.col("item_id").is_in(items["item_id"].implode())
    log = shop.interactions.filter(known)
    vectors = rng.normal(size=(ITEMS, WIDTH)).astype(np.float32)
    Dataset.from_frames(log, items, embeddings=vectors).save(folder / "shop")
    more.write_ndjson(folder / "items.jsonl")
    np.save(folder / "vectors.npy", rng.normal(size=(4, WIDTH)).astype(np.float32))
    users, ids = log["user_id"].unique(maintain_order=True), shop.items["item_id"]
    events = [
        {"user_id": users[int(rng.integers(9))], "item_id": ids[int(rng.integers(ITEMS + 4))]}
        for _ in range(40)
    ]
    _write_lines(folder / "events.jsonl", [{**e, "position": n} for n, e in enumerate(events)])
    histories = [
        {"user_id": n, "history": [ids[int(own)] for own in rng.integers(ITEMS, size=n % 5)]}
        for n in range(HISTORIES)
    ]
    _write_lines(folder / "histories.jsonl", histories)
    (folder / "out.jsonl").write_text("what was here before\n")
    (folder / "out.parquet").write_text("what was here before\n")
    (folder / "keys").write_text("admin\n")


def _write_lines(file: Path, rows: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def content(path: Path) -> dict[str, str] | None:
    """The checksum of each file of an artefact, which is whole, or of a file; None where there is
    none. Manifests have times in them, and are left out."""
    if path.is_file():
        return {path.name: sha256(path)}
    if not is_artefact(path):
        return None
    return {name: str(about["sha256"]) for name, about in checked(path).items()}


def checked(folder: Path) -> dict[str, dict[str, Any]]:
    """The files of an artefact; raises where it is not whole."""
    about = json.loads((folder / MANIFEST).read_text())
    return read_manifest(folder, about["kind"], about["schema"]).files


def tree(folder: Path, without: tuple[str, ...] = ()) -> dict[str, str]:
    """The checksum of every file below a folder, but for what lies under some paths."""
    found = {}
    for file in folder.rglob("*"):
        name = file.relative_to(folder)
        if file.is_file() and not any(name.is_relative_to(own) for own in without):
            found[str(name)] = sha256(file)
    return found


def artefacts(folder: Path) -> Iterator[Path]:
    """Every artefact below a folder, drafts left out."""
    for name in (MANIFEST, CHECKSUM):
        for file in folder.rglob(name):
            own = file.parent
            hidden = any(is_draft(p) or p.name.endswith(".previous") for p in (own, *own.parents))
            if not hidden and (name == MANIFEST or not (own / MANIFEST).exists()):
                yield own


def leftovers(folder: Path) -> list[str]:
    """What a kill left beside artefacts."""
    return [
        str(path.relative_to(folder))
        for path in folder.rglob(".*")
        if is_draft(path) or path.name.endswith(".previous")
    ]


def fresh(template: Path, folder: Path) -> Path:
    """An own copy of the template; times of files stay, which a batch job looks at."""
    shutil.rmtree(folder, ignore_errors=True)
    return Path(shutil.copytree(template, folder))
