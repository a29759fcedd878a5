"""Lines and cards for notebooks."""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from types import SimpleNamespace
from typing import Any

import pytest

from maskgr import Recommender
from maskgr.cards import card
from maskgr.data.dataset import Dataset
from maskgr.models.base import HasSids
from maskgr.training.checkpoint import State
from maskgr.training.log import _bar
from tests.models.test_all_models import short_config
from tests.models.tiny import shop


class Checked(HTMLParser):
    """Fails on scripts, on anything that is loaded, and on tags that do not match."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in ("div", "table", "tr", "th", "td")
        assert [name for name, _ in attrs] == ["style"]
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += f"{data} "


def text_of(html: str) -> str:
    checked = Checked()
    checked.feed(html)
    assert not checked.open
    return checked.text


def test_cards_and_lines_say_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("maskgr.training.fit._plot", lambda run: None)
    data = shop()
    rec = Recommender.train(data, config=short_config("maskgr", "fit.steps=2", "validations=1"))
    assert isinstance(rec.model, HasSids)
    sids = rec.model.semantic_ids()
    events = len(data.histories.values)
    assert repr(data) == f"Dataset(24 users, 14 items, {events} events)"
    assert repr(rec) == f"Recommender(maskgr: 24 users, 14 items, {events} events)"
    assert repr(sids) == "SemanticIds(14 items, 3 digits: 4 x 4 x 4 codes)"
    for thing, words in (
        (data, ["Dataset", "users  24", "i00"]),
        (rec, ["Recommender: maskgr", "items  14", "validation recall@10"]),
        (sids, ["Semantic IDs", "different IDs", "residual-kmeans", "i00"]),
    ):
        found = text_of(thing._repr_html_())
        assert [word for word in words if word not in found] == []


def test_a_card_escapes_what_it_shows() -> None:
    found = card("<b>", "a & b", {"<i>": "<script>"}, rows=[{"x": "<p>" * 50}], notes=["<u>"])
    assert "<script>" not in found
    assert "<b> a & b" in text_of(found)


def test_an_empty_dataset_has_a_card() -> None:
    import polars as pl

    from maskgr.data.sequences import Sequences

    none = pl.Series("user_id", [], dtype=pl.String)
    items = pl.DataFrame({"item_id": []}, schema={"item_id": pl.String})
    assert "Dataset" in text_of(Dataset(none, items, Sequences.of([]))._repr_html_())


def test_progress_in_a_notebook_is_one_line_replaced_in_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown: list[str] = []

    def display(html: Any, display_id: bool) -> Any:
        return SimpleNamespace(update=lambda html: shown.append(html))

    fake = SimpleNamespace(HTML=str, display=display)
    monkeypatch.setitem(sys.modules, "ipykernel", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(display=fake))
    monkeypatch.setitem(sys.modules, "IPython.display", fake)
    words = {"loss": "1.5", "best": "3 %", "rate": "9"}
    with _bar(True, "history") as advance:
        advance(State(step=1, total=10, seconds=1.0), words)
        advance(State(step=2, total=10, seconds=2.0), words)  # too soon after the first
        advance(State(step=10, total=10, seconds=10.0), words)
    assert len(shown) == 2
    assert "history" in shown[0]
    assert "10/10 · loss 1.5 · best recall@10 3 % · 0.0 minutes left" in shown[1]
