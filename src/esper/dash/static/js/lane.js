// A slot's life on a canvas: a block per step, coloured by stage, as high as alpha.

import { GLYPHS, known } from "./stages.js";
import { colour } from "./theme.js";

const FONT = "600 10px system-ui, sans-serif";
const GLYPH_WIDTH = 9;
const LOWEST = 0.28;
const COUNTING = new Set(["blending", "holding", "fossilized"]);

/** The block of one step. Stages in which alpha does not count are low. */
export function drawBlock(context, box, stage, alpha) {
  // Whole pixels leave no seams between blocks.
  const left = Math.round(box.x);
  const width = Math.round(box.x + box.width) - left;
  context.fillStyle = colour("sunk");
  context.fillRect(left, box.y, width, box.height);
  const name = known(stage);
  if (name === "dormant") return;
  const share = COUNTING.has(name) ? Math.min(1, Math.max(0, Number(alpha) || 0)) : 0;
  const height = Math.round(box.height * (LOWEST + (1 - LOWEST) * share));
  context.fillStyle = colour(name);
  context.fillRect(left, box.y + box.height - height, width, height);
}

/** The glyph at the start of a stretch of one stage, once there is room: `count` blocks have come. */
export function drawGlyph(context, box, stage, count) {
  const needed = Math.ceil(GLYPH_WIDTH / box.width);
  const glyph = GLYPHS[known(stage)];
  if (count !== needed || !glyph) return;
  context.fillStyle = colour(["embargoed", "resetting"].includes(stage) ? "ink" : "on-stage");
  context.font = FONT;
  context.textAlign = "center";
  context.textBaseline = "alphabetic";
  const left = box.x - (count - 1) * box.width;
  context.fillText(glyph, left + (count * box.width) / 2, box.y + box.height - 2.5, count * box.width);
}

/** Set a canvas's size in CSS pixels, sharp on every screen. */
export function sized(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d", { alpha: false });
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  return context;
}
