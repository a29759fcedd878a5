// The recommendations.

import { curl } from "./api.js";
import { bar, button, byId, el, percent, plural, say } from "./dom.js";
import { add } from "./history.js";
import { face, semanticId, titleOf } from "./items.js";
import { state } from "./state.js";
import { reasons } from "./why.js";

/** `milliseconds`: from request to answer, as the browser saw it. */
export function showResults(answer, asked, milliseconds) {
  const { items, retrieval } = answer;
  byId("results-status").textContent = items.length
    ? `The ${plural(items.length, "most probable next item")}, found in ${short(answer.timings_ms.model)}; ` +
      `${short(milliseconds)} with the way to this page.`
    : "No item is left: the history and the filters exclude them all.";
  if (byId("results").contains(document.activeElement)) byId("results-title").focus();
  const best = Math.max(...items.map((item) => item.score ?? -Infinity));
  byId("results").replaceChildren(...items.map((item, place) => result(item, place, best, retrieval)));
  byId("curl").replaceChildren(shell(asked));
}

/** 4.2 ms, 31 ms. */
const short = (milliseconds) => `${milliseconds < 10 ? milliseconds.toFixed(1) : Math.round(milliseconds)} ms`;

function result(item, place, best, retrieval) {
  const title = titleOf(item);
  const isTaken = state.history.includes(String(item.item_id));
  const why = el("div", { class: "why", id: `why-${place}`, hidden: true });
  const ask = button("Why?", () => turn(ask, why), {
    class: "quiet ask",
    hidden: true,
    "aria-expanded": "false",
    "aria-controls": why.id,
    "aria-label": `Why ${title}?`,
  });
  const plus = button("+ Add", () => add(item), { class: "quiet", "aria-label": `Add ${title} to the history` });
  const row = el(
    "div",
    { class: "result-row" },
    el("span", { class: "rank", "aria-hidden": "true" }, String(place + 1)),
    face(item),
    isTaken ? el("span", { class: "badge" }, "taken before") : null,
    semanticId(item.sid),
    score(item, best, retrieval),
    el("span", { class: "result-tools" }, ask, plus),
  );
  return el("li", { class: "result", "data-id": item.item_id }, row, why);
}

function turn(ask, why) {
  why.hidden = !why.hidden;
  ask.setAttribute("aria-expanded", String(!why.hidden));
}

/** A log-probability as a percentage; other scores as they are. */
function score(item, best, retrieval) {
  if (item.score === null) return null;
  if (retrieval !== "generative") return el("span", { class: "score" }, item.score.toFixed(2));
  return el("span", { class: "score" }, percent(Math.exp(item.score)), bar(Math.exp(item.score - best)));
}

/** Fills in the reasons, once the trace is there. */
export function showReasons(explanation, all, history) {
  for (const item of explanation.items) {
    const row = byId("results").querySelector(`[data-id="${CSS.escape(item.item_id)}"]`);
    row?.querySelector(".why").replaceChildren(...reasons(item, all, history));
    row?.querySelector(".ask").removeAttribute("hidden");
  }
}

function shell(asked) {
  const text = curl("v1/recommend", asked);
  const copy = button("Copy as curl", () => copyText(text, copy));
  const shown = el("pre", { tabindex: "0" }, text);
  return el("details", { class: "shell" }, el("summary", {}, "Ask the same from a shell"), shown, copy);
}

async function copyText(text, pressed) {
  try {
    await navigator.clipboard.writeText(text);
    pressed.textContent = "Copied";
    say("Copied.");
  } catch {
    say("The browser does not allow copying; select the text instead.");
    getSelection().selectAllChildren(pressed.previousElementSibling);
  }
}
