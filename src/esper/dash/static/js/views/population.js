// All networks of an episode at a glance.

import { choice, element, empty } from "../dom.js";
import { episodePager } from "../episode_pager.js";
import { J_MEANING, named, score, signed, words } from "../formats.js";
import { atMostEvery } from "../later.js";
import { go, here } from "../place.js";
import { Grid } from "../population_grid.js";
import { Population, objective } from "../population_model.js";
import { stageLegend } from "../stages.js";
import { onTheme } from "../theme.js";

const TYPES = ["step_taken", "episode_started", "episode_ended", "rolled_back"];
const MOST = 256; // networks on one canvas
const RELOAD_MS = 300;
const SPOKEN_MS = 1000; // no reader follows ten sentences a second

export async function open(context, parameters) {
  const view = new PopulationView(context);
  await view.load(parameters);
  return view;
}

class PopulationView {
  constructor(context) {
    this.context = context;
    this.selected = 0;
    this.grid = null;
    this.reload = context.reloading(RELOAD_MS, () => this.load(here().parameters));
    this.describeSoon = atMostEvery(SPOKEN_MS, () => this.describe());
    this.resize = new ResizeObserver(() => this.layOut());
    this.recolour = () => this.layOut(true);
    onTheme.add(this.recolour);
  }

  async load(parameters) {
    const episode = parameters.get("episode");
    const data = await this.context.load("population", { episode });
    if (!this.context.current()) return;
    this.context.unfollow();
    this.population = new Population(data);
    this.requested = episode;
    this.show(parameters);
    this.context.follow(TYPES, data.cursor, { news: (entries) => this.take(entries), reload: this.reload });
  }

  take(entries) {
    for (const entry of entries) {
      const changed = this.population.take(entry);
      if (changed === "newer") {
        if (this.requested === null) return this.reload();
      } else if (changed) {
        this.grid?.refresh(changed);
        if (changed === this.networks[this.selected]) this.describeSoon();
      }
    }
  }

  changed(parameters) {
    if (parameters.get("episode") !== this.requested) return false;
    this.show(parameters);
    return true;
  }

  show(parameters) {
    const { population, context } = this;
    this.grid?.close();
    this.resize.disconnect();
    if (!population.episode) {
      const sentence = "No episode has started yet, or this run predates the recording of networks. This page updates by itself.";
      context.root.replaceChildren(element("h1", {}, "Population"), empty(sentence));
      return;
    }
    const all = population.chosen(parameters.get("family"), parameters.get("sort"));
    this.networks = all.slice(0, MOST);
    const chosen = this.networks.findIndex((one) => String(one.environment) === parameters.get("environment"));
    this.selected = Math.max(0, chosen);
    const focused = context.root.contains(document.activeElement) && document.activeElement.dataset?.keep;
    context.root.replaceChildren(
      element("h1", {}, "Population"),
      this.toolbar(parameters),
      stageLegend(),
      element("p", { className: "note", id: "how" }, this.explained(all.length)),
      this.canvasBox(),
      this.words,
    );
    if (focused) context.root.querySelector(`[data-keep="${focused}"]`)?.focus();
    if (!population.networks.size) this.words.textContent = "This episode has no networks.";
    else if (![...population.networks.values()].some((one) => one.steps.length)) {
      this.words.textContent = "The decisions of this episode were not recorded (telemetry.steps_every), so only names are shown.";
    }
    this.resize.observe(this.box);
  }

  toolbar(parameters) {
    const { population } = this;
    const kept = (label, name) => {
      label.querySelector("select").dataset.keep = name;
      return label;
    };
    const orders = [["", "number"], ["score", "J"], ["accuracy", "accuracy"]];
    const families = [["", "all"], ...population.families().map((family) => [family, family])];
    const put = (name) => (value) => go("population", { [name]: value }, true);
    return element(
      "div",
      { className: "bar" },
      episodePager("population", population.episode, parameters.get("episode")),
      kept(choice("Sort by", orders, parameters.get("sort") ?? "", put("sort")), "sort"),
      families.length > 2 ? kept(choice("Family", families, parameters.get("family") ?? "", put("family")), "family") : null,
    );
  }

  explained(count) {
    const { slots, lanes } = this.population;
    const names = Array.isArray(slots) && slots.length ? slots.join(", ") : `${lanes} slots`;
    const shown = count > this.networks.length ? ` The first ${this.networks.length} of ${count} networks are shown.` : "";
    return (
      `Each card is a network: its number, family and J; its accuracy from 0 to 1; and the stages of each slot ` +
      `(${names}) by step, with a height of alpha. Bars on the right are contributions: the accuracy lost without the seed. ` +
      `${J_MEANING} Click a network to open it, or use the arrow keys and Enter.${shown}`
    );
  }

  canvasBox() {
    this.canvas = element("canvas", {
      tabIndex: 0,
      role: "application",
      "aria-label": "Networks. Arrow keys choose one, Enter opens it.",
      "aria-describedby": "chosen",
      onkeydown: (event) => this.press(event),
      onclick: (event) => this.point(event, true),
      onmousemove: (event) => this.point(event, false),
    });
    this.canvas.dataset.keep = "canvas";
    this.ring = element("div", { className: "ring", hidden: true });
    this.box = element("div", { className: "grid-box" }, this.canvas, this.ring);
    this.words = element("p", { className: "detail", id: "chosen", "aria-live": "polite" });
    this.laidOut = 0;
    return this.box;
  }

  layOut(again = false) {
    const width = Math.floor(this.box?.clientWidth ?? 0);
    if (!width || (width === this.laidOut && !again)) return;
    this.laidOut = width;
    this.grid = new Grid(this.canvas, this.population, this.networks);
    this.grid.layOut(width);
    if (this.networks.length) this.choose(this.selected);
  }

  choose(index) {
    this.selected = index;
    const { x, y } = this.grid.corner(this.networks[index]);
    this.ring.hidden = false;
    this.ring.style.width = `${this.grid.width}px`;
    this.ring.style.height = `${this.grid.height}px`;
    this.ring.style.transform = `translate(${x}px, ${y}px)`;
    this.describe();
  }

  describe() {
    const network = this.networks[this.selected];
    if (!network) return;
    const step = network.steps.at(-1);
    const slots = (step?.stages ?? []).map((stage, slot) => {
      const seed = step.blueprints?.[slot] ? ` ${step.blueprints[slot]}` : "";
      const adds = typeof step.contributions?.[slot] === "number" ? ` (${signed(step.contributions[slot])})` : "";
      return `${named(this.population.slots, slot, "slot")} ${words(stage)}${seed}${adds}`;
    });
    const kind = [network.family, network.variant].filter(Boolean).join(" ");
    this.words.replaceChildren(
      element("b", {}, `Network ${network.environment}`),
      ` ${kind}: J ${score(objective(network))}, accuracy ${score(step?.metric)}` +
        (step ? `, step ${step.step}. ${slots.join(", ")}.` : "."),
    );
  }

  press(event) {
    const moves = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.grid.columns, ArrowDown: this.grid.columns };
    if (event.key === "Enter") return this.enter();
    const ends = { Home: 0, End: this.networks.length - 1 };
    const target = event.key in ends ? ends[event.key] : this.selected + moves[event.key];
    if (!(target >= 0 && target < this.networks.length)) return;
    event.preventDefault();
    this.choose(target);
    this.ring.scrollIntoView({ block: "nearest" });
  }

  point(event, opening) {
    const box = this.canvas.getBoundingClientRect();
    const index = this.grid.at(event.clientX - box.left, event.clientY - box.top);
    if (index < 0) return;
    if (index !== this.selected) this.choose(index);
    if (opening) this.enter();
  }

  enter() {
    const network = this.networks[this.selected];
    if (network) go("network", { environment: network.environment, episode: this.requested });
  }

  close() {
    this.grid?.close();
    this.resize.disconnect();
    onTheme.delete(this.recolour);
  }
}
