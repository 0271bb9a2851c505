// Choosing an episode.

import { element } from "./dom.js";
import { go } from "./place.js";

/** Buttons to the episodes before and after, and back to following the newest. */
export function episodePager(view, episode, requested) {
  const button = (text, label, target, enabled) =>
    element("button", { type: "button", "aria-label": label, disabled: !enabled, onclick: () => go(view, { episode: target }) }, text);
  const { number, first, last } = episode;
  if (first === last) return element("span", { className: "pager" }, `Episode ${number}`);
  return element(
    "span",
    { className: "pager" },
    button("‹", "Previous episode", number - 1, number > first),
    element("span", {}, `Episode ${number} of ${last}`),
    button("›", "Next episode", number + 1, number < last),
    requested === null
      ? element("span", { className: "facts" }, "newest")
      : button("Newest", "Follow the newest episode", null, true),
  );
}
