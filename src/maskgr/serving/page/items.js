// Items of the catalogue, and how they look.

import { get } from "./api.js";
import { el } from "./dom.js";

const HUES = 8; // classes hue-0 to hue-7 of the style sheet
const NAMES = ["title", "name", "product_name", "label"];
const known = new Map(); // ID as text -> item
let model;

/** The model whose semantic IDs items have from now on. */
export function useModel(name) {
  if (model !== name) known.clear();
  model = name;
}

/** What to ask the catalogue for beside the rest: the semantic IDs of this model. */
export const ofModel = () => ({ model });

/** Keeps items that an answer brought, so that they need not be asked for. */
export function remember(items) {
  for (const item of items) known.set(String(item.item_id), item);
  return items;
}

/** The items of IDs as the address has them: text, even where the catalogue has numbers. */
export async function lookUp(ids) {
  const missing = [...new Set(ids)].filter((id) => !known.has(id));
  if (missing.length) remember((await get("v1/items", { ...ofModel(), id: missing })).items);
  return ids.map(knownItem);
}

/** Also of an ID that is not in the catalogue: an item of which nothing is known. */
export const knownItem = (id) => known.get(String(id)) ?? { item_id: id, fields: {}, sid: null };

export function titleOf(item) {
  const fields = item.fields ?? {};
  const name = NAMES.find((own) => fields[own]);
  return name ? String(fields[name]) : String(item.item_id);
}

/** Up to three short fields beside the title. */
export function detailsOf(item) {
  const skipped = [...NAMES, "image_url", "item_id"];
  return Object.entries(item.fields ?? {})
    .filter(([name, value]) => !skipped.includes(name) && value != null && value !== "")
    .map(([, value]) => (Array.isArray(value) ? value.join(", ") : String(value)))
    .filter((value) => value.length <= 40)
    .slice(0, 3)
    .join(" · ");
}

/** Title, details, and the picture where the item has one. */
export function face(item) {
  const title = titleOf(item);
  const words = el("span", { class: "words" }, el("span", { class: "title" }, title));
  const details = detailsOf(item);
  if (details) words.append(el("span", { class: "details" }, details));
  return el("span", { class: "face" }, picture(item, title), words);
}

function picture(item, title) {
  const source = item.fields?.image_url;
  if (!source) return null;
  const image = el("img", { class: "picture", loading: "lazy", alt: `Picture of ${title}`, width: 48, height: 48 });
  image.addEventListener("error", () => image.replaceWith(initial(title)));
  image.src = source;
  return image;
}

function initial(title) {
  return el("span", { class: "picture initial", "aria-hidden": "true" }, title.slice(0, 1).toUpperCase());
}

/** One digit; null is masked. Every level has its own colour. */
export function digit(level, code, marks = "") {
  const look = code === null ? "masked" : `hue-${level % HUES}`;
  return el("span", { class: `digit ${look} ${marks}` }, code === null ? "?" : String(code));
}

/** A semantic ID in a line; `shared` marks the levels that are the same elsewhere. */
export function semanticId(codes, shared = []) {
  if (!codes) return null;
  const spoken = `semantic ID ${codes.map((code) => code ?? "masked").join(", ")}`;
  const digits = codes.map((code, level) => digit(level, code, shared.includes(level) ? "shared" : ""));
  return el("span", { class: "sid", role: "img", "aria-label": spoken }, digits);
}

/** The levels on which two semantic IDs agree. */
export function agreement(one, other) {
  return (one ?? []).flatMap((code, level) => (other?.[level] === code ? [level] : []));
}
