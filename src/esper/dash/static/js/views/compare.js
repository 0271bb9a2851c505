// Several runs side by side.

import { Chart } from "../charts.js";
import { card, element, empty, figure, table } from "../dom.js";
import { J_MEANING, measure, pValue, score, signed, whole, words } from "../formats.js";
import { titled } from "../model_tables.js";
import { go, here } from "../place.js";
import { ask } from "../server.js";
import { smoothingSlider } from "../smoothing.js";
import { colour, onTheme } from "../theme.js";

const RELOAD_MS = 4000;
const FIRST = 4; // runs that are compared until the reader chooses
const COLOURS = 12;

export async function open(context, parameters) {
  const view = new CompareView(context);
  await view.load(parameters);
  return view;
}

class CompareView {
  constructor(context) {
    this.context = context;
    this.reload = context.reloading(RELOAD_MS, () => this.load(here().parameters));
    this.timer = setInterval(this.reload, RELOAD_MS);
    this.recolour = () => this.data && this.show();
    onTheme.add(this.recolour);
  }

  async load(parameters) {
    const names = this.context.runs().map((run) => run.name);
    const others = names.filter((name) => name !== this.context.run);
    const requested = parameters.getAll("with");
    this.names = requested.length ? requested.filter((name) => name !== "none") : [this.context.run, ...others].slice(0, FIRST);
    const data = this.names.length ? await ask("compare", { run: this.names }) : { runs: [] };
    if (!this.context.current()) return;
    const text = JSON.stringify([names, data]);
    if (text === this.shown) return;
    this.shown = text;
    this.all = names;
    this.data = data;
    this.show();
  }

  changed(parameters) {
    this.load(parameters).catch((error) => this.context.complain(error.message));
    return true;
  }

  show() {
    const { root } = this.context;
    const { runs } = this.data;
    if (!this.body) {
      this.choices = element("div");
      this.body = element("div");
      const bar = element("div", { className: "bar" }, smoothingSlider("compare"));
      root.replaceChildren(element("h1", {}, "Compare"), this.choices, bar, this.body);
    }
    this.showChoices();
    this.closeCharts();
    const sound = runs.filter((run) => !run.error && run.values.length);
    const missing = runs.filter((run) => !sound.includes(run));
    const notes = missing.map((run) =>
      element("p", { className: "note" }, `${run.name}: ${run.error ?? "no iteration has finished yet"}`),
    );
    for (const run of sound.filter((run) => run.evaluation_note)) {
      notes.push(element("p", { className: "note" }, `${run.name}: ${run.evaluation_note}`));
    }
    if (!sound.length) {
      this.body.replaceChildren(empty(runs.length ? "None of these runs has results yet." : "Choose runs to compare."), ...notes);
      return;
    }
    const groups = Object.values(Object.groupBy(sound, (run) => JSON.stringify([run.metric, run.direction, run.alone])));
    const charts = groups.map((runs) => this.curves(runs));
    const cards = groups.flatMap((runs, place) => [charts[place].node, this.levels(runs)]);
    this.body.replaceChildren(...notes, element("div", { className: "cards wide" }, ...cards, ...this.verdicts(sound)));
    groups.forEach((runs, place) => this.draw(charts[place], runs));
    this.charts = charts;
  }

  /** A chart of runs with the same metric. */
  curves([{ metric, direction, alone }]) {
    const which = direction ? ` ${direction[0].toUpperCase()}${direction.slice(1)}.` : "";
    const note = alone ? `On validation data, by decision.${which}` : `${J_MEANING} Mean over the networks of each iteration.`;
    return new Chart({ title: titled(metric), note, unit: alone ? "decision" : "iteration", height: 300 });
  }

  draw(chart, runs) {
    const x = [...new Set(runs.flatMap((run) => run.iterations))].sort((one, other) => one - other);
    const lines = runs.map((run) => {
      const values = new Map(run.iterations.map((iteration, index) => [iteration, run.values[index]]));
      return { label: run.name, values: x.map((iteration) => values.get(iteration) ?? null), colour: this.colourOf(run) };
    });
    chart.update({ x, lines });
  }

  showChoices() {
    const boxes = this.all.map((name) => {
      const toggle = () => {
        const kept = this.names.includes(name) ? this.names.filter((one) => one !== name) : [...this.names, name];
        go("compare", { with: kept.length ? kept : ["none"] }, true);
      };
      const box = element("input", { type: "checkbox", checked: this.names.includes(name), onchange: toggle });
      box.dataset.name = name;
      return element("label", {}, box, name);
    });
    const focused = this.choices.contains(document.activeElement) ? document.activeElement.dataset.name : null;
    this.choices.replaceChildren(element("fieldset", { className: "choices" }, element("legend", {}, "Runs"), boxes));
    [...this.choices.querySelectorAll("input")].find((box) => box.dataset.name === focused)?.focus();
  }

  colourOf(run) {
    return `c${(this.names.indexOf(run.name) % COLOURS) + 1}`;
  }

  levels(runs) {
    const [{ metric, alone }] = runs;
    const bounds = runs.flatMap(({ late }) => [late.low, late.high]);
    const [low, high] = [Math.min(...bounds), Math.max(...bounds)];
    const rows = runs.map((run) => {
      const { late, probe } = run;
      const best = Object.entries(run.baselines ?? {}).filter(([other, level]) => other !== "untrained" && typeof level === "number");
      const [name, level] = best.sort((one, other) => other[1] - one[1])[0] ?? [null, null];
      return [
        run.name,
        ...(alone ? [] : this.probed(run, probe, name, level)),
        figure(measure(late.mean)),
        `${measure(late.low)} to ${measure(late.high)}`,
        this.bar(run, low, high),
        figure(whole(late.count)),
      ];
    });
    const counted = alone ? "Decisions" : "Iterations";
    const probed = alone ? [] : ["Greedy policy", "Untrained", "Best baseline"];
    const heads = ["Run", ...probed, alone ? "Mean" : `${metric}, exploring`, "Lowest to highest", "", counted];
    const note =
      `${alone ? "" : "Greedy policy: at its last measurement, on fixed training problems that baselines played too. "}Mean and range over the last third of each run's ${counted.toLowerCase()}. This does not show which run is better: ` +
      (alone ? "another random seed may reverse the order." : "another random seed may reverse the order, and probe instances differ between seeds. Use `esper compare` for that.");
    return card(`Final level of ${metric}`, note, table(heads, rows, `Final level of ${metric} in each run`));
  }

  probed(run, probe, name, level) {
    return [
      probe ? `${score(probe.score)} at iteration ${probe.iteration}` : "none",
      score(run.baselines?.untrained),
      name === null ? "none" : `${words(name)} ${score(level)}`,
    ];
  }

  /** The verdicts of `esper evaluate` on each run that it has played. */
  verdicts(runs) {
    return runs.flatMap((run) =>
      Object.values(run.evaluation).map((found) => {
        const rows = found.standings.map((one) => [
          one.name,
          figure(score(one.score)),
          one.difference === null ? "" : figure(signed(one.difference)),
          one.difference_interval ? `${signed(one.difference_interval[0])} to ${signed(one.difference_interval[1])}` : "",
          one.p === null ? "" : figure(pValue(one.p)),
          one.verdict ?? "",
        ]);
        const heads = ["", "Score", `${found.reference} minus it`, "95% interval", "p", "Verdict"];
        const title = `${run.name}: ${found.reference} on ${found.instances} ${found.place} instances`;
        return card(title, `${found.answer}. ${found.basis}`, table(heads, rows, title));
      }),
    );
  }

  bar(run, low, high) {
    const place = (value) => `${high > low ? (100 * (value - low)) / (high - low) : 50}%`;
    const span = element("div", { className: "span" });
    const dot = element("div", { className: "dot" });
    const { late } = run;
    span.style.left = place(late.low);
    span.style.width = `calc(${place(late.high)} - ${place(late.low)})`;
    dot.style.left = place(late.mean);
    span.style.background = dot.style.background = colour(this.colourOf(run));
    return element("div", { className: "interval", "aria-hidden": "true" }, element("div", { className: "track" }), span, dot);
  }

  closeCharts() {
    for (const chart of this.charts ?? []) chart.close();
    this.charts = [];
  }

  close() {
    clearInterval(this.timer);
    this.closeCharts();
    onTheme.delete(this.recolour);
  }
}
