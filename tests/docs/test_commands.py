"""Every command in README.md and docs/ is one that the program understands; README's are run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import typer
from typer.core import TyperGroup

from maskgr import Dataset
from maskgr.cli import app
from maskgr.data.config import SyntheticConfig
from maskgr.data.open import from_shop
from maskgr.data.synthetic import generate
from tests.conftest import Outcome

ROOT = Path(__file__).parents[2]
README_IDS = ("B004756YJA", "B004ZT0SSG")  # the items of its commands
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def calls(page: Path) -> list[str]:
    """The lines of a page's code blocks that call `maskgr`, without their comments."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    found = [re.sub(r"^\$ |\s+#.*$", "", line) for line in lines]
    return [call for call in found if re.match(r"(torchrun .* -m )?maskgr [a-z]", call)]


def mentions(page: Path) -> list[str]:
    """What a page's sentences say about commands, such as `maskgr train --resume`."""
    found = re.findall(r"`(maskgr [a-z][^`]*)`", page.read_text(encoding="utf-8"))
    return [re.sub(r"\s+", " ", mention) for mention in found]


CASES = [(page.name, call) for page in PAGES for call in calls(page)]
MENTIONS = [(page.name, mention) for page in PAGES for mention in mentions(page)]


@pytest.mark.parametrize(("page", "mention"), MENTIONS)
def test_mentioned_command_and_options_exist(page: str, mention: str) -> None:
    words = re.findall(r"[\w-]+", mention.partition("&&")[0])[1:]
    command: Any = typer.main.get_command(app)
    assert words[0] in command.commands
    while isinstance(command, TyperGroup):
        name = words.pop(0) if words and words[0] in command.commands else command.default
        command = command.commands[name]
    known = {option for param in command.params for option in (*param.opts, *param.secondary_opts)}
    assert {word for word in words if word.startswith("--")} <= known


@pytest.mark.parametrize(("page", "call"), CASES)
def test_command_is_understood(page: str, call: str) -> None:
    words = list(takewhile(lambda word: word not in (">", "|", "&"), shlex.split(call)))
    parse(typer.main.get_command(app), "maskgr", words[words.index("maskgr") + 1 :])


def parse(command: Any, name: str, words: list[str]) -> None:
    """Raises where the program would refuse the words; runs nothing."""
    context = command.make_context(name, list(words))
    if isinstance(command, TyperGroup):
        rest = [*context._protected_args, *context.args]
        found, inner, left = command.resolve_command(context, rest)
        parse(inner, str(found), left)


@pytest.mark.parametrize("call", ["train shop --out runs --bogus", "data inspect", "no-such"])
def test_wrong_command_is_not_understood(call: str) -> None:
    with pytest.raises(Exception, match=r"(?i)no such|missing"):
        parse(typer.main.get_command(app), "maskgr", call.split())


def test_pages_have_commands() -> None:
    assert len(CASES) > 30
    assert {page for page, _ in CASES} >= {"README.md", "training.md"}


def test_readme_commands_run(
    maskgr: Callable[..., Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shop = from_shop(generate(SyntheticConfig(users=120, items=40)))
    names = dict(zip(shop.item_ids[: len(README_IDS)], README_IDS, strict=True))
    renamed = pl.col("item_id").replace(names)
    log = shop.interactions().with_columns(renamed)
    Dataset.from_frames(log, shop.items.with_columns(renamed)).save("shop")
    later = pl.col("timestamp") + pl.duration(days=400)
    log.head(30).select("user_id", "item_id", later).write_parquet("new.parquet")
    quick = {
        "train": ["--preset", "tiny", "--set", "fit.steps=20"],
        "update": ["--set", "fit.steps=2"],
        "compare": None,  # long; tested in tests/studies
        "serve": None,  # runs until it is stopped; tested in tests/serving
    }
    asked = [shlex.split(call)[1:] for call in calls(ROOT / "README.md")]
    ran = set()
    for words in asked:
        if (more := quick.get(words[0], [])) is not None:
            outcome = maskgr(*words, *more)
            assert outcome.code == 0, (words, outcome.err)
            ran.add(words[0])
    assert ran >= {"data", "train", "evaluate", "recommend", "explain", "update", "models"}
    assert len(pl.read_parquet("recommendations.parquet")) == 120
