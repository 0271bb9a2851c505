// One model: its seeds, their contributions, and every decision with its reasons.

import { Chart } from "../charts.js";
import { card, element, empty } from "../dom.js";
import { measure, named, percent, score, words } from "../formats.js";
import { decisionsTable, isLoss, titled } from "../model_tables.js";
import { Lanes } from "../network_lanes.js";
import { rollbacksTable, seedsTable } from "../network_tables.js";
import { smoothingSlider } from "../smoothing.js";
import { stageLegend } from "../stages.js";

const TYPES = ["run_started", "run_ended", "step_taken", "lifecycle_transition", "rolled_back"];
const RELOAD_MS = 1000;
const UNIT = "decision";
const LEAST_CONTRIBUTION = 0.05; // contributions are shares: what an axis reaches beyond those that never change

export async function open(context) {
  const view = new ModelView(context);
  await view.load();
  return view;
}

class ModelView {
  constructor(context) {
    this.context = context;
    this.reload = context.reloading(RELOAD_MS, () => this.load());
    this.parts = null;
  }

  async load() {
    const data = await this.context.load("model");
    if (!this.context.current()) return;
    this.data = data;
    this.show();
    if (this.following) return;
    this.following = true;
    this.context.follow(TYPES, data.cursor, { news: this.reload, reload: this.reload });
  }

  show() {
    const { data, context } = this;
    if (!data.decisions.length) {
      this.close();
      this.parts = null;
      const sentence = "No decisions yet: the first is made by the first `Grower.step`. This page updates by itself.";
      context.root.replaceChildren(...this.head(), empty(sentence));
      return;
    }
    if (this.parts?.about !== data.about.metric) {
      this.close(); // what growth is about is known once it is measured
      this.parts = this.build();
    }
    this.parts.head.replaceChildren(...this.head());
    this.showCurves();
    this.parts.seeds.replaceChildren(seedsTable(data, UNIT, data.decisions.at(-1) ?? {}));
    this.parts.rollbacks.replaceChildren(rollbacksTable(data, UNIT));
    this.parts.decisions.replaceChildren(decisionsTable(data));
  }

  build() {
    const range = () => [0.5, this.planned() + 0.5];
    const chart = (title, note, constant) => new Chart({ title, note, unit: UNIT, range, height: 200, constant });
    const { about } = this.data;
    const which = about.direction ? `${about.direction[0].toUpperCase()}${about.direction.slice(1)}. ` : "";
    const parts = {
      about: about.metric,
      head: element("div"),
      lanes: new Lanes(),
      metric: isLoss(this.data) ? null : chart(titled(about.metric), `${which}On validation data, and during training if recorded. Red flags: rollbacks.`),
      loss: chart("Loss", `${isLoss(this.data) ? "The metric of this run. " : ""}On validation data and during training. Red flags: rollbacks.`),
      contributions: chart("Contributions", about.contribution, LEAST_CONTRIBUTION),
      parameters: chart("Parameters", "Of the whole model, including unfinished seeds, and of the host alone."),
      seeds: element("div"),
      rollbacks: element("div"),
      decisions: element("div"),
    };
    parts.charts = [...(parts.metric ? [parts.metric] : []), parts.loss, parts.contributions, parts.parameters];
    const wide = (...content) => element("div", { className: "cards wide" }, content);
    this.context.root.replaceChildren(
      parts.head,
      wide(card("Stages of each slot", "If seeds were kept or pruned when growth ended, the outcome follows the last decision.", parts.lanes.node, stageLegend())),
      element("div", { className: "bar" }, smoothingSlider("model")),
      element("div", { className: "cards pairs" }, parts.charts.map((one) => one.node)),
      wide(
        card("Seeds", "When each seed entered its stages (by decision); its contribution when it was kept or pruned, its rent, the minimum contribution for keeping it (rent included), and what it contributes now.", parts.seeds),
        card("Decisions", "Newest first, with changes of stage, new gate results, and the measurements at that time. A gate states what is allowed; a seed that passes its gate is still pruned if its contribution or its effect on the loss is below the minimum.", parts.decisions),
        card("Rollbacks", null, parts.rollbacks),
      ),
    );
    return parts;
  }

  /** Decisions that are planned, or were made beyond that. */
  planned() {
    return Math.max(1, Number(this.data.iterations) || 0, this.data.decisions.at(-1)?.iteration ?? 0);
  }

  head() {
    const { data } = this;
    const title = String(data.host ?? "A model");
    const planned = data.iterations ? `, ${data.iterations} decisions planned` : "";
    const facts = `Controller ${data.controller ?? "–"}, seed ${data.seed ?? "–"}${planned}.`;
    return [element("h1", {}, title), ...[facts, ...this.standing()].map((text) => element("p", { className: "facts" }, text))];
  }

  /** How the model stands after the newest decision. */
  standing() {
    const { data } = this;
    const last = data.decisions.at(-1);
    if (!last) return [];
    const host = data.host_parameters;
    const added = data.figures.added_parameters[last.iteration];
    const size = host ? `${host} parameters in the host and ${added ?? "–"} in seeds (+${percent(added / host)})` : `${added ?? "–"} parameters in seeds`;
    const now = data.ending ?? last;
    const residents = (now.blueprints ?? []).flatMap((blueprint, slot) =>
      blueprint ? [`${blueprint} in ${named(data.slots, slot, "slot")} (${words(now.stages?.[slot])})`] : []);
    const rises = data.about.higher_is_better;
    const worth = rises ? last.metric : data.figures.score[last.iteration];
    const net = last.objective === worth ? [] : [`${score(last.objective)} after rent`];
    const notes = rises ? net : [`score ${score(worth)}`, ...net];
    const measured = `${data.about.metric} ${measure(last.metric)}${notes.length ? ` (${notes.join(", ")})` : ""}`;
    return [
      `After decision ${last.iteration}: ${measured}${isLoss(data) ? "" : `, loss ${measure(last.loss)}`}; ` +
        `${size}; ${residents.join(", ") || "no seeds"}.`,
    ];
  }

  changed() {
    return true; // charts follow the smoothing themselves
  }

  showCurves() {
    const { data, parts } = this;
    const { decisions, figures } = data;
    const x = decisions.map((one) => one.iteration);
    const marks = data.rollbacks.map((one) => ({ x: one.iteration, label: words(one.trouble) }));
    const values = (name) => x.map((number) => figures[name][number] ?? null);
    const both = (validation, name) => [
      { label: "validation", values: validation },
      { label: "training", values: values(name), dashed: true },
    ];
    const { ending } = data; // of growth: one step after the last decision
    if (ending) parts.lanes.update([...decisions, ending], data.slots, Math.max(this.planned(), ending.step + 1));
    else parts.lanes.update(decisions, data.slots, this.planned());
    parts.metric?.update({ x, lines: both(values("metric"), "train_metric"), marks });
    parts.loss.update({ x, lines: both(values("validation_loss"), "train_loss"), marks });
    const slots = decisions[0].stages?.length ?? 0;
    const contributions = Array.from({ length: slots }, (_, slot) => ({
      label: named(data.slots, slot, "slot"),
      values: decisions.map((one) => (typeof one.contributions?.[slot] === "number" ? one.contributions[slot] : null)),
      points: true,
      broken: true, // another seed's life
    }));
    parts.contributions.update({ x, lines: contributions, marks });
    const host = Number(data.host_parameters) || 0;
    const whole = values("added_parameters").map((added) => (added === null ? null : host + added));
    const alone = { label: "host alone", values: x.map(() => host || null), dashed: true };
    parts.parameters.update({ x, lines: [{ label: "host and seeds", values: whole }, alone] });
  }

  close() {
    for (const chart of this.parts?.charts ?? []) chart.close();
    this.parts?.lanes.close();
  }
}
