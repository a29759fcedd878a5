// Two settings or two models for the same history, with what differs marked.

import { latest, post } from "./api.js";
import { byId, el, plural, unseen } from "./dom.js";
import { face } from "./items.js";
import { body, showSettings } from "./settings.js";

const NAMES = { 1: "Left", 2: "Right" };
const run = latest();

/** Asks both sides and shows them; `history` has items. */
export async function showComparison(service, history) {
  if (!byId("compare").childElementCount) byId("compare").append(box(1), box(2));
  for (const side of [1, 2]) showSettings(byId(`side-${side}-settings`), service, side, false);
  const ids = history.map((item) => item.item_id);
  const asked = [1, 2].map((side) => body(service, ids, side));
  const answers = await run((signal) => Promise.all(asked.map((one) => post("v1/recommend", one, signal))));
  if (!answers) return;
  const lists = answers.map((answer) => answer.items);
  const [left, right] = marks(...lists.map((items) => items.map((item) => item.item_id)));
  fill(1, lists[0], left);
  fill(2, lists[1], right);
  byId("compare-status").textContent = summary(lists, right);
}

function box(side) {
  const title = `side-${side}-title`;
  return el(
    "section",
    { class: "side", "aria-labelledby": title },
    el("h3", { id: title }, NAMES[side]),
    el("div", { id: `side-${side}-settings`, class: "settings" }),
    el("ol", { id: `side-${side}-items`, class: "results" }),
  );
}

/** What differs: for each place of each list {kind, words}. Moves are marked on the right alone. */
function marks(left, right) {
  const places = new Map(left.map((id, place) => [id, place]));
  const others = new Set(right);
  const move = (id, place) => {
    if (!places.has(id)) return { kind: "only", words: "only right" };
    const by = places.get(id) - place;
    if (by === 0) return { kind: "same", words: "same place" };
    const far = Math.abs(by);
    if (by > 0) return { kind: "up", words: `▲ ${far}`, spoken: `${plural(far, "place")} higher than left` };
    return { kind: "down", words: `▼ ${far}`, spoken: `${plural(far, "place")} lower than left` };
  };
  return [left.map((id) => (others.has(id) ? null : { kind: "only", words: "only left" })), right.map(move)];
}

function fill(side, items, found) {
  const rows = items.map((item, place) => {
    const rank = el("span", { class: "rank", "aria-hidden": "true" }, String(place + 1));
    return el("li", { class: "result" }, el("div", { class: "result-row" }, rank, face(item), badge(found[place])));
  });
  byId(`side-${side}-items`).replaceChildren(...rows);
}

function badge(mark) {
  if (!mark) return null;
  const words = mark.spoken ? [el("span", { "aria-hidden": "true" }, mark.words), unseen(mark.spoken)] : mark.words;
  return el("span", { class: `badge ${mark.kind}` }, words);
}

function summary([left, right], found) {
  const both = found.filter((mark) => mark.kind !== "only").length;
  const same = found.filter((mark) => mark.kind === "same").length;
  const most = Math.max(left.length, right.length);
  if (same === most) return `Both lists are the same: ${plural(same, "item")} in the same order.`;
  return `${both} of ${plural(most, "item")} are in both lists, ${same} of them at the same place.`;
}
