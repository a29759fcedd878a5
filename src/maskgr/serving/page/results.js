// The recommendations, and why each of them is there.

import { curl } from "./api.js";
import { bar, byId, el, listed, percent, plural, say } from "./dom.js";
import { agreement, face, knownItem, semanticId, titleOf } from "./items.js";
import { add } from "./history.js";
import { state } from "./state.js";
import { reveals } from "./trace.js";

const NEAREST = 3;

/** `milliseconds`: from request to answer, as the browser saw it. */
export function showResults(answer, asked, milliseconds) {
  const { items, timings_ms: timings } = answer;
  byId("results-status").textContent = items.length
    ? `The ${plural(items.length, "most probable next item")}, found in ${short(timings.model)}; ${short(milliseconds)} with the way to this page and back.`
    : "No item is left: the history and the filters exclude them all.";
  const best = Math.max(...items.map((item) => item.score ?? -Infinity));
  if (byId("results").contains(document.activeElement)) byId("results-title").focus();
  byId("results").replaceChildren(...items.map((item, rank) => result(item, rank, best, answer.retrieval)));
  byId("curl").replaceChildren(shell(asked));
}

/** 4.2 ms, 31 ms. */
const short = (milliseconds) => `${milliseconds < 10 ? milliseconds.toFixed(1) : Math.round(milliseconds)} ms`;

function result(item, rank, best, retrieval) {
  const title = titleOf(item);
  const why = el("div", { class: "why", id: `why-${rank}`, hidden: true });
  const ask = el("button", { type: "button", class: "quiet ask", hidden: true, "aria-expanded": "false", "aria-controls": why.id, "aria-label": `Why ${title}?` }, "Why?");
  ask.addEventListener("click", () => {
    why.hidden = !why.hidden;
    ask.setAttribute("aria-expanded", String(!why.hidden));
  });
  return el(
    "li",
    { class: "result", "data-id": item.item_id },
    el(
      "div",
      { class: "result-row" },
      el("span", { class: "rank", "aria-hidden": "true" }, String(rank + 1)),
      face(item),
      state.history.includes(String(item.item_id)) ? el("span", { class: "badge" }, "taken before") : "",
      semanticId(item.sid),
      score(item, best, retrieval),
      el("span", { class: "result-tools" }, ask, el("button", { type: "button", class: "quiet", onclick: () => add(item), "aria-label": `Add ${title} to the history` }, "+ Add")),
    ),
    why,
  );
}

/** A log-probability as a percentage; other scores as they are. */
function score(item, best, retrieval) {
  if (item.score == null) return null;
  const isProbability = retrieval === "generative" && item.score <= 0;
  const words = isProbability ? percent(Math.exp(item.score)) : item.score.toFixed(2);
  return el("span", { class: "score" }, el("span", {}, words), isProbability ? bar(Math.exp(item.score - best)) : "");
}

/** Fills in the reasons, once the trace is there. */
export function showReasons(explanation, all, history) {
  for (const item of explanation.items) {
    const row = byId("results").querySelector(`[data-id="${CSS.escape(item.item_id)}"]`);
    row?.querySelector(".why").replaceChildren(...[digits(item, all), neighbours(item, history)].filter(Boolean));
    row?.querySelector(".ask").removeAttribute("hidden");
  }
}

function digits(item, all) {
  const found = reveals(all, item.sid);
  const heading = el("h3", {}, "How its digits were unmasked");
  if (!found.length) return el("div", {}, heading, el("p", {}, "No beam ended here: it is ranked by its own score."));
  const rows = found.map((one) => {
    const codes = item.sid.map((code, level) => (level === one.level ? code : null));
    return el("li", {}, semanticId(codes), el("span", {}, `Step ${one.step}: digit ${one.level + 1} is ${one.code}, ${percent(one.probability)} probable`));
  });
  return el("div", {}, heading, el("ul", { class: "reasons" }, rows));
}

/** The items of the history that are most like it, by the model's similarity, else by shared digits. */
function neighbours(item, history) {
  const near = item.nearest?.length
    ? item.nearest.map((one) => ({ item: knownItem(one.item_id), similarity: one.similarity }))
    : history.map((one) => ({ item: one })).sort((a, b) => agreement(item.sid, b.item.sid).length - agreement(item.sid, a.item.sid).length);
  const rows = near.filter((one) => one.item).slice(0, NEAREST).map(({ item: own, similarity }) => {
    const shared = agreement(item.sid, own.sid);
    const alike = own.item_id === item.item_id ? "the same item" : sharedWords(shared);
    const words = similarity == null ? alike : `similarity ${similarity.toFixed(2)}, ${alike}`;
    return el("li", {}, semanticId(own.sid, shared), el("span", {}, el("strong", {}, titleOf(own)), `: ${words}`));
  });
  return rows.length ? el("div", {}, el("h3", {}, "Closest in the history"), el("ul", { class: "reasons" }, rows)) : null;
}

function sharedWords(shared) {
  if (!shared.length) return "no digit in common";
  return `${shared.length === 1 ? "digit" : "digits"} ${listed(shared.map((level) => level + 1))} in common`;
}

function shell(asked) {
  const text = curl("v1/recommend", asked);
  const copy = el("button", { type: "button", onclick: () => copied(text, copy) }, "Copy as curl");
  return el("details", { class: "shell" }, el("summary", {}, "Ask the same from a shell"), el("pre", { tabindex: "0" }, text), copy);
}

async function copied(text, button) {
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
    say("Copied.");
  } catch {
    say("The browser does not allow copying; select the text instead.");
    getSelection().selectAllChildren(button.previousElementSibling);
  }
}
