"""Every file of every artefact flipped, cut, emptied and deleted.

Each change has to be noticed, by an error or a warning of one sentence that names the file, or to
be without effect: then what the artefact is used for gives the result that it gave before.
"""

from __future__ import annotations

import io
import json
import random
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from maskgr.errors import MaskGRError

from .children import ChildError, call, start
from .kills import Breaker, Failure
from .shop import STEPS, content, fresh, leftovers, settings

FLIPS = 4  # bytes that are flipped, one at a time: the first, the last, and others at random
MODELS = ("popularity", "neighbours", "sasrec", "tiger", "maskgr-paper")
PAPER = {"maskgr-paper": "tiny-paper", "popularity": "cpu", "neighbours": "cpu"}
SIZES = {
    "sasrec": ("width=16", "heads=2"),
    "tiger": ("levels=3", "codes=8"),
    "maskgr-paper": ("width=16", "heads=2", "levels=3", "codes=8"),
}
HISTORY = ["SKU-00003", "SKU-00001"]


@dataclass(frozen=True)
class Outcome:
    """What became of one change of one file."""

    artefact: str
    file: str
    change: str
    outcome: str  # noticed, no effect, or what may not happen
    said: str = ""

    @property
    def failed(self) -> bool:
        return self.outcome not in ("noticed", "no effect")


def used(use: Callable[[Path], Any], folder: Path) -> dict[str, Any]:
    """The result of using an artefact, with the error and the warnings that came of it."""
    said, error, result = io.StringIO(), None, None
    with redirect_stderr(said), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            result = use(folder)
        except MaskGRError as mistake:
            error = str(mistake)
    lines = [line for line in said.getvalue().splitlines() if line.startswith("warning: ")]
    return {"result": result, "error": error, "said": [*lines, *(str(w.message) for w in caught)]}


def use_dataset(folder: Path) -> Any:
    from maskgr import Dataset

    data = Dataset.load(folder)
    times = None if data.timestamps is None else data.timestamps.astype("int64").tolist()
    return [data.content, times]


def use_sids(folder: Path) -> Any:
    from maskgr.sids.semantic_ids import SemanticIds

    sids = SemanticIds.load(folder)
    again = sids.quantizer.encode(sids.vectors)
    return [sids.digits.tolist(), sids.embeddings.tolist(), again.tolist(), sids.items.to_dicts()]


def use_recommender(folder: Path) -> Any:
    from maskgr import Recommender

    recommender = Recommender.load(folder)
    user = recommender.users.ids.head(1).to_list()
    found = recommender.recommend([[], HISTORY], 5)
    return [found, recommender.recommend_users(user, 5), recommender.items.to_dicts()]


def use_onnx(folder: Path) -> Any:
    """With the example that is shipped for it."""
    from importlib.util import module_from_spec, spec_from_file_location

    file = Path(__file__).parents[2] / "examples" / "onnx_recommend.py"
    about = spec_from_file_location("onnx_recommend", file)
    assert about is not None
    assert about.loader is not None
    example = module_from_spec(about)
    about.loader.exec_module(example)
    try:
        return example.Model(folder, threads=1).recommend([HISTORY], 5)
    except SystemExit as stop:
        raise MaskGRError(str(stop)) from None


def use_training(folder: Path) -> Any:
    """Goes on with what was interrupted; `folder` is the run's, and its data are beside it."""
    from maskgr.data.config import DataConfig
    from maskgr.data.open import open_dataset
    from maskgr.models.base import train_config
    from maskgr.run import start_run

    name, settings_ = json.loads((folder.parent / "settings.json").read_text())
    data = str(folder.parent / "shop")
    config = train_config("tiny", settings_, model=name)
    start_run(folder, open_dataset(data), config, data=data, data_config=DataConfig(), resume=True)
    return content(folder / "recommender")


def use_batch(folder: Path) -> Any:
    """Goes on with a file of recommendations; the parts are in `folder`."""
    from maskgr import Recommender
    from maskgr.serving.batch import recommend_file

    work = folder.parent
    target = work / folder.name.rsplit(".", 2)[0]
    recommend_file(Recommender.load(work / "run"), work / "histories.jsonl", target, 10)
    return content(target)


def use_cache(folder: Path) -> Any:
    """Makes semantic IDs of texts whose vectors are cached."""
    from maskgr.data.open import open_dataset
    from maskgr.sids.config import EncoderConfig, QuantizerConfig, SidsConfig
    from maskgr.sids.semantic_ids import SemanticIds

    config = SidsConfig(EncoderConfig("wordllama"), QuantizerConfig(levels=2, codes=4))
    data = open_dataset(str(folder.parent / "shop"))
    return SemanticIds.make(data, config, cache=folder).embeddings.tolist()


def changes(content_: bytes, rng: random.Random) -> Iterator[tuple[str, bytes | None]]:
    """Named changes of a file; None deletes it."""
    size = len(content_)
    places = {0, size - 1, *(rng.randrange(size) for _ in range(FLIPS - 2))} if size else set()
    for place in sorted(places):
        flipped = bytes([content_[place] ^ rng.randrange(1, 256)])
        yield f"flip {place}", content_[:place] + flipped + content_[place + 1 :]
    if size > 1:
        yield "truncate", content_[: rng.randrange(1, size)]
    if size:
        yield "empty", b""
    yield "delete", None


@dataclass(frozen=True)
class Artefact:
    """What is tampered with, how it is used, and whether the use writes beside it."""

    name: str
    path: str  # below the folder
    use: Callable[[Path], Any]
    writes: bool = False


def tamper(breaker: Breaker, artefact: Artefact, source: Path, seed: int) -> Iterator[Outcome]:
    """Every change of every file of an artefact below `source`, each in its own copy."""
    work, output = breaker.work, breaker.output

    def use() -> Any:
        path = work / artefact.path
        return call(lambda: used(artefact.use, path), work, output, breaker.patience)

    fresh(source, work)
    before = use()
    if before["error"] or before["said"]:
        raise Failure(f"{artefact.name} cannot be used untouched: {before}")
    files = sorted(p for p in (source / artefact.path).rglob("*") if p.is_file())
    fresh(source, work)
    for file in files:
        name = str(file.relative_to(source / artefact.path))
        target, whole = work / file.relative_to(source), file.read_bytes()
        for change, changed in changes(whole, random.Random(f"{seed} {artefact.name} {name}")):
            if artefact.writes:
                fresh(source, work)
            if changed is None:
                target.unlink()
            else:
                target.write_bytes(changed)
            try:
                outcome, said = judged(use(), before, file.name)
            except ChildError as error:
                outcome, said = str(error), ""
            if artefact.writes and (left := leftovers(work)):
                outcome = f"{left} left behind"
            yield Outcome(artefact.name, name, change, outcome, said)
            target.write_bytes(whole)


def judged(found: dict[str, Any], before: dict[str, Any], file: str) -> tuple[str, str]:
    said = [found["error"]] if found["error"] else found["said"]
    words = " | ".join(said)
    if any("\n" in own for own in said):
        return "several lines", words
    named = any(file in own for own in said)
    if found["error"]:
        return ("noticed" if named else "the file is not named"), words
    if found["result"] != before["result"]:
        return "another result", words
    return ("noticed" if named else "no effect"), words


def interrupted_training(breaker: Breaker, name: str, pairs: tuple[str, ...], folder: Path) -> None:
    """A run folder whose last training was killed after its last checkpoint."""
    fresh(breaker.template, folder)
    for own in ("run", "other", "hub", "onnx", "sids"):
        shutil.rmtree(folder / own)
    (folder / "settings.json").write_text(json.dumps([name, pairs]))
    words = ("train", "shop", "--model", name, "--preset", "tiny", *settings(*pairs))
    breaker.run((*words, "--out", "new"), folder)
    shutil.rmtree(folder / "new" / "recommender")


def interrupted_batch(breaker: Breaker, target: str, folder: Path) -> str:
    """The name of the folder of parts that are left where joining them failed."""
    from maskgr.serving import batch

    fresh(breaker.template, folder)

    def half() -> None:
        def stop(*_: object) -> None:
            raise SystemExit(0)

        batch._Lines.join = batch._Parquet.join = stop  # type: ignore[method-assign]
        use_batch(folder / f"{target}.x.parts")

    child = start(half, folder, breaker.output)
    if child.wait(breaker.patience) != 0:
        raise Failure(f"no parts are left: {child.said[-1:]}")
    (parts,) = folder.glob(f"{target}.*.parts")
    return parts.name


def tamper_all(breaker: Breaker, seed: int, *, quick: bool = False) -> Iterator[Outcome]:
    template, root = breaker.template, breaker.root
    yield from tamper(breaker, Artefact("dataset", "shop", use_dataset), template, seed)
    yield from tamper(breaker, Artefact("semantic IDs", "sids", use_sids), template, seed)
    runs = {"maskgr": template / "run"}
    for name in () if quick else MODELS:
        out = root / "models" / name
        pairs = (*SIZES.get(name, ()), "fit.steps=2", "validations=1")
        words = ("train", "shop", "--model", name, "--preset", PAPER.get(name, "tiny"))
        breaker.run((*words, *settings(*pairs), "--out", str(out)), template)
        runs[name] = out
    for name, run in runs.items():
        own = Artefact(f"recommender of {name}", "recommender", use_recommender)
        yield from tamper(breaker, own, run, seed)
    yield from tamper(breaker, Artefact("export, hub", "hub", use_recommender), template, seed)
    yield from tamper(breaker, Artefact("export, ONNX", "onnx", use_onnx), template, seed)
    killed = root / "killed"
    networks = {"sasrec": ("width=16", "heads=2")}
    if not quick:
        networks["maskgr"] = ("width=16", "heads=2", "levels=3", "codes=8")
    for name, pairs in networks.items():
        interrupted_training(breaker, name, (*pairs, *STEPS), killed)
        own = Artefact(f"training of {name}", "new", use_training, writes=True)
        yield from tamper(breaker, own, killed, seed)
    for target in ("out.jsonl", "out.parquet"):
        parts = interrupted_batch(breaker, target, killed)
        own = Artefact(f"parts of {target}", parts, use_batch, writes=True)
        yield from tamper(breaker, own, killed, seed)
    fresh(template, killed)
    call(lambda: bool(use_cache(killed / "cache")), killed, breaker.output, breaker.patience)
    yield from tamper(breaker, Artefact("cached vectors", "cache", use_cache, True), killed, seed)
