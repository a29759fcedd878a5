// The beams of one step as cards side by side; a card moves in from the beam that it continues.

import { bar, el, percent, plural } from "./dom.js";
import { digit, face, titleOf } from "./items.js";

const MOVE = { duration: 500, easing: "cubic-bezier(.2, .7, .2, 1)" };
const TURN = { ...MOVE, delay: 250, fill: "backwards" };
const still = matchMedia("(prefers-reduced-motion: reduce)");

/** Replaces the cards of `grid` by those of a frame. */
export function showBeams(grid, all, place, shown, model) {
  const before = [...grid.children].map((card) => card.getBoundingClientRect());
  const beams = all[place].slice(0, shown);
  grid.replaceChildren(...beams.map((beam, rank) => card(beam, rank, place, all, model)));
  if (Number(grid.dataset.place) === place - 1 && !still.matches) animate(grid, beams, before);
  grid.dataset.place = place;
}

function card(beam, rank, place, all, model) {
  const fresh = new Map(beam.revealed.map((one) => [one.level, one.probability]));
  const slots = beam.digits.map((code, level) => slot(level, code, fresh.get(level)));
  const last = place === all.length - 1;
  const dropped = !last && beam.heir === undefined;
  const such = beam.items.length ? [] : (beam.examples ?? []).map(titleOf);
  const likely = place ? `${percent(Math.exp(beam.score))} likely` : "";
  return el(
    "li",
    { class: `beam ${dropped ? "dropped" : ""} ${rank === 0 ? "best" : ""}` },
    el("p", { class: "beam-head" }, place ? `Beam ${rank + 1}` : "Start", el("span", { class: "muted" }, likely)),
    el("div", { class: "slots", role: "img", "aria-label": spoken(beam) }, slots),
    beam.items.length ? beam.items.map(face) : remaining(beam, model),
    such.length ? el("p", { class: "muted such" }, such.join("; ")) : "",
    dropped ? el("p", { class: "muted small" }, "Others are more probable: it ends here.") : "",
  );
}

function slot(level, code, probability) {
  const isFresh = probability !== undefined;
  const chance = el("span", { class: "chance" }, isFresh ? percent(probability) : "\u00a0");
  return el("span", { class: "slot" }, digit(level, code, isFresh ? "fresh" : ""), chance);
}

function spoken(beam) {
  const words = beam.digits.map((code, level) => `digit ${level + 1} ${code === null ? "masked" : code}`);
  return words.join(", ");
}

function remaining(beam, model) {
  const words = el("span", {}, `${plural(beam.remaining, "item")} left`);
  return el("div", { class: "remaining" }, words, remainingBar(beam, model));
}

/** How many items still fit, on a logarithmic bar from one item to all of them. */
export function remainingBar(beam, model) {
  return bar(Math.log(Math.max(1, beam.remaining)) / Math.log(Math.max(2, model.items)));
}

function animate(grid, beams, before) {
  [...grid.children].forEach((card, rank) => {
    const from = before[beams[rank].parent];
    const to = card.getBoundingClientRect();
    const moved = from ? `translate(${from.left - to.left}px, ${from.top - to.top}px)` : "none";
    card.animate([{ transform: moved, opacity: from ? 0.4 : 0 }, { transform: "none", opacity: 1 }], MOVE);
    for (const shown of card.querySelectorAll(".fresh")) {
      shown.animate([{ transform: "rotateX(90deg)" }, { transform: "none" }], TURN);
    }
  });
}
