// The denoising, played: a line of steps, buttons to play and step, the beams, and a sentence.

import { remainingBar, showBeams } from "./beams.js";
import { button, byId, el, number } from "./dom.js";
import { state, update } from "./state.js";
import { caption } from "./trace.js";

const PAUSE = 2200; // milliseconds a step is shown
const FEW = 6; // beams shown at first

let film = null; // {all, model, order}
let timer = null;
let everyBeam = false;
let parts = null;

/** Shows a trace from the step that the address names. */
export function showDenoising(all, model, order) {
  pause();
  film = { all, model, order };
  parts ??= build();
  parts.line.replaceChildren(...all.map((beams, step) => tick(beams[0], step, model)));
  if (!parts.player.isConnected) {
    // Not each time: whoever is on a button stays there.
    byId("denoising").replaceChildren(parts.player, parts.line, parts.caption, parts.grid, parts.more);
  }
  show();
}

/** A sentence in place of the film. */
export function showNoDenoising(sentence) {
  pause();
  film = null;
  byId("denoising").replaceChildren(el("p", { class: "notice" }, sentence));
}

const last = () => film.all.length - 1;
const place = () => Math.min(state.step ?? 0, last());

function build() {
  const back = button("‹ Back", () => go(place() - 1));
  const play = button("▶ Play", () => (timer ? pause() : start()), { class: "primary" });
  const next = button("Next ›", () => go(place() + 1));
  return {
    back,
    play,
    next,
    player: el("div", { class: "player", role: "group", "aria-label": "Player" }, play, back, next),
    line: el("ol", { class: "line", "aria-label": "Timeline" }),
    caption: el("p", { class: "caption", role: "status" }),
    grid: el("ol", { class: "beams", "aria-label": "Beams, best first" }),
    more: button("", showMore, { class: "quiet" }),
  };
}

function showMore() {
  everyBeam = !everyBeam;
  show();
}

function start() {
  const next = place() === last() ? 0 : place() + 1;
  timer = setInterval(() => go(place() + 1, true), PAUSE);
  go(next, true);
}

export function pause() {
  clearInterval(timer);
  timer = null;
  if (parts) label();
}

/** Goes to a step; whoever steps by hand stops the player. */
function go(target, playing = false) {
  update({ step: Math.max(0, Math.min(target, last())) || undefined });
  if (!playing || place() === last()) pause();
}

/** Shows the step that the address has come to name. */
export function followAddress() {
  if (film) show();
}

function label() {
  parts.play.textContent = timer ? "❚❚ Pause" : film && place() === last() ? "↻ Play again" : "▶ Play";
}

function show() {
  const { all, model, order } = film;
  const at = place();
  parts.caption.textContent = caption(all, at, model, order);
  [...parts.line.children].forEach((own, step) => {
    own.classList.toggle("passed", step <= at);
    own.firstChild.setAttribute("aria-current", step === at ? "step" : "false");
  });
  showBeams(parts.grid, all, at, everyBeam ? Infinity : FEW, model);
  const hidden = all[at].length > FEW;
  parts.more.hidden = !hidden;
  parts.more.textContent = everyBeam ? `Show the best ${FEW} beams only` : `Show all ${all[at].length} beams`;
  parts.back.setAttribute("aria-disabled", String(at === 0));
  parts.next.setAttribute("aria-disabled", String(at === last()));
  label();
}

/** A step of the line: how many items the best beam leaves, on a logarithmic bar. */
function tick(best, step, model) {
  return el(
    "li",
    {},
    el(
      "button",
      { type: "button", onclick: () => go(step) },
      el("span", { class: "tick-name" }, step ? `Step ${step}` : "Start"),
      remainingBar(best, model),
      el("span", { class: "muted small" }, `${number(best.remaining)} left`),
    ),
  );
}
