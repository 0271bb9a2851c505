// Whether a controller learns, and whether it does so soundly.

import { Chart } from "../charts.js";
import { card, element, empty, figure, table } from "../dom.js";
import { brief, J_MEANING, whole, words } from "../formats.js";
import { smoothingSlider } from "../smoothing.js";

const TYPES = ["ppo_updated", "policy_probed", "anomaly_raised"];
const RELOAD_MS = 2000;
const GRADIENTS = "ppo/module_gradient_norm/";
const ENTROPIES = "ppo/head_entropy/";
const FAMILIES = "objective/";
const ANOMALY_COLUMNS = ["Iteration", "Anomaly", "Head", "Quantity", "Value", "Bound", "Meaning", "Response"];
const FOLLOWED = { record: "recorded", skip: "update undone, learning rate halved", stop: "training stopped" };

const named = (...pairs) => pairs.map(([name, label]) => ({ name, label }));

/** Charts of fixed figures; those of an update without a note have the meaning of their figure. */
const CHARTS = [
  ["Score", `${J_MEANING} Greedy policy: on fixed training problems, where the dashed lines are the baselines and the policy before training. Exploring: the mean over an iteration's networks, on other problems.`,
    named(["probe_score", "greedy policy"], ["objective", "J, exploring"]), { levels: true, height: 290 }],
  ["Approximate KL divergence", null, named(["ppo/kl", "KL"])],
  ["Clip fraction", null, named(["ppo/clip_fraction", "clipped"])],
  ["Explained variance", null, named(["ppo/explained_variance", "explained variance"])],
  ["Gradient norm", null, named(["ppo/gradient_norm", "gradient norm"])],
  ["Losses", "Of the policy and of the value head.", named(["ppo/policy_loss", "policy"], ["ppo/value_loss", "value"])],
  ["Entropy", null, named(["ppo/entropy", "entropy"])],
];

/** Charts of figures that have a common beginning. */
const GROUPS = [
  ["Entropy per head", null, ENTROPIES],
  ["Gradient norm per part of the policy", null, GRADIENTS],
  ["J by family of problems", "Mean over an iteration's networks.", FAMILIES],
  ["Operations", "Share of all decisions.", "operations/"],
];

export async function open(context) {
  const view = new LearningView(context);
  await view.load();
  return view;
}

class LearningView {
  constructor(context) {
    this.context = context;
    this.charts = new Map();
    this.reload = context.reloading(RELOAD_MS, () => this.load());
  }

  async load() {
    const data = await this.context.load("learning");
    if (!this.context.current()) return;
    this.show(data);
    if (this.following) return;
    this.following = true;
    this.context.follow(TYPES, data.cursor, { news: this.reload, reload: this.reload });
  }

  show(data) {
    const { root } = this.context;
    if (!data.iterations.length) {
      root.replaceChildren(element("h1", {}, "Learning"), empty("No iteration has finished yet. This page updates by itself."));
      this.main = null;
      return;
    }
    if (!this.main) this.build();
    const marks = data.anomalies.map((one) => ({ x: one.iteration, label: one.head ? `${one.anomaly} of ${one.head}` : one.anomaly }));
    const wanted = [...CHARTS, ...this.groups(data)];
    for (const [title, note, figures, options = {}] of wanted) {
      const lines = figures
        .filter(({ name }) => data.series[name])
        .map(({ name, label }) => ({ label, values: data.series[name], points: name === "probe_score" }));
      const levels = options.levels ? levelsOf(data.baselines) : [];
      this.chart(title, note ?? meaning(data, figures[0].name), { height: options.height, wide: Boolean(options.height) })
        .update({ x: data.iterations, lines, levels, marks });
    }
    this.showAnomalies(data);
  }

  changed() {
    return true; // charts follow the smoothing themselves
  }

  groups(data) {
    return GROUPS.map(([title, note, start]) => {
      const names = Object.keys(data.series).filter((name) => name.startsWith(start));
      const living = names.filter((name) => data.series[name].some((value) => value));
      return [title, note, living.map((name) => ({ name, label: words(name.slice(start.length)) }))];
    }).filter(([, , figures]) => figures.length);
  }

  build() {
    this.close();
    this.charts.clear();
    this.main = element("div", { className: "cards wide" });
    this.cards = element("div", { className: "cards" });
    this.anomalies = element("div");
    const bar = element("div", { className: "bar" }, smoothingSlider("learning"));
    this.context.root.replaceChildren(element("h1", {}, "Learning"), bar, this.main, this.anomalies, this.cards);
  }

  chart(title, note, { height, wide }) {
    if (!this.charts.has(title)) {
      const chart = new Chart({ title, note, height });
      this.charts.set(title, chart);
      (wide ? this.main : this.cards).append(chart.node);
    }
    return this.charts.get(title);
  }

  showAnomalies(data) {
    const rows = data.anomalies.toReversed().map((one) => [
      figure(whole(one.iteration)), words(one.anomaly), words(one.head), words(one.figure), figure(brief(one.value)),
      figure(brief(one.bound)), one.meaning ?? "", FOLLOWED[one.response ?? "record"],
    ]);
    const note = rows.length ? "Red flags in the charts mark these iterations." : "No anomalies.";
    const list = rows.length ? table(ANOMALY_COLUMNS, rows, "Anomalies") : null;
    const tall = list && element("div", { className: "tall" }, list);
    this.anomalies.replaceChildren(card("Anomalies", note, tall ?? ""));
  }

  close() {
    for (const chart of this.charts.values()) chart.close();
  }
}

function meaning(data, name) {
  const text = data.meanings[name.split("/", 2).join("/")];
  return `${text[0].toUpperCase()}${text.slice(1)}.`;
}

function levelsOf(baselines) {
  return Object.entries(baselines ?? {})
    .filter(([, value]) => typeof value === "number")
    .map(([name, value]) => ({ label: words(name), value }));
}
