// The policy's inputs before a decision, and the probability of each choice.

import { element, figure, table } from "./dom.js";
import { brief, named, percent, words } from "./formats.js";

/** The content for one step; `decision` is what was then chosen, if that was kept. */
export function lookContent({ look, features, choices }, decision, slots, blueprints) {
  if (!look) return element("p", { className: "note" }, "The policy's inputs at this step were not recorded.");
  const heads = Object.entries(look.probabilities ?? {}).map(([head, chances]) =>
    headChances(head, chances, choices[head], decision),
  );
  return element(
    "div",
    { className: "look" },
    element("div", {}, element("h3", {}, "Probability of each choice"), heads),
    element("div", {}, element("h3", {}, "Inputs: the network"), globals(look, features)),
    element("div", {}, element("h3", {}, "Inputs: each slot"), perSlot(look, features, slots)),
    element("div", { className: "whole" }, element("h3", {}, "Inputs: each blueprint"), perBlueprint(look, features, slots, blueprints)),
  );
}

function headChances(head, chances, names, decision) {
  const taken = chosen(head, names, decision);
  const bars = (Array.isArray(chances) ? chances : []).map((chance, index) => {
    const fill = element("div", { className: "fill" });
    fill.style.width = `${Math.min(100, Math.max(0, 100 * (Number(chance) || 0)))}%`;
    const name = named(names, index, "choice");
    return element(
      "div",
      { className: name === taken ? "chance taken" : "chance" },
      element("span", {}, words(name) + (name === taken ? " ✓" : "")),
      element("div", { className: "track", "aria-hidden": "true" }, fill),
      element("output", {}, percent(chance)),
    );
  });
  return element("div", {}, element("p", { className: "note" }, words(head)), bars);
}

/** The name of what a head chose, as in the list of its choices. */
function chosen(head, names, decision) {
  if (!decision) return null;
  if (head === "op") return decision.op;
  if (head === "slot") return named(names, decision.slot, "choice");
  if (head === "blueprint") return decision.blueprint;
  const value = decision.choices?.[head];
  return value === undefined ? null : ["tempo", "alpha_speed"].includes(head) ? `${value} steps` : value;
}

function globals(look, features) {
  const rows = (look.globals ?? []).map((value, index) => [words(named(features?.globals, index, "feature")), figure(brief(value))]);
  return element("div", { className: "tall" }, table(["Feature", "Value"], rows, "Inputs: the network"));
}

function perSlot(look, features, slots) {
  const tokens = look.slots ?? [];
  const rows = (tokens[0] ?? []).map((_, index) => [
    words(named(features?.slots, index, "feature")),
    ...tokens.map((token) => figure(brief(token?.[index]))),
  ]);
  const heads = ["Feature", ...tokens.map((_, slot) => named(slots, slot, "slot"))];
  return element("div", { className: "tall" }, table(heads, rows, "Inputs: each slot"));
}

function perBlueprint(look, features, slots, blueprints) {
  const rows = (look.blueprints ?? []).flatMap((kinds, slot) =>
    (kinds ?? []).map((values, kind) => [
      named(slots, slot, "slot"),
      words(named(blueprints, kind, "blueprint")),
      ...values.map((value) => figure(brief(value))),
    ]),
  );
  const count = look.blueprints?.[0]?.[0]?.length ?? 0;
  const names = Array.from({ length: count }, (_, index) => words(named(features?.blueprints, index, "feature")));
  return element("div", { className: "tall" }, table(["Slot", "Blueprint", ...names], rows, "Inputs: each blueprint"));
}
