// The stages of a seed: each has a colour of its own name in the style sheet, and a glyph.

import { element } from "./dom.js";

export const GLYPHS = {
  dormant: "",
  germinated: "g",
  training: "t",
  blending: "b",
  holding: "h",
  fossilized: "F",
  pruned: "x",
  embargoed: "e",
  resetting: "e",
};

const MEANINGS = {
  dormant: "dormant",
  germinated: "germinated",
  training: "training",
  blending: "blending",
  holding: "holding",
  fossilized: "fossilized",
  pruned: "pruned",
  embargoed: "cooling down",
};

/** A stage that is known; run content may hold anything. */
export const known = (stage) => (Object.hasOwn(GLYPHS, stage) ? stage : "dormant");

/** Colour and glyph of each stage. */
export function stageLegend() {
  const samples = Object.entries(MEANINGS).map(([stage, meaning]) =>
    element("li", {}, element("i", { className: `stage ${stage}`, "aria-hidden": "true" }, GLYPHS[stage]), meaning),
  );
  return element("ul", { className: "legend", "aria-label": "Stages" }, samples);
}
