// Elements without markup in strings: nothing that a catalogue holds is ever parsed as HTML.

/** An element: functions are listeners (`onclick`), false and null are left out, true is an empty attribute. */
export function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") made.addEventListener(name.slice(2), value);
    else if (value !== false && value != null) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.flat().filter((child) => child != null && child !== false));
  return made;
}

export const byId = (id) => document.getElementById(id);

/** Text that only screen readers meet. */
export const unseen = (text) => el("span", { class: "unseen" }, text);

export function button(words, onclick, attributes = {}) {
  return el("button", { type: "button", onclick, ...attributes }, words);
}

/** A button with a sign that the eye reads, and a name that a screen reader speaks. */
export function sign(symbol, name, onclick, attributes = {}) {
  const shown = el("span", { "aria-hidden": "true" }, symbol);
  return button(shown, onclick, { class: "sign", "aria-label": name, title: name, ...attributes });
}

/** A horizontal bar from 0 to 1; the number stands beside it, so that it is hidden from readers. */
export function bar(share) {
  const filled = el("span");
  filled.style.setProperty("width", `${Math.round(100 * Math.min(1, Math.max(0.01, share)))}%`);
  return el("span", { class: "bar", "aria-hidden": "true" }, filled);
}

let silence;

/** Spoken by screen readers. */
export function say(sentence) {
  clearTimeout(silence);
  byId("live").textContent = sentence;
  silence = setTimeout(() => (byId("live").textContent = ""), 4000);
}

export const plural = (count, one, many = `${one}s`) => `${number(count)} ${count === 1 ? one : many}`;

export const number = (value) => value.toLocaleString("en");

/** 0.634 -> 63 %, 0.0123 -> 1.2 %, 0.00004 -> under 0.01 %. */
export function percent(share) {
  const value = 100 * share;
  if (value > 0 && value < 0.01) return "under 0.01 %";
  return `${value.toFixed(value >= 9.95 ? 0 : value >= 0.95 ? 1 : 2)} %`;
}

/** "1", "1 and 3", "1, 2 and 3". */
export function listed(words) {
  return words.length < 2 ? words.join("") : `${words.slice(0, -1).join(", ")} and ${words.at(-1)}`;
}

/** `run` after `wait` milliseconds without another call. */
export function debounced(run, wait) {
  let timer;
  return (...args) => {
    clearTimeout(timer);
    timer = setTimeout(run, wait, ...args);
  };
}
