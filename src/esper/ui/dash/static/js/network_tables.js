// What befell the seeds of one network, as tables.

import { element, figure, table } from "./dom.js";
import { named, score, signed, whole, words } from "./formats.js";

const none = (sentence) => element("p", { className: "note" }, sentence);

/** One row per seed. */
export function seedsTable({ seeds, slots }) {
  if (!seeds.length) return none("No seed has germinated.");
  const heads = ["Slot", "Blueprint", "Germinated", "Trained", "Blended", "Held", "Fossilized", "Pruned", "Outcome", "By", "Adds"];
  const steps = ["germinated", "trained", "blended", "held", "fossilized", "pruned"];
  const rows = seeds.map((seed) => [
    named(slots, seed.slot, "slot"),
    words(seed.blueprint),
    ...steps.map((name) => figure(whole(seed[name]))),
    element("span", { className: { fossilized: "good", pruned: "bad" }[seed.outcome] ?? "" }, words(seed.outcome)),
    words(seed.cause),
    figure(signed(seed.contribution)),
  ]);
  return table(heads, rows, "Lives of the seeds; numbers are steps");
}

/** One row per rollback. */
export function rollbacksTable({ rollbacks, slots }) {
  if (!rollbacks.length) return none("The governor never rolled this network back.");
  const rows = rollbacks.map((one) => [
    figure(whole(one.step)),
    words(one.trouble),
    `${score(one.loss_before)} to ${score(one.loss_after)}`,
    (one.pruned ?? []).map((slot) => named(slots, slot, "slot")).join(", ") || "none",
    one.ended ? "ended the episode" : "",
  ]);
  return table(["Step", "Trouble", "Loss", "Seeds gone", ""], rows, "Rollbacks");
}

/** One row per new verdict. */
export function gatesTable({ gates, slots }) {
  if (!gates.length) return none("No gate has judged a seed, or verdicts are not told of such runs.");
  const rows = gates.toReversed().map((one) => [
    figure(whole(one.step)),
    named(slots, one.slot, "slot"),
    String(one.gate ?? "–"),
    element("span", { className: one.passed ? "good" : "bad" }, one.passed ? "passed" : "held back"),
    words(one.reason),
  ]);
  return element("div", { className: "tall" }, table(["Step", "Slot", "Gate", "Verdict", "Reason"], rows, "Gate verdicts"));
}
