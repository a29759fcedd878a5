// The history: found by searching or browsing, kept as chips that can be moved and removed.

import { get, latest } from "./api.js";
import { button, byId, debounced, el, plural, say, sign } from "./dom.js";
import { face, knownItem, ofModel, remember, semanticId, titleOf } from "./items.js";
import { state, update } from "./state.js";

const PAGE = 8;
const EXAMPLES = 6;

let shown = null; // the items of the chips, as JSON

export function add(item) {
  const items = [...state.history, String(item.item_id)];
  update({ history: items, step: undefined });
  say(`Added ${titleOf(item)}; the history has ${plural(items.length, "item")}.`);
}

function remove(place) {
  const title = titleOf(knownItem(state.history[place]));
  update({ history: state.history.toSpliced(place, 1), step: undefined });
  showChips();
  say(`Removed ${title}.`);
  const next = byId("chips").children[Math.min(place, state.history.length - 1)];
  (next?.querySelector("button:not(:disabled)") ?? byId("search-text")).focus();
}

function move(place, by) {
  const target = place + by;
  if (target < 0 || target >= state.history.length) return;
  const items = state.history.toSpliced(place, 1).toSpliced(target, 0, state.history[place]);
  update({ history: items, step: undefined });
  showChips();
  say(`Moved to place ${target + 1} of ${items.length}.`);
  const buttons = byId("chips").children[target].querySelectorAll("button");
  const wanted = buttons[by < 0 ? 0 : 1];
  (wanted.disabled ? buttons[by < 0 ? 1 : 0] : wanted).focus();
}

/** Shows the chips, unless they are there: the focus may be on one of them. */
export function showChips() {
  const ids = state.history;
  const items = ids.map(knownItem);
  if (shown === JSON.stringify(items)) return;
  shown = JSON.stringify(items);
  byId("chips").replaceChildren(...items.map((item, place) => chip(item, place, ids.length)));
  const words = ids.length ? plural(ids.length, "item") : "No items: the model guesses a first one.";
  const tools = ids.length ? [button("Clear", clear, { class: "quiet" })] : [];
  byId("history-tools").replaceChildren(el("span", { class: "muted grow" }, words), ...tools);
}

function clear() {
  update({ history: [], step: undefined });
  say("The history is empty.");
  byId("search-text").focus();
}

function chip(item, place, count) {
  const title = titleOf(item);
  const keys = (event) => {
    const by = { ArrowUp: -1, ArrowDown: 1 }[event.key];
    if (event.key === "Delete") remove(place);
    else if (event.altKey && by) move(place, by);
    else return;
    event.preventDefault();
  };
  return el(
    "li",
    { class: "chip", onkeydown: keys },
    el("span", { class: "chip-words" }, face(item), semanticId(item.sid)),
    el(
      "span",
      { class: "chip-tools" },
      sign("↑", `Move ${title} earlier (Alt+Up)`, () => move(place, -1), { disabled: place === 0 }),
      sign("↓", `Move ${title} later (Alt+Down)`, () => move(place, 1), { disabled: place === count - 1 }),
      sign("×", `Remove ${title} (Delete)`, () => remove(place)),
    ),
  );
}

export function showExamples(users) {
  if (!users?.length) return;
  const choose = (user) => () => update({ history: user.history.map(String), step: undefined });
  const buttons = users.slice(0, EXAMPLES).map((user) => button(String(user.user_id), choose(user), { class: "pill" }));
  const words = el("span", { class: "muted", id: "examples-title" }, "Try a user:");
  byId("examples").replaceChildren(
    el("div", { class: "pills", role: "group", "aria-labelledby": words.id }, words, buttons),
  );
}

/** The search field, and the items that it finds: all of the catalogue while it is empty. */
export function showSearch() {
  const run = latest();
  const field = el("input", { id: "search-text", type: "search", autocomplete: "off", placeholder: "Shampoo, tea, …" });
  const status = el("p", { class: "muted", role: "status" });
  const found = el("ul", { class: "found", "aria-label": "Items found" });
  const more = button("Show more", () => find(more.value), { class: "quiet", hidden: true });
  const find = async (cursor = null) => {
    const asked = { ...ofModel(), q: field.value.trim(), cursor, limit: PAGE };
    const answer = await run((signal) => get("v1/items", asked, signal)).catch((error) => {
      status.textContent = error.message;
    });
    if (!answer) return;
    const rows = remember(answer.items).map(foundItem);
    cursor ? found.append(...rows) : found.replaceChildren(...rows);
    if (cursor) rows[0]?.querySelector("button").focus();
    status.textContent = rows.length || cursor ? "" : "No item has these words.";
    more.hidden = !answer.next;
    more.value = answer.next;
  };
  field.addEventListener("input", debounced(() => find(), 150));
  byId("search").replaceChildren(
    el("label", { for: "search-text" }, "Add items"),
    field,
    status,
    el("div", { class: "found-box", onkeydown: walk }, found, more),
  );
  return find();
}

function foundItem(item) {
  const plus = el("span", { class: "plus", "aria-hidden": "true" }, "+");
  const name = `Add ${titleOf(item)} to the history`;
  return el("li", {}, button([face(item), plus], () => add(item), { class: "add", "aria-label": name }));
}

/** The arrow keys go from item to item. */
function walk(event) {
  const by = { ArrowUp: -1, ArrowDown: 1 }[event.key];
  if (!by) return;
  const buttons = [...event.currentTarget.querySelectorAll("button:not([hidden])")];
  buttons[buttons.indexOf(document.activeElement) + by]?.focus();
  event.preventDefault();
}
