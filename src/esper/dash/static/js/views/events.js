// The log of a run, newest first: at first what matters, everything on request.

import { choice, element, empty } from "../dom.js";
import { brief, clock, difference, measure, named, words } from "../formats.js";
import { go, here } from "../place.js";

const RELOAD_MS = 1000;
const TYPING_MS = 350;
const ALARMS = new Set(["run_failed", "rolled_back", "anomaly_raised", "run_interrupted"]);
const IMPORTANT = ["lifecycle_transition", ...ALARMS];
const KINDS = { germinated: "germinated", fossilized: "kept", pruned: "pruned" };
const QUIET = ["iteration", "episode", "environment", "step"];

export async function open(context, parameters) {
  const view = new EventsView(context);
  await view.load(parameters);
  return view;
}

class EventsView {
  constructor(context) {
    this.context = context;
    this.opened = new Set();
    this.reload = context.reloading(RELOAD_MS, () => this.load(here().parameters));
  }

  async load(parameters) {
    const requested = { type: parameters.getAll("type"), text: parameters.get("text"), before: parameters.get("before") };
    this.all = parameters.get("all") === "1" || requested.type.length > 0;
    const data = await this.context.load("events", { ...requested, important: this.all ? null : 1 });
    if (!this.context.current()) return;
    this.show(data, requested);
    const follow = requested.before === null ? JSON.stringify([this.all, requested.type]) : null;
    if (follow === this.follows) return;
    this.follows = follow;
    this.context.unfollow();
    const known = this.all ? data.types.map((one) => one.type) : IMPORTANT;
    const types = requested.type.length ? requested.type : known;
    const moved = { news: this.reload, reload: this.reload };
    if (follow !== null) this.context.follow([...types, "run_ended", "episode_started"], data.cursor, moved);
  }

  changed() {
    this.reload();
    return true;
  }

  show(data, requested) {
    const { root } = this.context;
    if (!this.list) {
      this.types = element("span");
      this.note = element("p", { className: "note" }, "Seeds that germinated, were kept (fossilized) or pruned, rollbacks, anomalies and failures.");
      this.everything = element("input", { type: "checkbox", onchange: () => go("events", { all: this.everything.checked ? 1 : null, type: null, before: null }, true) });
      this.search = element("input", { type: "search", value: requested.text ?? "", oninput: () => this.typed() });
      this.list = element("ol", { className: "log", "aria-label": "Events, newest first" });
      this.foot = element("div", { className: "bar" });
      const text = element("label", {}, "Text", this.search);
      const all = element("label", {}, this.everything, "All events");
      root.replaceChildren(element("h1", {}, "Events"), element("div", { className: "bar" }, all, this.types, text), this.note, this.list, this.foot);
    }
    this.everything.checked = this.all;
    this.types.hidden = !this.all;
    this.note.hidden = this.all;
    this.slots = data.slots;
    this.showTypes(data, requested);
    this.list.hidden = !data.events.length;
    this.list.replaceChildren(...data.events.map((event) => this.entry(event)));
    const older = data.more && element("button", { type: "button", onclick: () => this.older(data) }, "Older");
    const newest = requested.before && element("button", { type: "button", onclick: () => go("events", { before: null }) }, "Newest");
    const none = data.events.length ? null : empty("No matching events yet.");
    this.foot.replaceChildren(...[none, newest, older].filter(Boolean));
  }

  showTypes(data, requested) {
    const shape = JSON.stringify([data.types, requested.type]);
    if (shape === this.shape || this.types.contains(document.activeElement)) return;
    this.shape = shape;
    const options = [["", "all"], ...data.types.map(({ type, count }) => [type, `${words(type)} (${count})`])];
    const put = (value) => go("events", { all: 1, type: value, before: null }, true);
    this.types.replaceChildren(choice("Type", options, requested.type[0] ?? "", put));
  }

  typed() {
    clearTimeout(this.typing);
    this.typing = setTimeout(() => go("events", { text: this.search.value, before: null }, true), TYPING_MS);
  }

  older(data) {
    go("events", { before: data.events.at(-1).id });
    this.list.scrollIntoView({ block: "start" });
  }

  entry(event) {
    const payload = event.payload ?? {};
    // A model that grows alone has one network, whose steps are its decisions.
    const alone = this.context.runs().find((run) => run.name === this.context.run)?.command === "grow";
    const network = !alone && "environment" in payload ? `, network ${payload.environment}, step ${payload.step}` : "";
    const place = `${alone ? "decision" : "iteration"} ${event.iteration}${network}`;
    const change = event.type === "lifecycle_transition" && KINDS[payload.after];
    const kind = ALARMS.has(event.type) ? "kind alarm" : change === "kept" ? "kind good" : "kind";
    const details = element(
      "details",
      { open: this.opened.has(event.id) },
      element(
        "summary",
        {},
        element("span", { className: "quiet" }, clock(event.time)),
        element("span", { className: kind }, change || words(event.type)),
        element("span", { className: "quiet place" }, place),
        element("span", { className: "gist" }, change ? this.describeSeed(payload) : gist(payload)),
      ),
    );
    const fill = () => {
      if (details.open) {
        this.opened.add(event.id);
        if (details.children.length === 1) details.append(element("pre", {}, JSON.stringify(payload, null, 1)));
      } else this.opened.delete(event.id);
    };
    details.addEventListener("toggle", fill);
    fill();
    return element("li", {}, details);
  }

  /** The seed that germinated, was kept or was pruned, and why. */
  describeSeed(payload) {
    const seed = `${words(payload.blueprint)} in ${named(this.slots, payload.slot, "slot")}`;
    const worth = typeof payload.contribution === "number" ? [`contribution ${difference(payload.contribution)}`] : [];
    const least = typeof payload.threshold === "number" ? [`minimum ${difference(payload.threshold)}`] : [];
    const rent = typeof payload.price === "number" ? [`rent ${measure(payload.price)}`] : [];
    return [seed, ...worth, ...least, ...rent].join(", ");
  }

  close() {
    clearTimeout(this.typing);
  }
}

/** The plain fields of an event in a line. */
function gist(payload) {
  return Object.entries(payload)
    .filter(([name, value]) => !QUIET.includes(name) && (value === null || typeof value !== "object"))
    .map(([name, value]) => `${words(name)} ${typeof value === "number" ? brief(value) : value ?? "–"}`)
    .join(", ");
}
