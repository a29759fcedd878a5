"""The command: help, errors, JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable

import pytest

import maskgr as package
from maskgr.cli.console import print_json
from tests.conftest import Outcome

HEAVY = ("torch", "polars", "numpy", "faiss", "rich", "pandas", "scipy", "transformers")


def test_help_imports_nothing_heavy() -> None:
    """What makes help slow is imports, so these are counted instead of seconds."""
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
    for words in ([], ["data"], ["data", "fetch"], ["data", "inspect"], ["train"], ["evaluate"]):
        outcome = maskgr(*words, "--help")
        assert outcome.code == 0
        assert outcome.out.startswith("Usage: maskgr")


def test_version(maskgr: Callable[..., Outcome]) -> None:
    assert maskgr("--version").out.strip() == package.__version__


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["fly"], "error: No such command 'fly'."),
        (["train", "synthetic"], "error: Missing option '--out'."),
        (["train", "nowhere", "--out", "x"], "error: 'nowhere' is neither a folder nor a source"),
        (["train", "synthetic", "--out", "x", "--model", "magic"], "error: there is no model"),
        (["train", "synthetic", "--out", "x", "--repeats", "eat"], "error: --repeats eat is not a"),
        (["evaluate", "nowhere"], "error: there is no folder nowhere; check the path"),
        (["evaluate", "x", "--protocol", "some"], "error: there is no protocol 'some'; choose all"),
        (["evaluate", "x", "--k", "five"], "error: --k five is not a list of numbers"),
        (["recommend", "x", "--unknown", "eat"], "error: --unknown eat is not a choice"),
        (["recommend", "x", "--input", "a", "--output", "b", "--json"], "error: --input and"),
        (["experiment", "dense", "--out", "x", "--preset", "tiny"], "error: the preset tiny has"),
        (["data", "fetch", "netflix"], "error: 'netflix' is neither a folder nor a source"),
        (["data", "fetch", "beauty", "--set", "users=5"], "error: beauty has no parameters"),
        (["data", "fetch", "synthetic", "--set", "size=5"], "error: --set size=5 is not key=value"),
        (["data", "fetch", "synthetic", "--set", "users=x"], "error: --set users=x: 'x' is not a"),
        (["data", "fetch", "synthetic", "--set", "users=0"], "error: the generated shop's users"),
    ],
)
def test_user_errors_are_one_sentence_and_exit_2(
    maskgr: Callable[..., Outcome], words: list[str], expected: str
) -> None:
    outcome = maskgr(*words)
    assert outcome.code == 2
    assert outcome.out == ""
    assert outcome.err.startswith(expected)
    assert outcome.err.count("\n") == 1


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


def test_json_has_no_word_for_what_is_no_number(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"a": [float("nan"), 1.5], "b": {"c": float("inf")}})
    assert json.loads(capsys.readouterr().out) == {"a": [None, 1.5], "b": {"c": None}}
