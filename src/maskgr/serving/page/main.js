// Joins the parts: the address says what is asked, and every part shows its answer.

import { get, latest, post, useKey } from "./api.js";
import { showComparison } from "./compare.js";
import { followAddress, pause, showDenoising, showNoDenoising } from "./denoising.js";
import { byId, debounced, plural } from "./dom.js";
import { showChips, showExamples, showSearch } from "./history.js";
import { lookUp, useModel } from "./items.js";
import { showReasons, showResults } from "./results.js";
import { body, modelOf, showSettings } from "./settings.js";
import { address, onChange, state, update } from "./state.js";
import { markHistory, showTree } from "./tree.js";
import { frames } from "./trace.js";

const EXAMPLES = 2; // items named in a beam
const ASKED = ["history", "view", "top", "model", "order", "steps", "beams", "model2", "order2", "steps2", "beams2"];
const VIEWS = {
  watch,
  compare: (history) => showComparison(service, history),
  tree: () => showTree(modelOf(service, 1)),
};
const newest = latest();
let service;

async function start() {
  service = await get("v1/model");
  showExamples(service.example_users);
  if (state.history === null) update({ history: (service.example_users[0]?.history ?? []).map(String) });
  onChange(["view"], pause);
  onChange(["step"], followAddress);
  onChange(ASKED, debounced(refresh, 60));
  await Promise.all([refresh(), showSearch()]);
}

/** Shows everything that the address asks for. */
async function refresh() {
  const model = modelOf(service, 1);
  useModel(model.name);
  byId("model").textContent = describe(model);
  showView();
  const ids = state.history;
  try {
    const history = await lookUp(ids).finally(showChips);
    if (ids !== state.history) return; // a newer one is asked for already
    markHistory();
    await VIEWS[state.view](history);
    byId("problem").hidden = true;
  } catch (error) {
    if (ids === state.history) showProblem(error);
  }
}

function describe({ name, version, items, levels }) {
  const digits = levels ? `, ${plural(levels, "digit")} each` : "";
  return `Model ${name} (${version}): ${plural(items, "item")}${digits}`;
}

function showView() {
  for (const panel of document.querySelectorAll("[data-panel]")) panel.hidden = panel.dataset.panel !== state.view;
  for (const link of document.querySelectorAll("[data-view]")) {
    link.href = address({ ...state, view: link.dataset.view, step: undefined });
    if (link.dataset.view === state.view) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
}

async function watch(history) {
  const model = modelOf(service, 1);
  showSettings(byId("watch-settings"), service, 1, true);
  byId("watch-intro").textContent = intro(model);
  const asked = body(service, history.map((item) => item.item_id));
  await newest(async (signal) => {
    const started = performance.now();
    const answer = await post("v1/recommend", asked, signal);
    showResults(answer, asked, performance.now() - started);
    if (!model.decodes) {
      showNoDenoising(`${model.name} ranks all items directly: it has no digits to unmask.`);
      return;
    }
    const explanation = await post("v1/explain", { ...asked, examples: EXAMPLES }, signal);
    const all = frames(explanation, model);
    if (all.length > 1) showDenoising(all, model, explanation.decoding.order);
    else showNoDenoising("Dense retrieval finds the nearest items to one predicted vector: no digit is unmasked.");
    showReasons(explanation, all, history);
  });
}

function intro(model) {
  if (!model.decodes) return "";
  const digits = plural(model.levels, "digit");
  return (
    `Every item has a semantic ID of ${digits}; similar items share digits. ` +
    "The next item starts with every digit masked. " +
    "Step by step the model unmasks some of them, and keeps the most probable tries: the beams."
  );
}

function showProblem(error) {
  if (error.status === 401) return askForKey(error.message);
  if (error.status === undefined) throw error; // a defect of this page
  byId("problem").textContent = error.message;
  byId("problem").hidden = false;
}

function askForKey(sentence) {
  const dialog = byId("key");
  byId("key-problem").textContent = sentence;
  dialog.onclose = () => {
    useKey(byId("key-value").value);
    location.reload();
  };
  dialog.showModal();
}

document.querySelector("nav").addEventListener("click", (event) => {
  const view = event.target.dataset.view;
  if (!view || event.ctrlKey || event.metaKey || event.shiftKey) return;
  event.preventDefault();
  update({ view }, true);
  showView();
  byId(`${view}-title`).focus();
});

start().catch(showProblem);
