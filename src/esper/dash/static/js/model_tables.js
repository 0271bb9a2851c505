// The decisions about one model, in words.

import { element, figure, table } from "./dom.js";
import { difference, estimate, lossGain, measure, named, percent, whole, words } from "./formats.js";

/** Whether growth is about the loss alone. */
export const isLoss = (data) => data.about.metric === "loss";

/** The metric as a title; names of user-defined metrics stay as they are. */
export const titled = (metric) => ({ accuracy: "Accuracy", loss: "Loss" })[metric] ?? metric;

/** One row per decision, the newest first. */
export function decisionsTable(data) {
  const changes = byDecision(data.transitions);
  const gates = byDecision(data.gates);
  const rollbacks = byDecision(data.rollbacks);
  const slot = (one) => named(data.slots, one.slot, "slot");
  const rows = data.decisions.toReversed().map((one) => [
    figure(whole(one.iteration)),
    lines([...(rollbacks.get(one.iteration) ?? []).map((back) => alarm(`rolled back: ${words(back.trouble)}`)), decided(one, data)]),
    lines((changes.get(one.iteration) ?? []).map((change) => `${slot(change)}: ${words(change.before)} to ${words(change.after)}${change.cause === "finish" ? " (finish)" : ""}${describeDecision(change)}`)),
    lines((gates.get(one.iteration) ?? []).map((gate) => verdict(gate, slot(gate)))),
    lines((one.contributions ?? []).flatMap((value, place) =>
      typeof value === "number" ? [`${named(data.slots, place, "slot")} ${difference(value)}`] : [])),
    figure(measure(one.loss)),
    ...(isLoss(data) ? [] : [figure(measure(one.metric))]),
  ]);
  const heads = ["Decision", "Operation", "Changes", "Gates", "Contributions", "Loss", ...(isLoss(data) ? [] : [titled(data.about.metric)])];
  return element("div", { className: "tall" }, table(heads, rows, "Decisions"));
}

function byDecision(events) {
  const found = new Map();
  for (const one of events) found.set(one.iteration, [...(found.get(one.iteration) ?? []), one]);
  return found;
}

/** A decision in words. */
function decided(one, data) {
  const what = one.blueprint ? ` ${one.blueprint} in` : "";
  const where = typeof one.slot === "number" ? ` ${named(data.slots, one.slot, "slot")}` : "";
  return `${words(one.op)}${what}${where}`;
}

/** The figures by which a seed was kept or pruned. */
function describeDecision(change) {
  if (typeof change.contribution !== "number" || typeof change.price !== "number") return "";
  const threshold = typeof change.threshold === "number" ? `, minimum ${difference(change.threshold)}` : "";
  const loss = typeof change.loss_threshold === "number" ? `; loss ${lossGain(change)}, minimum ${percent(change.loss_threshold)}` : "";
  return `: contribution ${estimate(change.contribution, change.error)}, rent ${measure(change.price)}${threshold}${loss}`;
}

const ALLOWS = { G1: "may train", G2: "may blend", G3: "may hold", G5: "may be kept" };

function verdict(gate, slot) {
  const allowed = ALLOWS[gate.gate];
  const verdict = gate.passed ? `passed${allowed ? `, ${allowed}` : ""}` : `held back, ${words(gate.reason)}`;
  return element("span", {}, `${slot}: ${gate.gate ?? "–"} `, element("span", { className: gate.passed ? "good" : "bad" }, verdict));
}

const alarm = (text) => element("span", { className: "bad" }, text);

/** A cell of several lines. */
const lines = (parts) => element("div", { className: parts.length ? "lines" : "" }, parts.map((part) => element("div", {}, part)));
