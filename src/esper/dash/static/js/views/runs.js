// All runs in a table that sorts and filters.

import { element, empty } from "../dom.js";
import { J_MEANING, measure, words } from "../formats.js";
import { address, go, here, viewsOf } from "../place.js";

const TYPING_MS = 200;
const DESCENDING = "-";
const NEWEST_FIRST = "-started";

const when = (seconds) => (typeof seconds === "number" ? new Date(seconds * 1000).toLocaleString([], { dateStyle: "medium", timeStyle: "short" }) : "–");

/** Columns: their value, by which they sort, and its text. */
const COLUMNS = [
  { name: "name", title: "Run", value: (run) => run.name },
  { name: "state", title: "State", value: (run) => run.error ?? words(run.state) },
  { name: "done", title: "Progress", number: true, value: (run) => run.done,
    text: (run) => (run.error ? "" : `${run.done}${run.total ? ` of ${run.total}` : ""}`) },
  { name: "probe", title: "Greedy policy", number: true, value: (run) => run.probe, text: (run) => measure(run.probe) },
  { name: "metric", title: "Metric", value: (run) => run.metric },
  { name: "value", title: "Newest", number: true, value: (run) => run.value, text: (run) => measure(run.value) },
  { name: "trained", title: "Suite or model", value: (run) => run.suite ?? run.host },
  { name: "controller", title: "Controller", value: (run) => run.controller ?? (run.command === "train" ? "policy" : null) },
  { name: "seed", title: "Seed", number: true, value: (run) => run.seed },
  { name: "started", title: "Started", value: (run) => run.started, text: (run) => when(run.started) },
];

const textOf = (column, run) => (column.text ? column.text(run) : String(column.value(run) ?? ""));

export async function open(context) {
  const view = new RunsView(context);
  view.build();
  return view;
}

class RunsView {
  constructor(context) {
    this.context = context;
  }

  build() {
    const { parameters } = here();
    this.filter = element("input", { type: "search", value: parameters.get("filter") ?? "", oninput: () => this.typed() });
    this.count = element("output", { className: "facts" });
    this.heads = new Map(COLUMNS.map((column) => {
      const button = element("button", { type: "button", onclick: () => this.sort(column) }, column.title);
      return [column.name, element("th", { scope: "col", className: column.number ? "number" : "" }, button)];
    }));
    this.rows = element("tbody");
    this.table = element(
      "div",
      { className: "scroll", tabIndex: 0, role: "region", "aria-label": "Runs" },
      element("table", { className: "runs" }, element("thead", {}, element("tr", {}, [...this.heads.values()])), this.rows),
    );
    this.none = empty("No run matches the filter.");
    this.context.root.replaceChildren(
      element("h1", {}, "Runs"),
      element("div", { className: "bar" }, element("label", {}, "Filter", this.filter), this.count),
      element("section", { className: "card" }, this.table, this.none),
      element("p", { className: "note" }, `Greedy policy: its latest score on fixed training problems. Newest: the latest value on validation data. ${J_MEANING} In a training it is measured while the policy explores.`),
    );
    this.show();
  }

  typed() {
    clearTimeout(this.typing);
    this.typing = setTimeout(() => go("runs", { filter: this.filter.value }, true), TYPING_MS);
  }

  sort(column) {
    const now = here().parameters.get("sort") ?? NEWEST_FIRST;
    go("runs", { sort: now === column.name ? `${DESCENDING}${column.name}` : column.name }, true);
  }

  changed() {
    this.show();
    return true;
  }

  show() {
    const { parameters } = here();
    const sort = parameters.get("sort") ?? NEWEST_FIRST;
    const descends = sort.startsWith(DESCENDING);
    const by = COLUMNS.find((column) => column.name === (descends ? sort.slice(1) : sort)) ?? COLUMNS[0];
    const sought = (parameters.get("filter") ?? "").toLowerCase().split(/\s+/).filter(Boolean);
    const all = this.context.runs();
    const matches = all.filter((run) => {
      const text = COLUMNS.map((column) => textOf(column, run)).join(" ").toLowerCase();
      return sought.every((word) => text.includes(word));
    });
    matches.sort((one, other) => compared(by.value(one), by.value(other), descends) || compared(one.name, other.name));
    for (const [name, head] of this.heads) {
      if (name === by.name) head.setAttribute("aria-sort", descends ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
    }
    this.count.textContent = matches.length === all.length ? `${all.length} runs` : `${matches.length} of ${all.length} runs`;
    this.table.hidden = !matches.length;
    this.none.hidden = matches.length > 0;
    // A row that is focused stays so when the list is drawn anew.
    const focused = this.rows.contains(document.activeElement) ? document.activeElement.textContent : null;
    this.rows.replaceChildren(...matches.map((run) => this.row(run)));
    if (focused !== null) [...this.rows.querySelectorAll("a")].find((link) => link.textContent === focused)?.focus();
  }

  row(run) {
    const cells = COLUMNS.map((column) => {
      const text = textOf(column, run);
      const content = column.name === "name" ? element("a", { href: address(viewsOf(run)[0], { run: run.name }) }, text) : text;
      return element("td", { className: `${column.number ? "number" : ""}${column.name === "state" && run.error ? " bad" : ""}` }, content);
    });
    return element("tr", {}, cells);
  }

  close() {
    clearTimeout(this.typing);
  }
}

/** Order of two values; missing ones come last in either direction. */
function compared(one, other, descends = false) {
  const missing = (value) => value === null || value === undefined;
  if (missing(one) || missing(other)) return missing(one) - missing(other);
  const order = typeof one === "number" && typeof other === "number" ? one - other : String(one).localeCompare(String(other), undefined, { numeric: true });
  return descends ? -order : order;
}
