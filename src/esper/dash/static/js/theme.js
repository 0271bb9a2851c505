// Light or dark: as in the system, until the reader chooses.

const KEY = "esper-theme";
const system = matchMedia("(prefers-color-scheme: dark)");
const probe = document.createElement("span");
let resolved = new Map();

/** Listeners call this when all colours have changed. */
export const onTheme = new Set();

export const dark = () => (document.documentElement.dataset.theme ?? (system.matches ? "dark" : "light")) === "dark";

/** A colour of the style sheet, for a canvas. */
export function colour(name) {
  if (!resolved.has(name)) {
    probe.hidden = true;
    if (!probe.isConnected) document.body.append(probe);
    probe.style.color = `var(--${name})`;
    resolved.set(name, getComputedStyle(probe).color);
  }
  return resolved.get(name);
}

function changed(button) {
  resolved = new Map();
  button.textContent = dark() ? "Light" : "Dark";
  button.setAttribute("aria-label", dark() ? "Use light colours" : "Use dark colours");
  for (const listener of onTheme) listener();
}

/** Let a button switch, and remember it. */
export function startTheme(button) {
  const stored = localStorage.getItem(KEY);
  if (stored === "light" || stored === "dark") document.documentElement.dataset.theme = stored;
  button.addEventListener("click", () => {
    document.documentElement.dataset.theme = dark() ? "light" : "dark";
    localStorage.setItem(KEY, document.documentElement.dataset.theme);
    changed(button);
  });
  system.addEventListener("change", () => changed(button));
  changed(button);
}
