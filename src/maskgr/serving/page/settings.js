// How the model searches: its order, steps and beams, for one side or the other.

import { byId, el } from "./dom.js";
import { state, update } from "./state.js";

const ORDERS = {
  greedy: "the surest digit first",
  "left-to-right": "from left to right",
  random: "in random order",
};
const MOST_BEAMS = 100;
const MOST_RESULTS = 100;

const at = (name, side) => state[side === 2 ? `${name}2` : name];

/** The model of side 1 or 2: the one that the address names, else the first. */
export function modelOf(service, side) {
  return service.models.find((model) => model.name === at("model", side)) ?? service.models[0];
}

/** How a side decodes: as the address says, else the model's own way; null: it has no digits.
    The right side compares with one step unless it is told otherwise. */
function decodingOf(service, side) {
  const model = modelOf(service, side);
  if (!model.decodes) return null;
  const { order, steps, beams } = model.decoding;
  return {
    order: at("order", side) in ORDERS ? at("order", side) : order,
    steps: Math.min(at("steps", side) ?? (side === 2 && !state.model2 ? 1 : steps), model.levels),
    beams: Math.min(at("beams", side) ?? beams, MOST_BEAMS),
  };
}

/** The body of a request for `history`, a list of IDs. */
export function body(service, history, side = 1) {
  const model = modelOf(service, side);
  const name = model === service.models[0] ? {} : { model: model.name };
  return { history, top: top(model), ...name, ...decodingOf(service, side) };
}

const top = (model) => Math.min(state.top ?? 10, MOST_RESULTS, model.items);

/** The controls of a side; `withTop`: also how many results. They are made once for each model, and
    then only get their values, so that nobody who types in one of them is disturbed. */
export function showSettings(target, service, side, withTop) {
  const model = modelOf(service, side);
  if (target.dataset.model !== model.name) build(target, service, model, side, withTop);
  target.dataset.model = model.name;
  const values = { model: model.name, top: top(model), ...decodingOf(service, side) };
  for (const [name, value] of Object.entries(values)) {
    const control = byId(`${target.id}-${name}`);
    if (control && control !== document.activeElement) control.value = value;
  }
}

function build(target, service, model, side, withTop) {
  const id = (name) => `${target.id}-${name}`;
  const change = (name) => (value) => update({ [side === 2 ? `${name}2` : name]: value, step: undefined });
  const controls = [];
  if (service.models.length > 1) {
    const options = service.models.map((one) => [one.name, one.name]);
    controls.push(choice("Model", id("model"), options, change("model")));
  }
  if (model.decodes) {
    const steps = Array.from({ length: model.levels }, (_, i) => [i + 1, stepsLabel(i + 1, model.levels)]);
    controls.push(
      choice("Unmask", id("order"), Object.entries(ORDERS), change("order")),
      choice("Steps", id("steps"), steps, (value) => change("steps")(Number(value))),
      count("Beams", id("beams"), MOST_BEAMS, change("beams")),
    );
  }
  if (withTop) {
    const most = Math.min(MOST_RESULTS, model.items);
    controls.push(count("Results", id("top"), most, (value) => update({ top: value })));
  }
  const focused = document.activeElement.id;
  target.replaceChildren(...controls);
  if (focused === id("model")) {
    byId(focused).value = model.name;
    byId(focused).focus();
  }
}

function stepsLabel(steps, levels) {
  if (steps === 1) return "1: all digits at once";
  return steps === levels ? `${steps}: one digit a step` : String(steps);
}

function choice(label, id, options, change) {
  const select = el("select", { id, onchange: () => change(select.value) });
  select.append(...options.map(([value, words]) => el("option", { value }, words)));
  return labelled(label, select);
}

function count(label, id, most, change) {
  const input = el("input", { id, type: "number", min: 1, max: most, inputmode: "numeric" });
  input.addEventListener("change", () => {
    const wanted = Math.min(most, Math.max(1, Math.round(Number(input.value) || 1)));
    input.value = wanted;
    change(wanted);
  });
  return labelled(label, input);
}

const labelled = (label, control) => el("div", { class: "setting" }, el("label", { for: control.id }, label), control);
