// The seeds, rollbacks and gate results of one network, as tables.

import { element, figure, table } from "./dom.js";
import { difference, estimate, lossGain, measure, named, percent, whole, words } from "./formats.js";

const none = (sentence) => element("p", { className: "note" }, sentence);

/** Decisions are counted from 1, steps from 0. */
const moment = (step, unit) => figure(whole(typeof step === "number" && unit === "decision" ? step + 1 : step));

/** One row per seed; the `newest` decision has what seeds contribute now, where that is recorded. */
export function seedsTable({ seeds, slots }, unit = "step", newest = null) {
  if (!seeds.length) return none("No seed has germinated.");
  const heads = ["Slot", "Blueprint", "Germinated", "Trained", "Blended", "Held", "Fossilized", "Pruned", "Outcome", "Cause", "Contribution", ...(newest ? ["Rent", "Minimum", "Loss with it", "Minimum decrease", "Contribution now"] : [])];
  const residents = new Map(seeds.map((seed) => [seed.slot, seed])); // the last in each slot
  const resident = (seed) => residents.get(seed.slot) === seed && seed.outcome !== "pruned";
  const now = (seed, name) => (resident(seed) ? newest[name]?.[seed.slot] : null);
  // Of a seed on probation, the threshold of now.
  const keptFrom = (seed) => seed.threshold ?? (seed.outcome === "unfinished" ? now(seed, "thresholds") : null);
  const steps = ["germinated", "trained", "blended", "held", "fossilized", "pruned"];
  const rows = seeds.map((seed) => [
    named(slots, seed.slot, "slot"),
    words(seed.blueprint),
    ...steps.map((name) => moment(seed[name], unit)),
    element("span", { className: { fossilized: "good", pruned: "bad" }[seed.outcome] ?? "" }, words(seed.outcome)),
    words(seed.cause),
    figure(estimate(seed.contribution, seed.error)),
    ...(newest
      ? [figure(measure(seed.price)), figure(difference(keptFrom(seed))), figure(lossGain(seed)), figure(percent(seed.loss_threshold)), figure(estimate(now(seed, "contributions"), now(seed, "contribution_errors")))]
      : []),
  ]);
  return table(heads, rows, `Seeds by ${unit}`);
}

/** One row per rollback. */
export function rollbacksTable({ rollbacks, slots }, unit = "step") {
  if (!rollbacks.length) return none("No rollbacks.");
  const rows = rollbacks.map((one) => [
    moment(one.step, unit),
    words(one.trouble),
    `${measure(one.loss_before)} to ${measure(one.loss_after)}`,
    (one.pruned ?? []).map((slot) => named(slots, slot, "slot")).join(", ") || "none",
    one.ended ? "ended the episode" : "",
  ]);
  return table([unit[0].toUpperCase() + unit.slice(1), "Cause", "Loss", "Seeds pruned", ""], rows, "Rollbacks");
}

/** One row per new verdict. */
export function gatesTable({ gates, slots }) {
  if (!gates.length) return none("No gate results were recorded.");
  const rows = gates.toReversed().map((one) => [
    figure(whole(one.step)),
    named(slots, one.slot, "slot"),
    String(one.gate ?? "–"),
    element("span", { className: one.passed ? "good" : "bad" }, one.passed ? "passed" : "held back"),
    words(one.reason),
  ]);
  return element("div", { className: "tall" }, table(["Step", "Slot", "Gate", "Result", "Reason"], rows, "Gate results"));
}
