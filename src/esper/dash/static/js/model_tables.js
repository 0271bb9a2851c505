// The decisions about one model, in words.

import { element, figure, table } from "./dom.js";
import { difference, measure, named, whole, words } from "./formats.js";

/** Whether growth is about the loss alone. */
export const isLoss = (answer) => answer.about.metric === "loss";

/** What growth is about, as a title; names that their owner gave stay as they are. */
export const titled = (metric) => ({ accuracy: "Accuracy", loss: "Loss" })[metric] ?? metric;

/** One row per decision, the newest first. */
export function decisionsTable(answer) {
  const changes = byDecision(answer.transitions);
  const gates = byDecision(answer.gates);
  const rollbacks = byDecision(answer.rollbacks);
  const slot = (one) => named(answer.slots, one.slot, "slot");
  const rows = answer.decisions.toReversed().map((one) => [
    figure(whole(one.iteration)),
    lines([...(rollbacks.get(one.iteration) ?? []).map((back) => alarm(`rolled back: ${words(back.trouble)}`)), decided(one, answer)]),
    lines((changes.get(one.iteration) ?? []).map((change) => `${slot(change)}: ${words(change.before)} to ${words(change.after)}${change.cause === "finish" ? " (finish)" : ""}`)),
    lines((gates.get(one.iteration) ?? []).map((gate) => verdict(gate, slot(gate)))),
    lines((one.contributions ?? []).flatMap((value, place) =>
      typeof value === "number" ? [`${named(answer.slots, place, "slot")} ${difference(value)}`] : [])),
    figure(measure(one.loss)),
    ...(isLoss(answer) ? [] : [figure(measure(one.metric))]),
  ]);
  const heads = ["Decision", "What", "Changes", "Gates", "Contributions", "Loss", ...(isLoss(answer) ? [] : [titled(answer.about.metric)])];
  return element("div", { className: "tall" }, table(heads, rows, "Decisions"));
}

function byDecision(events) {
  const found = new Map();
  for (const one of events) found.set(one.iteration, [...(found.get(one.iteration) ?? []), one]);
  return found;
}

/** A decision in words. */
function decided(one, answer) {
  const what = one.blueprint ? ` ${one.blueprint} in` : "";
  const where = typeof one.slot === "number" ? ` ${named(answer.slots, one.slot, "slot")}` : "";
  return `${words(one.op)}${what}${where}`;
}

function verdict(gate, slot) {
  const said = gate.passed ? "passed" : `held back, ${words(gate.reason)}`;
  return element("span", {}, `${slot}: ${gate.gate ?? "–"} `, element("span", { className: gate.passed ? "good" : "bad" }, said));
}

const alarm = (text) => element("span", { className: "bad" }, text);

/** A cell of several lines. */
const lines = (parts) => element("div", { className: parts.length ? "lines" : "" }, parts.map((part) => element("div", {}, part)));
