// The tree of semantic IDs: a level a digit, opened when it is clicked.

import { get } from "./api.js";
import { bar, button, byId, el, number, plural, sign } from "./dom.js";
import { add } from "./history.js";
import { digit, face, knownItem, ofModel, remember, semanticId, titleOf } from "./items.js";
import { state } from "./state.js";

const PAGE = 24; // children shown at first

let shown = null; // the name of the model whose tree is there, as far as it was opened

export async function showTree(model) {
  if (shown === model.name) return;
  shown = null;
  byId("tree").replaceChildren();
  if (!model.levels) {
    byId("tree-intro").textContent = `${model.name} has no semantic IDs.`;
    return;
  }
  byId("tree-intro").textContent =
    `Every item has ${plural(model.levels, "digit")}, learned so that similar items share them. ` +
    "Open a digit to see what the next one tells apart.";
  byId("tree").replaceChildren(await branch([]));
  markHistory();
  shown = model.name;
}

/** The children of a prefix, the largest first. */
async function branch(prefix) {
  const answer = await get("v1/sids", { ...ofModel(), prefix: prefix.join(",") });
  if (!answer.children.length) return el("ul", { class: "branch" }, remember(answer.items).map(single));
  const children = answer.children.toSorted((a, b) => b.count - a.count);
  remember(children.flatMap((child) => child.examples));
  const largest = children[0].count;
  const name = prefix.length ? `Below ${prefix.join(", ")}` : "First digits";
  const list = el("ul", { class: "branch", "aria-label": name });
  const show = (from) => {
    const end = from + PAGE;
    list.append(...children.slice(from, end).map((child) => node([...prefix, child.code], child, largest)));
    if (end >= children.length) return;
    const goOn = () => {
      more.remove();
      show(end);
      list.children[end].querySelector("button").focus();
    };
    const more = el("li", {}, button(`Show more of ${number(children.length)} codes`, goOn, { class: "quiet" }));
    list.append(more);
  };
  show(0);
  return list;
}

function node(prefix, child, largest) {
  if (child.count === 1) return single(child.examples[0]);
  const level = prefix.length - 1;
  const examples = child.examples.map(titleOf).join("; ");
  const count = el("span", { class: "node-count" }, plural(child.count, "item"), bar(child.count / largest));
  const inside = el("div", { class: "inside", hidden: true });
  const open = el(
    "button",
    { type: "button", class: "node", "aria-expanded": "false" },
    el("span", { class: "turn", "aria-hidden": "true" }, "▸"),
    digit(level, child.code),
    el("span", { class: "node-words" }, count, el("span", { class: "details" }, examples)),
    el("span", { class: "badge same", hidden: true, "data-prefix": prefix.join(",") }),
  );
  open.addEventListener("click", async () => {
    inside.hidden = !inside.hidden;
    open.setAttribute("aria-expanded", String(!inside.hidden));
    if (inside.childElementCount || inside.hidden) return;
    inside.append(await branch(prefix).catch((error) => el("p", { class: "problem", role: "alert" }, error.message)));
    markHistory();
  });
  return el("li", {}, open, inside);
}

/** Marks the branches that items of the history are below. */
export function markHistory() {
  const sids = state.history.map((id) => knownItem(id)?.sid ?? []);
  for (const mark of document.querySelectorAll("[data-prefix]")) {
    const prefix = mark.dataset.prefix.split(",").map(Number);
    const count = sids.filter((sid) => prefix.every((code, level) => sid[level] === code)).length;
    mark.hidden = !count;
    mark.textContent = `${count} in the history`;
  }
}

/** An item without others beside it. */
function single(item) {
  const plus = sign("+", `Add ${titleOf(item)} to the history`, () => add(item));
  return el("li", { class: "leaf" }, semanticId(item.sid), face(item), plus);
}
