"""Exports of random networks: what the ONNX files recommend is what torch recommends."""

from __future__ import annotations

import itertools
import json
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from huggingface_hub import ModelCard

from maskgr.data.dataset import Dataset
from maskgr.data.sequences import Sequences
from maskgr.decoding.config import DecodingConfig
from maskgr.errors import ArtefactError, DataError, RequestError
from maskgr.models.base import Model, TrainConfig, train_config
from maskgr.models.graphs import PaddedHistory
from maskgr.models.maskgr.bias import Bias
from maskgr.models.maskgr.config import MaskGRConfig
from maskgr.models.maskgr.model import MaskGR
from maskgr.models.neighbours import Neighbours
from maskgr.models.sasrec import SASRec, SASRecConfig
from maskgr.nn.item_vectors import DigitVectors
from maskgr.nn.transformer import TransformerConfig
from maskgr.recommender import Recommender
from maskgr.serving import export
from maskgr.serving.export import export_hub, export_onnx
from maskgr.serving.model_card import Figures
from maskgr.sids.config import QuantizerConfig, SidsConfig
from maskgr.sids.semantic_ids import SemanticIds
from maskgr.training.fit import FitConfig
from tests.conftest import Outcome
from tests.models.tiny import randomise, shop

EXAMPLE = Path(__file__).parents[2] / "examples" / "onnx_recommend.py"
ITEMS, LEVELS, CODES, LIMIT, WIDTH = 90, 4, 5, 6, 16
TRANSFORMER = TransformerConfig(layers=2, width=WIDTH, heads=2, hidden=32)
SIDS = SidsConfig(quantizer=QuantizerConfig(levels=LEVELS, codes=CODES), unique="share")
IDS = [f"i{number:02}" for number in range(ITEMS)]


def catalogue() -> Dataset:
    rng = np.random.default_rng(0)
    log = [(f"u{user}", IDS[item], n) for user in range(40) for n, item in enumerate(rng.integers(ITEMS, size=6))]  # fmt: skip  # noqa: E501
    events = pl.DataFrame(log, schema=["user_id", "item_id", "position"], orient="row")
    vectors = rng.normal(size=(ITEMS, 8)).astype(np.float32)
    return Dataset.from_frames(events, pl.DataFrame({"item_id": IDS}), embeddings=vectors)


def recommender_of(model: Model, config: TrainConfig) -> Recommender:
    made = {"data": "/home/someone/shop", "command": ["train", "/home/someone/shop"]}
    return Recommender(model, catalogue().items, config, repeats=False, made=made)


def sasrec() -> Recommender:
    torch.manual_seed(0)
    own = SASRecConfig(TRANSFORMER, repeat_bias=True)
    model = SASRec(own, np.arange(ITEMS), history_limit=LIMIT)
    randomise(model)
    return recommender_of(
        model.eval(), TrainConfig("sasrec", own, FitConfig(), history_limit=LIMIT, device="cpu")
    )


def maskgr_model(vectors: str) -> Recommender:
    """Learned: some semantic IDs are shared, and there is every bias; digits: for sessions."""
    torch.manual_seed(0)
    data = catalogue()
    numbers = np.random.default_rng(1).permutation(CODES**LEVELS)[:ITEMS, None]
    digits = (numbers // CODES ** np.arange(LEVELS) % CODES).astype(np.int32)
    if vectors == "learned":  # items with the same digits would have the same vectors, and tie
        digits[-5:] = digits[:5]
    sids = replace(SemanticIds.make(data, SIDS), digits=digits, codebook_sizes=(CODES,) * LEVELS)
    own = MaskGRConfig(
        TRANSFORMER,
        vectors=vectors,
        items="text",
        neighbours=7 if vectors == "learned" else 0,
        session=1 if vectors == "learned" else 2,
        sids=SIDS,
        decoding=DecodingConfig(beams=8, steps=2),
    )
    summed = None
    if vectors == "digits":
        summed = DigitVectors(WIDTH, torch.from_numpy(digits).long(), sids.codebook_sizes)
    network = SASRecConfig(TRANSFORMER, items="text", repeat_bias=True)
    texts = torch.from_numpy(sids.embeddings)
    history = SASRec(network, np.arange(ITEMS), texts, LIMIT, summed)
    neighbours = Neighbours.count(data.histories, ITEMS, 7) if own.neighbours else None
    config = TrainConfig("maskgr", own, FitConfig(), history_limit=LIMIT, device="cpu")
    model = MaskGR(config, sids, history, neighbours, Bias(2.0, 0.7 if neighbours else 0.0))
    randomise(model)
    return recommender_of(model.eval(), config)


MAKERS: dict[str, Callable[[], Recommender]] = {
    "sasrec": sasrec,
    "learned": lambda: maskgr_model("learned"),
    "digits": lambda: maskgr_model("digits"),
}


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Recommender, Path]]:
    """A recommender and its ONNX export, made once."""
    made: dict[str, tuple[Recommender, Path]] = {}

    def get(name: str) -> tuple[Recommender, Path]:
        if name not in made:
            recommender, folder = MAKERS[name](), tmp_path_factory.mktemp("onnx") / name
            export_onnx(recommender, folder)
            made[name] = recommender, folder
        return made[name]

    return get


@pytest.fixture(scope="module")
def example() -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLE))


def histories() -> list[list[str]]:
    """None, one, many, more than the model sees, and the same item again and again."""
    rng = np.random.default_rng(2)
    rows = [[], [3], [4, 4, 4], *(rng.integers(ITEMS, size=n).tolist() for n in (2, 5, 6, 7, 20))]
    return [[IDS[item] for item in row] for row in rows]


def assert_same(found: list[Any], expected: list[Any]) -> None:
    for own, theirs in zip(found, expected, strict=True):
        assert [item for item, _ in own] == [item for item, _ in theirs]
        np.testing.assert_allclose(
            [score for _, score in own], [score for _, score in theirs], atol=1e-5, rtol=1e-5
        )


WAYS = [(1, "greedy"), *itertools.product((2, 3, LEVELS), ("greedy", "left-to-right"))]


@pytest.mark.parametrize("name", ["learned", "digits"])
def test_generates_what_torch_generates(
    exports: Callable[[str], tuple[Recommender, Path]], example: dict[str, Any], name: str
) -> None:
    recommender, folder = exports(name)
    model, rows = example["Model"](folder, 1), histories()
    for (steps, order), seen, top in itertools.product(WAYS, (True, False), (5, 12)):
        decoding = recommender.decoding(steps=steps, order=order)
        expected = recommender.recommend(rows, top, exclude_seen=seen, decoding=decoding)
        found = model.recommend(rows, top, exclude_seen=seen, steps=steps, order=order)
        assert_same(found, expected)
    assert_same(model.recommend(rows), recommender.recommend(rows))  # as the model itself decodes
    decoding = recommender.decoding(beams=1, steps=3)
    one = model.recommend(rows, ITEMS, beams=1, steps=3)
    assert_same(one, recommender.recommend(rows, ITEMS, decoding=decoding))


def test_ranks_what_sasrec_ranks(
    exports: Callable[[str], tuple[Recommender, Path]], example: dict[str, Any]
) -> None:
    recommender, folder = exports("sasrec")
    assert not (folder / "denoiser.onnx").exists()
    model, rows = example["Model"](folder, 1), histories()
    for seen, top in itertools.product((True, False, None), (1, 10, ITEMS)):
        expected = recommender.recommend(rows, top, exclude_seen=seen)
        assert_same(model.recommend(rows, top, exclude_seen=seen), expected)
    alone = [model.recommend([row], 10)[0] for row in rows]  # one user, and no item at all
    assert_same(alone, recommender.recommend(rows, 10))


def test_example_answers_many_users_in_portions(
    exports: Callable[[str], tuple[Recommender, Path]], example: dict[str, Any]
) -> None:
    recommender, folder = exports("learned")
    model, rows = example["Model"](folder, 1), histories()
    before = example["CELLS"]
    globals_of_example = model.recommend.__func__.__globals__
    globals_of_example["CELLS"] = 3 * ITEMS
    try:
        assert_same(model.recommend(rows), recommender.recommend(rows))
    finally:
        globals_of_example["CELLS"] = before


def test_recommends_nothing_where_everything_was_seen(
    exports: Callable[[str], tuple[Recommender, Path]], example: dict[str, Any]
) -> None:
    _, folder = exports("learned")
    model = example["Model"](folder, 1)
    assert model.recommend([IDS, IDS[1:]], 3)[0] == []
    assert [item for item, _ in model.recommend([IDS, IDS[1:]], 3)[1]] == [IDS[0]]


def test_padding_has_no_effect() -> None:
    model = sasrec().model
    assert isinstance(model, SASRec)
    lengths = [0, 2, 5]
    rows = Sequences.of([np.arange(n) for n in lengths])
    vectors = torch.full((3, 5, WIDTH), 1e3)
    with torch.no_grad():
        for row, items in zip(vectors, rows, strict=True):
            row[: len(items)] = model.table()[torch.from_numpy(items).long()]
        found, _ = PaddedHistory(model.start, model.encoder, model.query)(
            vectors, torch.tensor(lengths)
        )
        expected = model.queries(model.last_states(rows))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_example_runs_without_torch_and_maskgr(
    exports: Callable[[str], tuple[Recommender, Path]],
) -> None:
    recommender, folder = exports("learned")
    blocked = "import sys, runpy; sys.modules.update(torch=None, maskgr=None, safetensors=None)\n"
    words = [str(EXAMPLE), str(folder), "--history", "i03, i10", "--top", "4", "--steps", "3"]
    program = f"{blocked}sys.argv = {words!r}; runpy.run_path(sys.argv[0], run_name='__main__')"
    done = subprocess.run([sys.executable, "-I", "-c", program], capture_output=True, text=True)
    assert done.stderr == ""
    decoding = recommender.decoding(steps=3)
    expected = recommender.recommend(["i03", "i10"], 4, decoding=decoding)
    lines = [line.split("\t") for line in done.stdout.splitlines()]
    assert_same([[(item, float(score)) for item, score in lines]], [expected])


def test_files_of_an_export_hold_no_place_of_this_machine(
    exports: Callable[[str], tuple[Recommender, Path]],
) -> None:
    _, folder = exports("learned")
    names = {file.name for file in folder.iterdir()}
    assert names == {
        *("history.onnx", "denoiser.onnx", "arrays.safetensors"),
        *("item_ids.json", "config.json", "maskgr.json", "maskgr.sha256"),
    }
    source = str(Path(export.__file__).parents[2]).encode()
    for file in folder.iterdir():
        content = file.read_bytes()
        assert source not in content
        assert b"/home/someone" not in content


@pytest.mark.parametrize("harm", ["flip", "cut", "empty", "delete"])
def test_example_notices_every_damaged_file(
    exports: Callable[[str], tuple[Recommender, Path]], example: dict[str, Any], harm: str
) -> None:
    _, folder = exports("sasrec")
    for file in sorted(folder.iterdir()):
        content = file.read_bytes()
        damage(file, harm)
        with pytest.raises(SystemExit, match=r"export it again") as stop:
            example["Model"](folder, 1)
        assert file.name in str(stop.value) or file.stem == "maskgr"
        file.write_bytes(content)
    example["Model"](folder, 1)


def damage(file: Path, harm: str) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 255
    if harm == "delete":
        file.unlink()
    else:
        file.write_bytes({"flip": content, "cut": content[:-1], "empty": b""}[harm])


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"histories": [["ghost"]]}, "item 'ghost' is not in the catalogue"),
        ({"steps": 5}, "give 1 to 4 as --steps"),
        ({"top": 0}, "1 or more as --top"),
        ({"beams": 0}, "1 or more as --top and --beams"),
        ({"order": "random"}, "only maskgr itself has random orders"),
        ({"guidance": 1.0}, "only maskgr itself has random orders, remasking and guidance"),
    ],
)
def test_example_refuses_in_a_sentence(
    exports: Callable[[str], tuple[Recommender, Path]],
    example: dict[str, Any],
    asked: dict[str, Any],
    message: str,
) -> None:
    model = example["Model"](exports("learned")[1], 1)
    with pytest.raises(SystemExit, match=message):
        model.recommend(**{"histories": [["i01"]], **asked})


def test_raises_when_model_extra_or_folder_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    popular = Recommender.train(shop(), config=train_config(model="popularity"))
    with pytest.raises(RequestError, match="Popularity cannot be exported to ONNX; maskgr, sasrec"):
        export_onnx(popular, tmp_path / "out")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("mine")
    for name, message in (
        ("file", "exists and was not made by maskgr"),
        ("full", "exists and was not made by maskgr"),
        ("file/out", "cannot write .*file/out"),
    ):
        with pytest.raises(ArtefactError, match=message):
            export_onnx(sasrec(), tmp_path / name)
        with pytest.raises(ArtefactError, match=message):
            export_hub(popular, tmp_path / name)
    monkeypatch.setattr(export, "find_spec", lambda name: None)
    with pytest.raises(RequestError, match=r"pip install 'maskgr\[onnx\]'"):
        export_onnx(sasrec(), tmp_path / "out")
    assert not (tmp_path / "out").exists()


KILLED = """
import os, signal, sys
from pathlib import Path
from maskgr.recommender import Recommender
from maskgr.serving import export

export._write_graph = lambda graph, file: file.write_bytes(b"graph")
export._write_json = lambda content, file: os.kill(os.getpid(), signal.SIGKILL)
getattr(export, f"export_{sys.argv[1]}")(Recommender.load(sys.argv[2]), Path(sys.argv[3]))
"""


@pytest.mark.parametrize("target", ["onnx", "hub"])
def test_killed_export_leaves_nothing_or_the_older_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    monkeypatch.setattr(export, "_write_graph", lambda graph, file: file.write_bytes(b"graph"))
    recommender, out = sasrec(), tmp_path / "out"
    recommender.save(tmp_path / "run")
    for older in (False, True):
        if older:
            getattr(export, f"export_{target}")(recommender, out)
        before = {file: file.read_bytes() for file in out.rglob("*") if file.is_file()}
        words = [sys.executable, "-c", KILLED, target, str(tmp_path / "run"), str(out)]
        assert subprocess.run(words, stderr=subprocess.DEVNULL).returncode == -signal.SIGKILL
        assert {f: f.read_bytes() for f in out.rglob("*") if f.is_file()} == before
        assert out.exists() == older


HUB: dict[str, Callable[[], Recommender]] = {
    **MAKERS,
    **{
        name: lambda name=name: Recommender.train(shop(), config=train_config(model=name))  # type: ignore[misc]
        for name in ("popularity", "neighbours")
    },
}


@pytest.mark.parametrize("name", HUB)
def test_hub_folder_loads_back(tmp_path: Path, name: str) -> None:
    recommender, folder = HUB[name](), tmp_path / "hub"
    export_hub(recommender, folder)
    export_hub(recommender, folder)  # an older export is replaced
    again = Recommender.load(folder)
    rows = [[], ["i01", "i03"], ["i05", "i05", "i02"]]
    assert again.recommend(rows, 10) == recommender.recommend(rows, 10)
    assert again.config == recommender.config
    found = {file.name for file in folder.iterdir() if file.is_file()}
    assert {"config.json", "model.safetensors", "README.md", "maskgr.json"} <= found
    assert json.loads((folder / "config.json").read_text())["model_type"] == again.config.name
    for file in folder.rglob("*.parquet"):  # nobody's history is published
        assert not len(pl.read_parquet(file).get_column("user_id", default=pl.Series()))


@pytest.mark.parametrize("harm", ["flip", "cut", "empty", "delete"])
def test_hub_folder_notices_every_damaged_file_but_the_card(tmp_path: Path, harm: str) -> None:
    folder = tmp_path / "hub"
    export_hub(sasrec(), folder)
    for file in sorted(f for f in folder.rglob("*") if f.is_file()):
        content = file.read_bytes()
        damage(file, harm)
        if file.name == "README.md":
            Recommender.load(folder)
        else:
            with pytest.raises(ArtefactError, match=rf"{file.stem}\."):
                Recommender.load(folder)
        file.write_bytes(content)


FIGURES = {
    "model": "sasrec",
    "split": "test",
    "retrieval": "ranking",
    "order": None,
    "steps": None,
    "users": 40,
    "protocols": {
        "all": {"recall@10": {"mean": 0.25, "low": 0.2, "high": 0.3}},
        "unseen": {"recall@10": {"mean": 0.5, "low": 0.4, "high": 0.6}},
    },
}


def test_model_card_says_what_is_known(tmp_path: Path) -> None:
    recommender = replace(sasrec(), made={**sasrec().made, "counts": {"users": 40, "items": ITEMS}})
    (tmp_path / "figures.json").write_text(json.dumps(FIGURES))
    export_hub(recommender, tmp_path / "hub", Figures.read(tmp_path / "figures.json", "sasrec"))
    card = ModelCard.load(tmp_path / "hub" / "README.md")
    assert card.data.library_name == "maskgr"
    assert "sasrec" in (card.data.tags or [])
    values = {f"{r.metric_name}": r.metric_value for r in card.data.eval_results or []}
    assert values == {"recall@10 (all items)": 0.25, "recall@10 (unseen items)": 0.5}
    for text in (
        *("| source | shop |", "| users | 40 |", "| unseen | 50.00 % |"),
        *("Recommender.load(", "## Limits", "| `model.transformer.width` | 16 |"),
    ):
        assert text in card.text
    assert "/home/someone" not in (tmp_path / "hub" / "maskgr.json").read_text()
    export_hub(recommender, tmp_path / "hub")
    assert "Not measured yet" in ModelCard.load(tmp_path / "hub" / "README.md").text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("nonsense", r"figures.json cannot be read as figures"),
        ("[]", "cannot be read as figures"),
        ('{"model": "sasrec"}', "cannot be read as figures .*retrieval"),
        (json.dumps({**FIGURES, "model": "tiger"}), "is of a tiger, and this is a sasrec"),
    ],
)
def test_raises_when_figures_are_something_else(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "figures.json").write_text(content)
    with pytest.raises(DataError, match=message):
        Figures.read(tmp_path / "figures.json", "sasrec")


def test_command_exports(maskgr: Callable[..., Outcome], tmp_path: Path) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    recommender = Recommender.train(shop(), config=train_config(model="popularity"))
    recommender.save(run / "recommender")
    done = maskgr("export", run, "--format", "hub", "--out", out)
    assert done.out == f"exported popularity with {len(recommender.items)} items to {out}\n"
    assert Recommender.load(out).recommend(["i01"]) == recommender.recommend(["i01"])
    for words, message in (
        (["--format", "onnx", "--out", tmp_path / "new"], "Popularity cannot be exported to ONNX;"),
        (["--format", "hub", "--out", run / "recommender"], f"{run / 'recommender'} was not made"),
        (["--format", "hub", "--out", run], f"{run} exists and was not made by maskgr"),
        (["--format", "tflite", "--out", out], "Invalid value for '--format'"),
        (["--format", "onnx", "--out", out, "--figures", "x"], "--figures go into the model card"),
        (["--format", "hub", "--out", out, "--figures", "x"], "x cannot be read as figures"),
        (["--format", "hub"], "Missing option '--out'"),
    ):
        failed = maskgr("export", run, *words)
        assert (failed.code, failed.err.count("\n")) == (2, 1)
        assert failed.err.startswith(f"error: {message}")
    assert not (tmp_path / "new").exists()
