// Where the reader is: all of it stands in the address, after the #.

const OF_POPULATIONS = ["population", "network", "learning", "compare", "events"];
const OF_ONE_MODEL = ["model", "compare", "events"];
const OF_ALL_RUNS = "runs";
const VIEWS = [OF_ALL_RUNS, ...OF_POPULATIONS, ...OF_ONE_MODEL];
const KEPT = ["run", "smooth"]; // from view to view

/** The views of a run: a model that grows alone has a page of its own. */
export const viewsOf = (run) => (run?.command === "grow" ? OF_ONE_MODEL : OF_POPULATIONS);

/** The view and its parameters; the table of all runs where the address names no view. */
export function here() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const view = VIEWS.includes(path) ? path : VIEWS[0];
  return { view, parameters: new URLSearchParams(query ?? "") };
}

/** The address of a view. The run and smoothing stay, other parameters only within a view. Null removes one. */
export function address(view, changes = {}) {
  const now = here();
  const parameters = new URLSearchParams(now.view === view ? now.parameters : []);
  for (const name of KEPT) {
    const value = now.parameters.get(name);
    if (value !== null) parameters.set(name, value);
  }
  for (const [name, value] of Object.entries(changes)) {
    parameters.delete(name);
    for (const one of [value].flat()) {
      if (one !== null && one !== "") parameters.append(name, one);
    }
  }
  return `#/${view}?${parameters}`;
}

/** Go there; with `replace` the browser's Back button does not stop at this place. */
export function go(view, changes = {}, replace = false) {
  const target = address(view, changes);
  if (target === location.hash) return;
  if (replace) location.replace(target);
  else location.hash = target;
}
