"""The page in a real browser, on a real service of a small shop."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlencode

import httpx
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, Route, expect, sync_playwright

from maskgr.serving.served import Served
from tests.serving.conftest import running

ARGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
]
PHONE = {"width": 360, "height": 740}
VIEWS = {"watch": ".beam", "compare": "#side-2-items .result", "tree": ".node"}
SLOW = 60_000  # milliseconds that a busy machine may need


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("needs the browser chromium; install the package chromium")
    expect.set_options(timeout=SLOW)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=ARGS, timeout=SLOW)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def history(address: str) -> list[str]:
    """Three items: one with a picture, one whose ID has a slash."""
    found = httpx.get(f"{address}/v1/items", params={"limit": 10}).json()["items"]
    return [found[place]["item_id"] for place in (3, 7, 4)]


@contextmanager
def opened(
    browser: Browser, address: str, faults: bool = False, **context: Any
) -> Iterator[tuple[Page, str]]:
    """A page that must ask nobody but the service, and, unless `faults`, have no error."""
    seen: list[str] = []
    asked: set[str] = set()
    own = browser.new_context(**{"reduced_motion": "reduce", **context})
    own.set_default_timeout(SLOW)
    page = own.new_page()
    page.on("pageerror", lambda error: seen.append(str(error)))
    page.on("console", lambda line: seen.append(line.text) if line.type == "error" else None)
    page.on("request", lambda request: asked.add(request.url))
    try:
        yield page, address
    finally:
        own.close()
    assert all(url.startswith((address, "data:")) for url in asked), asked
    assert faults or not seen, seen


def link(address: str, history: list[str], **asked: Any) -> str:
    return f"{address}/?{urlencode([*(('h', item) for item in history or ['']), *asked.items()])}"


def ask(address: str, path: str, **body: Any) -> dict[str, Any]:
    answer = httpx.post(f"{address}/v1/{path}", json=body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def titles(page: Page, where: str) -> list[str]:
    return page.locator(f"{where} .title").all_text_contents()


def names(items: list[dict[str, Any]]) -> list[str]:
    return [item["fields"]["title"] for item in items]


def test_clicks_build_a_history_that_is_recommended_for(browser: Browser, address: str) -> None:
    with opened(browser, address) as (page, _):
        page.goto(link(address, []))
        expect(page.locator(".result")).to_have_count(10)
        page.get_by_label("Add items").fill("garden")
        found = httpx.get(f"{address}/v1/items", params={"q": "garden"}).json()["items"]
        first, second = names(found)[:2]
        page.get_by_role("button", name=f"Add {first} to the history").first.click()
        page.get_by_role("button", name=f"Add {second} to the history").first.click()
        expect(page.locator(".chip .title")).to_have_text([first, second])
        ids = [item["item_id"] for item in found[:2]]
        expected = names(ask(address, "recommend", history=ids)["items"])
        expect(page.locator("#results .title")).to_have_text(expected)
        expect(page.locator("#results-status")).to_have_text(re.compile(r"found in [\d.]+ ms; "))
        assert page.url == link(address, ids)
        page.get_by_label("Add items").fill("no such words")
        expect(page.get_by_text("No item has these words.")).to_be_visible()
        page.get_by_role("button", name="Clear").click()
        expect(page.locator(".chip")).to_have_count(0)
        assert page.url == link(address, [])


def test_chips_move_and_go_by_button_and_key(
    browser: Browser, address: str, history: list[str]
) -> None:
    with opened(browser, address) as (page, _):
        page.goto(link(address, history))
        chips = page.locator(".chip .title")
        expect(chips).to_have_count(3)
        a, b, c = chips.all_text_contents()
        page.get_by_role("button", name=f"Move {a} later").click()
        expect(chips).to_have_text([b, a, c])
        expect(page.get_by_role("button", name=f"Move {a} later")).to_be_focused()
        page.keyboard.press("Alt+ArrowDown")
        expect(chips).to_have_text([b, c, a])
        expect(page.locator("#live")).to_have_text("Moved to place 3 of 3.")
        page.keyboard.press("Alt+ArrowUp")
        page.keyboard.press("Delete")
        expect(chips).to_have_text([b, c])
        page.get_by_role("button", name=f"Remove {b}").click()
        expect(chips).to_have_text([c])
        expect(page.get_by_role("button", name=f"Remove {c}")).to_be_focused()
        expect(page).to_have_url(link(address, [history[2]]))


def test_denoising_plays_from_masks_to_the_recommendations(
    browser: Browser, address: str, history: list[str]
) -> None:
    trace = ask(address, "explain", history=history, top=10)
    with opened(browser, address) as (page, _):
        page.goto(link(address, history))
        levels, last = len(trace["items"][0]["sid"]), len(trace["steps"])
        expect(page.locator("#denoising .digit.masked")).to_have_count(levels)
        expect(page.locator(".caption")).to_contain_text("each of the 200 items is possible")
        page.get_by_role("button", name="Play").click()
        expect(page.get_by_role("button", name="Pause")).to_be_visible()
        expect(page.locator(".caption")).to_contain_text(f"Step {last} of {last}.")
        expect(page.get_by_role("button", name="Play again")).to_be_visible()
        expect(page.locator("#denoising .digit.masked")).to_have_count(0)
        for beam, card in zip(trace["steps"][-1], page.locator(".beam").all(), strict=False):
            own = [item for item in trace["items"] if item["sid"] == beam["digits"]]
            assert card.locator(".title").all_text_contents() == names(own)
        assert titles(page, ".beam")[0] == titles(page, "#results")[0]


def test_each_step_shows_what_the_trace_has(
    browser: Browser, address: str, history: list[str]
) -> None:
    trace = ask(address, "explain", history=history, top=10, beams=4)
    with opened(browser, address) as (page, _):
        page.goto(link(address, history, beams=4))
        for number, beams in enumerate(trace["steps"], 1):
            page.get_by_role("button", name="Next").click()
            expect(page.locator("[aria-current=step]")).to_contain_text(f"Step {number}")
            expect(page.locator(".caption")).to_contain_text(f"Step {number} of ")
            for place, beam in enumerate(beams):
                card = page.locator(".beam").nth(place)
                digits = ["?" if code is None else str(code) for code in beam["digits"]]
                assert card.locator(".digit").all_text_contents() == digits
                assert card.locator(".fresh").count() == len(beam["revealed"])
                if None in beam["digits"]:
                    expect(card.locator(".remaining")).to_contain_text(f"{beam['remaining']} item")
        page.get_by_role("button", name="Back").click()
        assert page.url.endswith(f"step={len(trace['steps']) - 1}")
        page.get_by_role("button", name="Start").click()
        assert "step" not in page.url


def test_order_steps_beams_and_results_can_be_changed(
    browser: Browser, address: str, history: list[str]
) -> None:
    with opened(browser, address) as (page, _):
        page.goto(link(address, history))
        expect(page.locator(".line li")).to_have_count(4)
        page.get_by_label("Steps", exact=True).select_option("2")
        expect(page.locator(".line li")).to_have_count(3)
        page.get_by_label("Unmask").select_option("left-to-right")
        page.get_by_label("Beams", exact=True).fill("3")
        page.get_by_label("Results").fill("5")
        page.get_by_label("Results").blur()
        expect(page.locator(".result")).to_have_count(5)
        page.get_by_role("button", name="Next").click()
        expect(page.locator(".beam")).to_have_count(3)
        expect(page.locator(".beam").first.locator(".digit").nth(2)).to_have_text("?")
        asked = {"order": "left-to-right", "steps": 2, "beams": 3, "top": 5}
        assert page.url == link(address, history, **asked, step=1)
        expected = ask(address, "recommend", history=history, **asked)["items"]
        assert titles(page, "#results") == names(expected)


def test_why_names_the_digits_and_the_nearest_items(
    browser: Browser, address: str, history: list[str]
) -> None:
    trace = ask(address, "explain", history=history, top=10)
    with opened(browser, address) as (page, _):
        page.goto(link(address, history))
        page.get_by_role("button", name="Why").first.click()
        why = page.locator("#why-0")
        expect(why).to_be_visible()
        for level, code in enumerate(trace["items"][0]["sid"], 1):
            expect(why).to_contain_text(f"digit {level} is {code}, ")
        expect(why.locator("strong")).to_have_count(3)
        page.get_by_role("button", name="Why").first.click()
        expect(why).to_be_hidden()


@pytest.mark.parametrize("other", [{"model2": "popularity"}, {"beams2": 1}])
def test_comparison_marks_what_differs(
    browser: Browser, address: str, history: list[str], other: dict[str, Any]
) -> None:
    left = names(ask(address, "recommend", history=history)["items"])
    asked = {"model": "popularity"} if "model2" in other else {"steps": 1, "beams": 1}
    right = names(ask(address, "recommend", history=history, **asked)["items"])
    with opened(browser, address) as (page, _):
        page.goto(link(address, history, view="compare", **other))
        expect(page.locator("#side-2-items .title")).to_have_text(right)
        assert titles(page, "#side-1-items") == left
        for place, row in enumerate(page.locator("#side-2-items li").all()):
            if right[place] not in left:
                expected = "only right"
            elif by := left.index(right[place]) - place:
                expected = f"{'▲' if by > 0 else '▼'} {abs(by)}"
            else:
                expected = "same place"
            expect(row.locator(".badge")).to_contain_text(expected)
        gone = [name for name in left if name not in right]
        only = page.locator("#side-1-items li", has_text="only left").locator(".title")
        assert only.all_text_contents() == gone
        both = len(left) - len(gone)
        status = page.locator("#compare-status")
        same = left == right
        expect(status).to_contain_text("Both lists" if same else f"{both} of 10 items are in both")


def test_link_shows_the_same_page_and_back_returns(
    browser: Browser, address: str, history: list[str]
) -> None:
    with opened(browser, address) as (page, _):
        start = link(address, history, order="random", steps=2, beams=7, step=2)
        page.goto(start)
        expect(page.locator(".caption")).to_contain_text("Step 2 of 2. The order is drawn by lot.")
        expect(page.get_by_label("Unmask")).to_have_value("random")
        expect(page.get_by_label("Beams", exact=True)).to_have_value("7")
        assert page.url == start
        page.get_by_role("link", name="Compare").click()
        expect(page.locator("#compare-title")).to_be_focused()
        expect(page.locator("#side-1-settings").get_by_label("Beams", exact=True)).to_have_value(
            "7"
        )
        page.reload()
        expect(page.locator("#compare-title")).to_be_visible()
        page.go_back()
        expect(page.locator(".caption")).to_contain_text("Step 2 of 2.")


def test_late_answer_for_an_older_history_is_not_shown(
    browser: Browser, address: str, history: list[str]
) -> None:
    held: list[Route] = []
    with opened(browser, address) as (page, _):
        page.goto(link(address, history[:1]))
        expect(page.locator(".result")).to_have_count(10)  # the history was looked up before
        add = page.locator(".result-tools button", has_text="Add").first
        page.route(re.compile(r"/v1/items\?.*id="), lambda route: held.append(route))
        with page.expect_request(re.compile(r"/v1/items\?.*id=")):
            add.click()
        page.get_by_role("button", name="Clear").click()
        expected = names(ask(address, "recommend", history=[])["items"])
        expect(page.locator("#results .title")).to_have_text(expected)
        with page.expect_request_finished():
            held[0].continue_()
        page.wait_for_timeout(100)  # for what must not happen
        assert titles(page, "#results") == expected
        expect(page.locator(".chip")).to_have_count(0)


def test_problem_is_shown_as_its_sentence_and_can_be_mended(
    browser: Browser, address: str, history: list[str]
) -> None:
    with opened(browser, address, faults=True) as (page, _):
        page.goto(link(address, ["nothing", history[0]]))
        expect(page.get_by_role("alert")).to_contain_text("there is no item 'nothing'")
        page.get_by_role("button", name="Remove nothing").click()
        expect(page.locator(".result")).to_have_count(10)
        expect(page.get_by_role("alert")).to_be_hidden()


def test_model_without_digits_is_told_in_words(browser: Browser, address: str) -> None:
    with opened(browser, address) as (page, _):
        page.goto(link(address, [], model="popularity"))
        expect(page.locator("#denoising")).to_contain_text("popularity ranks all items directly")
        expect(page.locator(".result")).to_have_count(10)
        expect(page.get_by_label("Steps", exact=True).first).to_have_count(0)
        page.get_by_role("link", name="Semantic IDs").click()
        expect(page.locator("#tree-intro")).to_have_text("popularity has no semantic IDs.")


def test_tree_is_opened_level_by_level(browser: Browser, address: str, history: list[str]) -> None:
    def children(prefix: str) -> list[dict[str, Any]]:
        answer = httpx.get(f"{address}/v1/sids", params={"prefix": prefix}).json()
        return sorted(answer["children"], key=lambda child: -child["count"])

    with opened(browser, address) as (page, _):
        page.goto(link(address, history, view="tree"))
        trees = [(top, children(str(top["code"]))) for top in children("")]
        with_leaf = [any(child["count"] == 1 for child in below) for _, below in trees]
        place = with_leaf.index(True)
        top, below = trees[place]
        node = page.locator("#tree > ul > li").nth(place)
        expect(node.locator(".node-count").first).to_contain_text(f"{top['count']} items")
        node.get_by_role("button").first.click()
        expect(node.locator(".inside > ul > li")).to_have_count(min(24, len(below)))
        node.locator(".inside .leaf button").first.click()
        expect(page.locator(".chip")).to_have_count(4)
        expect(node.locator(".badge").first).to_contain_text("in the history")


def test_keyboard_alone_is_enough(browser: Browser, address: str) -> None:
    def tab_to(name: str) -> None:
        for _ in range(80):
            page.keyboard.press("Tab")
            focused = page.evaluate(
                "document.activeElement.ariaLabel ?? document.activeElement.textContent"
            )
            if name in focused:
                return
        raise AssertionError(f"Tab does not reach {name}")

    with opened(browser, address) as (page, _):
        page.goto(link(address, []))
        expect(page.locator(".result")).to_have_count(10)
        page.keyboard.press("Tab")
        expect(page.get_by_role("link", name="Skip")).to_be_focused()
        tab_to(" to the history")
        page.keyboard.press("ArrowDown")
        page.keyboard.press("Enter")
        expect(page.locator(".chip")).to_have_count(1)
        tab_to("Play")
        page.keyboard.press("Tab")
        page.keyboard.press("Tab")
        for number in (1, 2, 3):
            page.keyboard.press("Enter")
            expect(page.locator(".caption")).to_contain_text(f"Step {number} of 3.")
        tab_to("Why")
        page.keyboard.press("Space")
        expect(page.locator("#why-0")).to_be_visible()
        page.locator("nav a").first.focus()
        tab_to("Semantic IDs")
        page.keyboard.press("Enter")
        tab_to("items")
        page.keyboard.press("Enter")
        expect(page.locator(".inside li").first).to_be_visible()


@pytest.mark.parametrize("view", VIEWS)
def test_no_fault_is_found_by_axe_and_a_phone_needs_no_sideways_scrolling(
    browser: Browser, address: str, history: list[str], view: str
) -> None:
    with opened(browser, address) as (page, _):
        page.goto(link(address, history, view=view, step=2, model2="popularity"))
        expect(page.locator(VIEWS[view]).first).to_be_visible()
        if view == "tree":
            page.locator(".node").first.click()
            expect(page.locator(".inside li").first).to_be_visible()
        if view == "watch":
            page.get_by_role("button", name="Why").first.click()
            page.get_by_text("Ask the same from a shell").click()
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
            found = Axe().run(page)
            assert found.violations_count == 0, found.generate_report()
        page.set_viewport_size(PHONE)
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]


@pytest.mark.parametrize(("motion", "moves"), [("no-preference", True), ("reduce", False)])
def test_nothing_moves_where_less_motion_is_preferred(
    browser: Browser, address: str, history: list[str], motion: str, moves: bool
) -> None:
    with opened(browser, address, reduced_motion=motion) as (page, _):
        page.goto(link(address, history))
        expect(page.locator(".beam")).to_have_count(1)
        running = page.evaluate(
            "() => { document.querySelector('.player').lastChild.click();"
            " return document.getAnimations().length; }"
        )
        assert (running > 0) == moves


def test_pictures_are_shown_and_markup_is_not_obeyed(
    browser: Browser, address: str, history: list[str]
) -> None:
    bad = {"title": "<img src=x onerror=alert(1)>", "image_url": "/page/none.png"}
    item = {"item_id": "bad", "fields": bad, "sid": [1, 2, 3]}
    with opened(browser, address, faults=True) as (page, _):
        page.route(
            re.compile(r"/v1/items\?.*limit="),
            lambda route: route.fulfill(json={"items": [item], "next": None, "total": 1}),
        )
        page.goto(link(address, history))
        picture = page.locator(".chip img").first
        expect(picture).to_have_attribute("loading", "lazy")
        expect(picture).to_have_attribute("alt", re.compile("^Picture of "))
        assert page.locator(".chip img").count() == 1
        expect(page.locator(".found .title")).to_have_text(bad["title"])
        expect(page.locator(".found .initial")).to_have_text("<")
        assert page.locator(".found img").count() == 0


def test_curl_asks_the_same(browser: Browser, address: str, history: list[str]) -> None:
    with opened(browser, address, permissions=["clipboard-read", "clipboard-write"]) as (page, _):
        page.goto(link(address, history, beams=4))
        page.get_by_text("Ask the same from a shell").click()
        page.get_by_role("button", name="Copy as curl").click()
        expect(page.get_by_role("button", name="Copied")).to_be_visible()
        words = shlex.split(page.evaluate("navigator.clipboard.readText()").replace("\\\n", " "))
        assert words[:2] == ["curl", f"{address}/v1/recommend"]
        answer = ask(address, "recommend", **json.loads(words[words.index("-d") + 1]))
        assert names(answer["items"]) == titles(page, "#results")


def test_key_is_asked_for(browser: Browser, models: list[Served]) -> None:
    with (
        running(models, keys=("open sesame",)) as address,
        opened(browser, address, faults=True) as (page, _),
    ):
        page.goto(link(address, []))
        for key in ("a wrong one", "open sesame"):
            expect(page.locator("#key-problem")).to_contain_text("key")
            page.get_by_label("API key").fill(key)
            page.get_by_role("button", name="Use this key").click()
            page.wait_for_event("load")
        expect(page.locator(".result")).to_have_count(10)
