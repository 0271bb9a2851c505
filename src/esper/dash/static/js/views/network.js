// One network: its seeds, their contributions, and the inputs and choices of the policy.

import { Chart } from "../charts.js";
import { card, element, empty } from "../dom.js";
import { episodePager } from "../episode_pager.js";
import { brief, J_MEANING, named, percent, score, words } from "../formats.js";
import { interactionsContent } from "../module_interactions.js";
import { Lanes } from "../network_lanes.js";
import { gatesTable, rollbacksTable, seedsTable } from "../network_tables.js";
import { go, here } from "../place.js";
import { lookContent } from "../policy_look.js";
import { smoothingSlider } from "../smoothing.js";
import { stageLegend } from "../stages.js";

const TYPES = ["step_taken", "episode_started", "episode_ended", "rolled_back", "policy_probed"];
const RELOAD_MS = 1000;

export async function open(context, parameters) {
  const view = new NetworkView(context);
  await view.load(parameters);
  return view;
}

class NetworkView {
  constructor(context) {
    this.context = context;
    this.reload = context.reloading(RELOAD_MS, () => this.load(here().parameters));
    this.parts = null;
  }

  async load(parameters) {
    this.environment = Number(parameters.get("environment") ?? 0);
    this.requested = parameters.get("episode");
    const data = await this.context.load("network", { environment: this.environment, episode: this.requested });
    if (!this.context.current()) return;
    this.data = data;
    this.show(parameters);
    this.showInteractions(parameters);
    if (this.following) return;
    this.following = true;
    this.context.follow(TYPES, data.cursor, {
      news: (entries) => this.take(entries),
      reload: () => {
        this.probe = null;
        this.reload();
      },
    });
  }

  take(entries) {
    const episode = this.data.episode?.number ?? 0;
    const ours = ({ payload }) =>
      payload.environment === this.environment &&
      (payload.episode === episode || (this.requested === null && payload.episode > episode));
    const probed = entries.some(({ type }) => type === "policy_probed");
    if (probed) this.probe = null;
    if (probed || entries.some(ours)) this.reload();
  }

  changed(parameters) {
    const same = Number(parameters.get("environment") ?? 0) === this.environment && parameters.get("episode") === this.requested;
    if (same) {
      this.showLook(parameters);
      this.showInteractions(parameters);
    } else this.reload();
    return true;
  }

  show(parameters) {
    const { data, context } = this;
    const { decisions, episode } = data;
    if (!episode || !(decisions.length || data.started || data.seeds.length)) {
      const sentence = episode
        ? `Nothing was recorded about network ${this.environment} in episode ${episode.number}.`
        : "No episode has started yet, or this run predates the recording of networks. This page updates by itself.";
      this.close();
      this.parts = null;
      context.root.replaceChildren(element("h1", {}, `Network ${this.environment}`), empty(sentence));
      return;
    }
    this.parts ??= this.build();
    this.showHead();
    this.showCurves();
    this.parts.seeds.replaceChildren(seedsTable(data));
    this.parts.rollbacks.replaceChildren(rollbacksTable(data));
    this.parts.gates.replaceChildren(gatesTable(data));
    this.showLook(parameters);
  }

  build() {
    const range = () => [-0.5, this.steps() - 0.5];
    const chart = (title, note) => new Chart({ title, note, unit: "step", range, height: 190 });
    const parts = {
      head: element("div"),
      lanes: new Lanes(),
      accuracy: chart("Accuracy and J", `On validation data. ${J_MEANING}`),
      loss: chart("Loss", "Cross-entropy in nats."),
      contributions: chart("Contributions", "Accuracy with each slot's seed minus accuracy without it."),
      rewards: chart("Reward by term", "Reward of each decision, and the terms it is the sum of."),
      seeds: element("div"),
      rollbacks: element("div"),
      gates: element("div"),
      look: element("div"),
      interactions: element("div"),
    };
    parts.charts = [parts.accuracy, parts.loss, parts.contributions, parts.rewards];
    this.slider = element("input", { type: "range", min: 0, "aria-label": "Step", oninput: () => this.slid() });
    this.status = element("output");
    const bar = element("div", { className: "bar" }, element("label", {}, "Step"), this.slider, this.status);
    this.bar = bar;
    this.context.root.replaceChildren(
      parts.head,
      element("div", { className: "cards wide" }, card("Stages", null, parts.lanes.node, stageLegend())),
      element("div", { className: "bar" }, smoothingSlider("network")),
      element("div", { className: "cards" }, parts.charts.map((one) => one.node)),
      element(
        "div",
        { className: "cards wide" },
        card("Seeds", null, parts.seeds),
        card("Kept modules together", "In the networks that the greedy policy grew on the probe instances.", parts.interactions),
        card("Policy: inputs and probabilities", null, bar, parts.look),
      ),
      element("div", { className: "cards" }, card("Rollbacks", null, parts.rollbacks), card("Gate results", null, parts.gates)),
    );
    return parts;
  }

  steps() {
    return Math.max(1, Number(this.data.steps) || 0, this.data.decisions.length);
  }

  showHead() {
    const { data, environment, parts } = this;
    const { started, ended, episode } = data;
    const last = data.decisions.at(-1);
    const count = Number(data.environments) || environment + 1;
    const to = (target, text, label) =>
      element("button", { type: "button", "aria-label": label, disabled: target < 0 || target >= count,
        onclick: () => go("network", { environment: target }) }, text);
    const facts = started
      ? `${words(started.family)} ${words(started.variant)}, ${started.instance}; rent ${brief(started.rent)}, learning rate ` +
        `${brief(started.learning_rate)}, ${brief(started.train_size)} examples, widths ${(started.widths ?? []).join(" ")}, ` +
        `${brief(started.host_parameters)} parameters${started.reward ? `; reward: ${words(started.reward)}` : ""}`
      : "Its task was not recorded.";
    const result = ended
      ? `Ended with J ${score(ended.objective)}, accuracy ${score(ended.accuracy)}, ${percent(ended.added)} parameters added; ` +
        `kept: ${(ended.kept ?? []).filter(Boolean).join(", ") || "nothing"}.`
      : last ? `At step ${last.step}: J ${score(last.objective)}, accuracy ${score(last.metric)}.` : "No decisions were recorded.";
    const focused = parts.head.contains(document.activeElement) ? document.activeElement.getAttribute("aria-label") : null;
    const pager = element("span", { className: "pager" }, to(environment - 1, "‹", "Previous network"),
      element("span", {}, `${environment + 1} of ${count}`), to(environment + 1, "›", "Next network"));
    parts.head.replaceChildren(
      element("h1", {}, `Network ${environment}`),
      element("p", { className: "facts" }, facts),
      element("p", { className: "facts" }, result),
      element("div", { className: "bar" }, pager, episodePager("network", episode, this.requested)),
    );
    if (focused) [...parts.head.querySelectorAll("button")].find((one) => one.getAttribute("aria-label") === focused)?.focus();
  }

  showCurves() {
    const { data, parts } = this;
    const { decisions } = data;
    const x = decisions.map((one) => one.step);
    const values = (name) => decisions.map((one) => one[name] ?? null);
    parts.lanes.update(decisions, data.slots, this.steps());
    parts.accuracy.update({ x, lines: [{ label: "accuracy", values: values("metric") }, { label: "J", values: values("objective") }] });
    parts.loss.update({
      x,
      lines: [{ label: "validation", values: values("loss") }, { label: "training", values: values("train_loss"), dashed: true }],
    });
    const lanes = decisions[0]?.stages?.length ?? 0;
    const contributions = Array.from({ length: lanes }, (_, slot) => ({
      label: named(data.slots, slot, "slot"),
      values: decisions.map((one) => one.contributions?.[slot] ?? null),
      points: true,
      broken: true, // another seed's life
    }));
    parts.contributions.update({ x, lines: contributions });
    const terms = [...new Set(decisions.flatMap((one) => Object.entries(one.terms ?? {}).filter(([, value]) => value).map(([name]) => name)))];
    const paid = terms.map((term) => ({ label: words(term), values: decisions.map((one) => one.terms?.[term] ?? 0) }));
    parts.rewards.update({ x, lines: [{ label: "reward", values: values("reward"), dashed: true }, ...paid] });
  }

  /** The step that the address names, or the newest of which something was kept. */
  lookedAt(parameters) {
    const { looks } = this.data;
    const requested = parameters.get("step");
    return requested !== null && looks.includes(Number(requested)) ? Number(requested) : looks.at(-1);
  }

  slid() {
    go("network", { step: this.data.looks[Number(this.slider.value)] }, true);
  }

  async showLook(parameters) {
    const { data, parts } = this;
    this.bar.hidden = !data.looks.length;
    if (!data.looks.length) {
      const words = "The policy's inputs are recorded for a few networks only (telemetry.watched).";
      parts.look.replaceChildren(element("p", { className: "note" }, words));
      return;
    }
    const step = this.lookedAt(parameters);
    this.slider.max = data.looks.length - 1;
    this.slider.value = data.looks.indexOf(step);
    const decision = data.decisions.find((one) => one.step === step);
    this.status.textContent = `step ${step}${decision ? `: ${describeDecision(decision, data)}` : ""}`;
    const place = { episode: data.episode.number, environment: this.environment, step };
    const key = JSON.stringify(place);
    if (key === this.looked) return;
    this.looked = key;
    try {
      const found = await this.context.load("look", place);
      if (key === this.looked) parts.look.replaceChildren(lookContent(found, decision, data.slots, data.blueprints));
    } catch (error) {
      this.looked = null;
      this.context.complain(error.message);
    }
  }

  /** The matrix of the instance that the address names; a probe is loaded once per episode, and when there is a new one. */
  async showInteractions(parameters) {
    if (!this.parts) return;
    const { episode, started } = this.data;
    if (this.probe?.episode !== episode.number) {
      const probe = { episode: episode.number };
      this.probe = probe;
      try {
        probe.found = await this.context.load("interactions", { episode: episode.number });
      } catch (error) {
        probe.trouble = error.message;
      }
      if (probe !== this.probe || !this.context.current() || !this.parts) return;
    }
    const { found, trouble, shown } = this.probe;
    if (trouble) this.parts.interactions.replaceChildren(element("p", { className: "note" }, trouble));
    // Drawn anew only where something else is to be seen: the reader may be choosing.
    const requested = parameters.get("probe");
    const key = JSON.stringify([requested, started?.family]);
    if (!found || key === shown) return;
    this.probe.shown = key;
    const choose = (place) => go("network", { probe: place }, true);
    const focused = this.parts.interactions.contains(document.activeElement);
    this.parts.interactions.replaceChildren(...[interactionsContent(found, requested, started?.family, choose)].flat());
    if (focused) this.parts.interactions.querySelector("select")?.focus();
  }

  close() {
    for (const chart of this.parts?.charts ?? []) chart.close();
    this.parts?.lanes.close();
  }
}

/** A decision in words. */
function describeDecision(decision, data) {
  const what = decision.blueprint ? ` ${decision.blueprint}` : "";
  const where = decision.slot === null || decision.slot === undefined ? "" : ` in ${named(data.slots, decision.slot, "slot")}`;
  return `${words(decision.op)}${what}${where}`;
}
