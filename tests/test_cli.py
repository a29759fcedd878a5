"""The command: help, errors, JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import maskgr as package
from maskgr.cli.console import print_json
from maskgr.errors import RequestError
from maskgr.models.base import MODELS
from tests.conftest import Outcome

HEAVY = ("torch", "polars", "numpy", "faiss", "rich", "pandas", "scipy", "transformers")


def test_help_imports_nothing_heavy() -> None:
    """Imports make help slow, so they are checked instead of seconds."""
    program = (
        "import sys; sys.argv = ['maskgr', '--help']\n"
        "from maskgr.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "evaluate" in done.stdout
    assert done.stderr.strip() == "[]"


def test_every_command_has_help(maskgr: Callable[..., Outcome]) -> None:
    groups = (["data", "fetch"], ["data", "inspect"], ["sids", "make"], ["sids", "show"],
              ["study", "list"], ["study", "run"])  # fmt: skip
    single = ("demo", "models", "train", "evaluate", "recommend", "explain", "add-items", "compare",
              "export")  # fmt: skip
    for words in ([], ["data"], ["sids"], ["study"], *groups, *([name] for name in single)):
        outcome = maskgr(*words, "--help")
        assert outcome.code == 0
        assert outcome.out.startswith(" ".join(["Usage: maskgr", *words]))


def test_version(maskgr: Callable[..., Outcome]) -> None:
    assert maskgr("--version").out.strip() == package.__version__


TRAIN = ["train", "synthetic", "--out", "x"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["fly"], "No such command 'fly'."),
        (["train", "synthetic"], "Missing option '--out'."),
        (["train", "nowhere", "--out", "x"], "'nowhere' is neither a folder nor a source"),
        ([*TRAIN, "--model", "magic"], "there is no model 'magic'; the models are maskgr, "),
        ([*TRAIN, "--preset", "huge"], "there is no preset 'huge'; the presets are cpu, "),
        ([*TRAIN, "--model", "maskgr-paper"], "maskgr-paper has no preset 'cpu'; its presets are"),
        ([*TRAIN, "--repeats", "eat"], "Invalid value for '--repeats': "),
        ([*TRAIN, "--k-core", "-1"], "Invalid value for '--k-core': "),
        ([*TRAIN, "--device", "abacus"], "there is no device 'abacus'; give auto, cpu"),
        ([*TRAIN, "--processes", "0"], "--processes 0 does not fit the "),
        ([*TRAIN, "--processes", "999"], "--processes 999 does not fit the "),
        ([*TRAIN, "--model", "popularity", "--processes", "2"], "popularity is trained by one"),
        ([*TRAIN, "--set", "colour=blue"], "--set colour=blue: there is no setting colour; the"),
        ([*TRAIN, "--set", "steps=5"], "--set steps=5: steps is ambiguous; use one of model.deco"),
        (["evaluate", "nowhere"], "there is no folder nowhere; check the path"),
        (["evaluate", "x", "--protocol", "some"], "Invalid value for '--protocol': "),
        (["evaluate", "x", "--split", "train"], "Invalid value for '--split': "),
        (["evaluate", "x", "--users", "0"], "Invalid value for '--users': "),
        (["evaluate", "x", "--k", "five"], "--k five is not a list of numbers"),
        (["recommend", "x", "--unknown", "eat"], "Invalid value for '--unknown': "),
        (["recommend", "x", "--retrieval", "telepathic"], "Invalid value for '--retrieval': "),
        (["recommend", "x", "--steps", "0"], "Invalid value for '--steps': "),
        (["recommend", "x", "--session", "0"], "Invalid value for '--session': "),
        (["recommend", "x", "--remask", "-1"], "Invalid value for '--remask': "),
        (["explain", "x", "--guidance", "-1"], "Invalid value for '--guidance': "),
        (["evaluate", "x", "--session", "-1"], "Invalid value for '--session': "),
        (["recommend", "x", "--input", "a"], "--input or --all-users goes with --output"),
        (["recommend", "x", "--input", "a", "--output", "b", "--json"], "--input or --all-users"),
        (["study", "magic", "--out", "x"], "there is no study 'magic'; the studies are "),
        (
            ["study", "orders", "--out", "x", "--only", "a"],
            "--only a: no such variant; the variants are maskgr",
        ),
        (["data", "fetch", "netflix"], "'netflix' is neither a folder nor a source"),
        (["data", "fetch", "beauty", "--set", "users=5"], "beauty has no settings; only synthetic"),
        (["data", "fetch", "synthetic", "--set", "size=5"], "--set size=5: there is no setting si"),
        (["data", "fetch", "synthetic", "--set", "users=x"], "--set users=x: 'x' is not a valid i"),
        (["data", "fetch", "synthetic", "--set", "users=0"], "users is 0; give a whole number"),
    ],
)
def test_user_errors_are_one_sentence_and_exit_2(
    maskgr: Callable[..., Outcome], words: list[str], expected: str
) -> None:
    outcome = maskgr(*words)
    assert outcome.code == 2
    assert outcome.out == ""
    assert outcome.err.startswith(f"error: {expected}")
    assert outcome.err.count("\n") == 1


def test_models_are_listed_with_what_they_can_do(maskgr: Callable[..., Outcome]) -> None:
    found = {row.pop("name"): row for row in json.loads(maskgr("models", "--json").out)}
    assert list(found) == list(MODELS)
    assert found["maskgr"]["presets"][:2] == ["tiny", "cpu"]
    assert "decode digits" in found["maskgr"]["can"]
    assert "decode digits" not in found["popularity"]["can"]
    table = maskgr("models").out
    for name, row in found.items():
        assert f"{name}: {row['about']}\n    needs: {row['needs']}\n" in table


@pytest.mark.parametrize(
    ("words", "where", "advice"),
    [
        (
            [*TRAIN, "--processes", "1"],
            "maskgr.run.start_run",
            "; nothing was trained yet, so give the same command again",
        ),
        (
            ["study", "x", "--out", "x"],
            "maskgr.studies.registry.run_study",
            "; the same command goes on",
        ),
        (["models"], "maskgr.models.base.model_class", ""),
    ],
)
def test_ctrl_c_says_how_to_go_on(
    maskgr: Callable[..., Outcome],
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    where: str,
    advice: str,
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(where, interrupted)
    outcome = maskgr(*words)
    assert outcome.code == 130
    assert outcome.err.splitlines()[-1] == f"interrupted{advice}"


def test_ctrl_c_in_a_training_names_resume(
    maskgr: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def interrupted(out: Path, *_: object, **__: object) -> None:
        (out / "training").mkdir(parents=True)
        (out / "training" / "run.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr("maskgr.run.start_run", interrupted)
    words = ["train", "synthetic", "--preset", "tiny", "--processes", "1"]
    outcome = maskgr(*words, "--out", tmp_path / "run")
    assert outcome.code == 130
    assert outcome.err.splitlines()[-1] == "interrupted; go on with --resume"


def test_debug_shows_the_traceback_wherever_it_stands(maskgr: Callable[..., Outcome]) -> None:
    assert "Traceback" not in maskgr("evaluate", "nowhere").err
    assert "Traceback" in maskgr("--debug", "evaluate", "nowhere").err
    assert "Traceback" in maskgr("evaluate", "nowhere", "--debug").err


def test_a_bug_is_called_a_bug(
    maskgr: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr("maskgr.cli.demo.run_demo", broken)
    outcome = maskgr("demo")
    assert outcome.code == 1
    assert outcome.err.startswith(
        "internal error: ZeroDivisionError: division by zero; this is a bug"
    )


def test_an_error_is_one_line_of_bounded_length_whatever_it_quotes() -> None:
    said = str(RequestError(f"there is no item {'x' * 9000}\n\u2028y; check the ID"))
    assert len(said) < 2000
    assert said.startswith("there is no item xxx")
    assert said.endswith("x  y; check the ID")


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
        OSError(12, "Cannot allocate memory"),
    ],
)
def test_too_little_memory_is_no_bug(
    maskgr: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def hungry(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("maskgr.cli.demo.run_demo", hungry)
    outcome = maskgr("demo")
    assert outcome.code == 2
    assert outcome.err.startswith("error: there is not enough memory; give it more, or")
    assert outcome.err.count("\n") == 1


def test_json_has_null_for_nan_and_infinity(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"a": [float("nan"), 1.5], "b": {"c": float("inf")}})
    assert json.loads(capsys.readouterr().out) == {"a": [None, 1.5], "b": {"c": None}}
