// A trace of the denoising as pictures in a row, and what each of them means in words.

import { listed, number, percent, plural } from "./dom.js";
import { titleOf } from "./items.js";

/** Frames: the masked start, then one for each step. A beam also has `heir`, the first beam of the
    last step that descends from it (undefined: none does), and `items`, once its digits are whole. */
export function frames(explanation, model) {
  const start = { digits: Array(model.levels).fill(null), revealed: [], parent: 0, score: 0, remaining: model.items };
  const all = [[start], ...explanation.steps].map((beams) => beams.map((beam) => ({ ...beam, items: [] })));
  all.at(-1).forEach((beam, place) => (beam.heir = place));
  for (let step = all.length - 1; step > 0; step--) {
    for (const beam of all[step]) all[step - 1][beam.parent].heir ??= beam.heir;
  }
  const bySid = Map.groupBy(explanation.items, (item) => String(item.sid));
  for (const beam of all.at(-1)) beam.items = bySid.get(String(beam.digits)) ?? [];
  return all;
}

/** What happens in frame `place`, told of the best beam. */
export function caption(all, place, model, order) {
  if (place === 0) {
    const digits = model.levels === 1 ? "The digit is" : `All ${model.levels} digits are`;
    return `${digits} masked. Nothing is known yet: each of the ${plural(model.items, "item")} is possible.`;
  }
  const best = all[place][0];
  const step = `Step ${place} of ${all.length - 1}.`;
  const levels = best.revealed.map((one) => one.level + 1);
  const codes = best.revealed.map((one) => `${one.code} (${percent(one.probability)})`);
  const digits = levels.length === 1 ? "digit" : "digits";
  const unmasked = `The best beam unmasks ${digits} ${listed(levels)} as ${listed(codes)}.`;
  const said = `${step} ${reason(order, levels.length)} ${unmasked}`;
  if (best.digits.includes(null)) {
    const fit = best.remaining === 1 ? "fits" : "fit";
    return `${said} ${number(best.remaining)} of ${plural(model.items, "item")} still ${fit}.`;
  }
  return best.items.length ? `${said} That is “${titleOf(best.items[0])}”.` : `${said} That is an item.`;
}

function reason(order, count) {
  const digits = count === 1 ? "digit" : "digits";
  return {
    greedy: `Each beam takes the ${digits} that the model is surest of.`,
    "left-to-right": `Each beam takes the next ${digits} from the left.`,
    random: `The order is drawn by lot.`,
  }[order];
}

/** When each digit of an item was unmasked, and how probable it was: [{step, level, code, probability}];
    empty where no beam ended as this item. */
export function reveals(all, codes) {
  let beam = all.at(-1).find((one) => String(one.digits) === String(codes));
  const found = new Map();
  for (let step = all.length - 1; beam && step > 0; step--) {
    for (const one of beam.revealed) if (!found.has(one.level)) found.set(one.level, { step, ...one });
    beam = all[step - 1][beam.parent];
  }
  return [...found.values()].sort((a, b) => a.step - b.step || a.level - b.level);
}
