// The frame: which run, which view, and how the connection stands.

import { element, empty } from "./dom.js";
import { words } from "./formats.js";
import { atMostEvery } from "./later.js";
import { Live } from "./live.js";
import { address, go, here, viewsOf } from "./place.js";
import { ask } from "./server.js";
import { startTheme } from "./theme.js";
import * as compare from "./views/compare.js";
import * as events from "./views/events.js";
import * as learning from "./views/learning.js";
import * as model from "./views/model.js";
import * as network from "./views/network.js";
import * as population from "./views/population.js";
import * as allRuns from "./views/runs.js";

const MODULES = { runs: allRuns, population, network, learning, model, compare, events };
const REFRESH_MS = 4000;

const main = document.getElementById("main");
const chooser = document.getElementById("run");
const status = document.getElementById("status");
const trouble = document.getElementById("trouble");
let runs = [];
let opened = { view: null, run: null, shown: null };
let visit = 0;
let connected = null;

function complain(sentence) {
  trouble.hidden = !sentence;
  trouble.textContent = sentence ?? "";
}

/** What a view may do: load, follow the run, and show what went wrong. */
function contextOf(run, number) {
  const current = () => number === visit;
  const sources = [];
  return {
    root: main,
    run,
    runs: () => runs,
    current,
    complain: (sentence) => current() && complain(sentence),
    load: (view, parameters = {}) => ask(view, { run, ...parameters }),
    /** A function that loads soon, at most once in so many milliseconds, and goes on trying where that fails. */
    reloading(milliseconds, load) {
      let failed = false;
      const again = atMostEvery(milliseconds, async () => {
        try {
          await load();
          if (failed && current()) complain(null);
          failed = false;
        } catch (error) {
          if (!current()) return;
          failed = true;
          complain(error.message);
          setTimeout(() => current() && again(), REFRESH_MS);
        }
      });
      return again;
    },
    follow(types, cursor, { news = () => {}, reload }) {
      if (!current()) return;
      const live = new Live(run, types, cursor, {
        news,
        reload: () => {
          complain(null);
          reload();
        },
        trouble: complain,
        connected: (yes) => {
          connected = yes;
          if (yes) complain(null); // the new connection reports what is still wrong
          showStatus();
        },
      });
      sources.push(live);
    },
    unfollow: () => sources.splice(0).forEach((live) => live.close()),
  };
}

async function show() {
  const { view, parameters } = here();
  const run = parameters.get("run");
  if (!runs.length || (run === null && view !== "runs")) return;
  const views = ["runs", ...(run === null ? [] : viewsOf(runs.find((one) => one.name === run)))];
  if (!views.includes(view)) return go(views[1], {}, true);
  showTabs(view, views);
  chooser.value = run ?? "";
  showStatus();
  if (opened.view === view && opened.run === run && opened.shown?.changed?.(parameters)) return;
  opened.shown?.close?.();
  visit += 1;
  const context = contextOf(run, visit);
  const number = visit;
  opened = { view, run, shown: { close: context.unfollow } };
  complain(null);
  connected = null;
  try {
    const shown = await MODULES[view].open(context, parameters);
    const close = () => {
      shown?.close?.();
      context.unfollow();
    };
    if (number !== visit) close();
    else opened.shown = { changed: (now) => shown?.changed?.(now), close };
  } catch (error) {
    if (number !== visit) return;
    main.replaceChildren(empty("This page cannot be shown now."));
    complain(error.message);
    if (!(error instanceof TypeError)) retryLater(number);
    else throw error;
  }
}

function retryLater(number) {
  setTimeout(() => {
    if (number === visit) {
      opened = { ...opened, view: null };
      show();
    }
  }, REFRESH_MS);
}

function showTabs(view, views) {
  const tabs = document.getElementById("tabs");
  const links = views.map((name) => {
    const title = name === "runs" ? "All runs" : name[0].toUpperCase() + name.slice(1);
    const link = element("a", { href: address(name) }, title);
    if (name === view) link.setAttribute("aria-current", "page");
    return link;
  });
  if (tabs.contains(document.activeElement)) {
    const focused = [...tabs.children].indexOf(document.activeElement);
    tabs.replaceChildren(...links);
    links[focused]?.focus();
  } else tabs.replaceChildren(...links);
}

function showStatus() {
  const run = runs.find((one) => one.name === here().parameters.get("run"));
  const total = run?.total ? ` of ${run.total}` : "";
  const unit = run?.command === "grow" ? "decision" : "iteration";
  const progress = run && !run.error ? `${words(run.state)}, ${unit} ${run.done}${total}` : "cannot be read";
  status.hidden = here().parameters.get("run") === null && connected !== false;
  status.textContent = connected === false ? "connection lost, retrying" : progress;
  status.dataset.state = connected === false ? "waiting" : connected && run?.state === "running" ? "live" : "still";
}

function showRuns() {
  const requested = here().parameters.get("run");
  const names = runs.map((run) => run.name);
  if (requested === null) names.unshift(""); // nothing is chosen
  else if (!names.includes(requested)) names.unshift(requested);
  if ([...chooser.options].map((option) => option.value).join("\n") !== names.join("\n")) {
    chooser.replaceChildren(...names.map((name) => element("option", { value: name, disabled: !name }, name || "choose a run")));
  }
  chooser.value = requested ?? "";
}

async function refresh() {
  try {
    const data = await ask("runs");
    const none = !runs.length;
    runs = data.runs;
    showRuns();
    if (!runs.length) return showNoRuns(data.places);
    // A single run is opened at once; a view without a run shows the newest.
    if (here().parameters.get("run") === null && (here().view !== "runs" || (!location.hash && runs.length === 1))) {
      const newest = [...runs].sort((one, other) => (other.started ?? 0) - (one.started ?? 0))[0];
      go(here().view === "runs" ? viewsOf(newest)[0] : here().view, { run: newest.name }, true);
    }
    const { view, parameters } = here();
    const known = runs.find((one) => one.name === parameters.get("run"));
    if (none || (known && view !== "runs" && !viewsOf(known).includes(view))) await show();
    else {
      if (view === "runs") {
        connected = null; // it follows no run
        opened.shown?.changed?.(parameters);
      }
      showStatus();
    }
  } catch (error) {
    if (!runs.length) complain(error.message);
    connected = false;
    showStatus();
  }
}

function showNoRuns(places) {
  opened.shown?.close?.();
  opened = { view: null, run: null, shown: null };
  visit += 1;
  status.hidden = false;
  status.textContent = "waiting for a run";
  complain(null);
  const sentence = `There are no runs in ${places.join(", ")} yet. New runs appear here. To start one:`;
  main.replaceChildren(empty(sentence, "esper train --run-dir runs/first"));
}

startTheme(document.getElementById("theme"));
document.getElementById("skip").addEventListener("click", (event) => {
  event.preventDefault(); // the part after # is the reader's place
  main.focus();
});
chooser.addEventListener("change", () => {
  const { view } = here();
  const target = view === "runs" ? viewsOf(runs.find((run) => run.name === chooser.value))[0] : view;
  go(target, { run: chooser.value, ...forget(target) });
});
window.addEventListener("hashchange", show);
setInterval(refresh, REFRESH_MS);
refresh();

/** Parameters that mean nothing in another run. */
function forget(view) {
  return view === "compare" ? {} : { episode: null, environment: null, step: null, probe: null, family: null, type: null, text: null, before: null };
}
