// What is asked, kept in the address: a link is all it takes to show somebody the same page.

const TEXT = ["view", "model", "order", "model2", "order2"];
const NUMBERS = ["steps", "beams", "top", "steps2", "beams2", "step"];
const listeners = [];

/** `history` is null where nothing was chosen, [] where it was emptied. */
export let state = read();

function read() {
  const asked = new URLSearchParams(location.search);
  const found = { history: asked.has("h") ? asked.getAll("h").filter(Boolean) : null };
  for (const name of TEXT) found[name] = asked.get(name) ?? undefined;
  for (const name of NUMBERS) found[name] = positive(asked.get(name));
  if (!["watch", "compare", "tree"].includes(found.view)) found.view = "watch";
  return found;
}

function positive(text) {
  const value = Number.parseInt(text, 10);
  return value > 0 ? value : undefined;
}

/** Changes what is asked; `push` makes a new entry for the browser's back button. */
export function update(changes, push = false) {
  const changed = Object.keys(changes).filter((name) => state[name] !== changes[name]);
  if (!changed.length) return;
  state = { ...state, ...changes };
  history[push ? "pushState" : "replaceState"](null, "", address(state));
  tell(changed);
}

/** `run` whenever one of `names` changes. */
export function onChange(names, run) {
  listeners.push([names, run]);
}

function tell(changed) {
  for (const [names, run] of listeners) if (names.some((name) => changed.includes(name))) run(changed);
}

/** The address at which this page shows `state`. */
export function address(state) {
  const asked = new URLSearchParams();
  if (state.view !== "watch") asked.set("view", state.view);
  for (const id of state.history.length ? state.history : [""]) asked.append("h", id);
  for (const name of [...TEXT.slice(1), ...NUMBERS]) if (state[name] !== undefined) asked.set(name, state[name]);
  return asked.size ? `?${asked}` : location.pathname;
}

addEventListener("popstate", () => {
  const before = state;
  state = read();
  tell(Object.keys(state).filter((name) => String(state[name]) !== String(before[name])));
});
