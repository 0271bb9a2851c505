// What the modules that the greedy policy kept are worth, alone and in pairs, in the networks of the probe instances.

import { choice, element } from "./dom.js";
import { named, signed, words } from "./formats.js";

const MOST_COLOUR = 45; // percent: text stays readable on it

/** The panel for one probe; `requested` is the place of an instance in it, or null, and `family` that of the network. */
export function interactionsContent(probe, requested, family, choose) {
  const { iteration, networks, slots } = probe;
  if (!networks.length) return element("p", { className: "note" }, whyNothing(iteration));
  const place = requested !== null && networks[Number(requested)] ? Number(requested) : mostTelling(networks, family);
  const network = networks[place];
  const options = networks.map((one, index) => [String(index), `${index + 1}: ${words(one.family)}, ${one.modules.length} kept`]);
  return [
    element(
      "div",
      { className: "bar" },
      choice("Probe instance", options, String(place), choose),
      element("span", { className: "facts" }, `${network.instance}, greedy policy after iteration ${iteration}`),
    ),
    network.modules.length ? matrix(network, slots) : element("p", { className: "note" }, "The policy kept no modules in this network."),
    network.modules.length ? element("p", { className: "note" }, reading(network)) : null,
  ].filter(Boolean);
}

function whyNothing(iteration) {
  return iteration === null
    ? "Not measured yet: there was no probe of the greedy policy up to this episode (probe_every)."
    : "Not measured: this run predates the recording of interactions.";
}

/** The first network with the most modules, of the same family if one of these kept two. */
function mostTelling(networks, family) {
  const count = (one) => one.modules.length;
  const first = (some) => networks.indexOf(some.reduce((best, one) => (count(one) > count(best) ? one : best)));
  const related = networks.filter((one) => one.family === family && count(one) > 1);
  return first(related.length ? related : networks);
}

function matrix({ modules, pairs }, slots) {
  const interactions = new Map(pairs.flatMap((one) => [[`${one.first} ${one.second}`, one.interaction], [`${one.second} ${one.first}`, one.interaction]]));
  const largest = Math.max(...pairs.map((one) => Math.abs(one.interaction) || 0), ...modules.map((one) => Math.abs(one.value) || 0));
  const cell = (value, className) => {
    const made = element("td", { className: `number ${className}` }, signed(value));
    const share = largest ? Math.round((MOST_COLOUR * Math.abs(value || 0)) / largest) : 0;
    if (share) made.style.background = `color-mix(in srgb, var(--${value > 0 ? "good" : "bad"}) ${share}%, transparent)`;
    return made;
  };
  const slotName = ({ slot }) => named(slots, slot, "slot");
  const rows = modules.map((row) =>
    element(
      "tr",
      {},
      element("th", { scope: "row" }, slotName(row), element("span", { className: "kind" }, words(row.blueprint))),
      modules.map((column) => (row === column ? element("td", { className: "number" }, "·") : cell(interactions.get(`${row.slot} ${column.slot}`), "pair"))),
      cell(row.value, "alone"),
    ),
  );
  const heads = [...modules.map((one) => element("th", { scope: "col", className: "number" }, slotName(one))),
    element("th", { scope: "col", className: "number alone" }, "Shapley value")];
  const label = "Interactions of kept modules, and their Shapley values";
  return element(
    "div",
    { className: "scroll", tabIndex: 0, role: "region", "aria-label": label },
    element("table", { className: "matrix" }, element("thead", {}, element("tr", {}, element("td"), heads)), element("tbody", {}, rows)),
  );
}

function reading({ metric, modules, exact }) {
  const unit = metric === "accuracy" ? "accuracy" : "relative reduction of the loss below that of guessing";
  const pairs = modules.length > 1
    ? "Cells are interactions of two modules: above 0 they help each other; below 0 one makes the other redundant. "
    : "A single module has no interactions. ";
  const estimate = exact ? "" : " Estimated from pairs, because there are too many modules to switch off in all combinations.";
  return `${pairs}The Shapley value is a module's fair share of what all of them add to the host. Both are in ${unit}, on validation data.${estimate}`;
}
