// Smoothing of curves: one weight for all charts, which the address holds.

import { element } from "./dom.js";
import { go, here } from "./place.js";

const MOST = 0.99;
const STEP = 0.01;

/** Listeners call this when the weight has changed. */
export const onSmoothing = new Set();

const read = () => Math.min(MOST, Math.max(0, Number(here().parameters.get("smooth")) || 0));
let weight = read();

/** The weight of the past, from 0 (none) to below 1. */
export const smoothing = () => weight;

function use(value) {
  if (value === weight) return;
  weight = value;
  for (const listener of onSmoothing) listener();
}

window.addEventListener("hashchange", () => use(read()));

/**
 * Exponential moving average, corrected for its start, so that it is an average of the values so far. Missing values
 * stay missing; with `broken` a new average starts after them.
 */
export function average(values, weight, broken = false) {
  let sum = 0;
  let total = 0;
  return values.map((value) => {
    if (value === null) {
      if (broken) sum = total = 0;
      return null;
    }
    sum = weight * sum + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return sum / total;
  });
}

/** The slider of a view; the address follows once it is released. */
export function smoothingSlider(view) {
  const shown = element("output", {}, weight.toFixed(2));
  const slider = element("input", {
    type: "range", min: 0, max: MOST, step: STEP, value: weight, "aria-label": "Smoothing",
    oninput: () => use(Number(slider.value)),
    onchange: () => go(view, { smooth: weight || null }, true),
  });
  const follow = () => {
    if (!slider.isConnected) return onSmoothing.delete(follow);
    slider.value = weight;
    shown.textContent = weight.toFixed(2);
  };
  onSmoothing.add(follow);
  return element("label", { className: "smoothing" }, "Smoothing", slider, shown);
}
