// Why an item is recommended: how its digits were unmasked, and what it is like in the history.

import { el, listed, percent } from "./dom.js";
import { agreement, knownItem, semanticId, titleOf } from "./items.js";
import { reveals } from "./trace.js";

const NEAREST = 3;

/** The reasons for an explained item, as elements. */
export function reasons(item, all, history) {
  return [unmasking(item, all), neighbours(item, history)].filter(Boolean);
}

function unmasking(item, all) {
  const heading = el("h3", {}, "How its digits were unmasked");
  const found = reveals(all, item.sid);
  if (!found.length) return el("div", {}, heading, el("p", {}, "No beam ended here: it is ranked by its own score."));
  const rows = found.map(({ step, level, code, probability }) => {
    const alone = item.sid.map((own, place) => (place === level ? own : null));
    const words = `Step ${step}: digit ${level + 1} is ${code}, ${percent(probability)} probable`;
    return el("li", {}, semanticId(alone), el("span", {}, words));
  });
  return el("div", {}, heading, el("ul", { class: "reasons" }, rows));
}

function neighbours(item, history) {
  const rows = nearest(item, history).map(({ own, similarity }) => {
    const shared = agreement(item.sid, own.sid);
    const alike = own.item_id === item.item_id ? "the same item" : inCommon(shared);
    const words = similarity === undefined ? alike : `similarity ${similarity.toFixed(2)}, ${alike}`;
    return el("li", {}, semanticId(own.sid, shared), el("span", {}, el("strong", {}, titleOf(own)), `: ${words}`));
  });
  if (!rows.length) return null;
  return el("div", {}, el("h3", {}, "Closest in the history"), el("ul", { class: "reasons" }, rows));
}

/** The nearest items of the history by the model's similarity, else by how many digits they share. */
function nearest(item, history) {
  if (item.nearest.length) {
    return item.nearest.slice(0, NEAREST).map(({ item_id: id, similarity }) => ({ own: knownItem(id), similarity }));
  }
  const shared = (own) => agreement(item.sid, own.sid).length;
  const sorted = [...new Set(history)].sort((a, b) => shared(b) - shared(a));
  return sorted.slice(0, NEAREST).map((own) => ({ own }));
}

function inCommon(levels) {
  if (!levels.length) return "no digit in common";
  return `${levels.length === 1 ? "digit" : "digits"} ${listed(levels.map((level) => level + 1))} in common`;
}
