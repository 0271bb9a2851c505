// The lanes of one network, with the names of its seeds.

import { AXIS, RIGHT } from "./charts.js";
import { element } from "./dom.js";
import { named } from "./formats.js";
import { drawBlock, drawGlyph, sized } from "./lane.js";
import { colour, onTheme } from "./theme.js";

const NAME = 17;
const LANE = 24;
const GAP = 6;
const FONT = "11px system-ui, sans-serif";

export class Lanes {
  constructor() {
    this.canvas = element("canvas", { role: "img", "aria-label": "Stages of each slot over the steps" });
    this.node = element("div", { className: "lanes-box" }, this.canvas);
    this.redraw = () => this.draw();
    onTheme.add(this.redraw);
    this.resize = new ResizeObserver(this.redraw);
    this.resize.observe(this.node);
  }

  update(decisions, slots, steps) {
    this.data = { decisions, slots, steps };
    this.draw();
  }

  draw() {
    const width = Math.floor(this.node.clientWidth);
    if (!this.data || !width) return;
    const { decisions, slots, steps } = this.data;
    const lanes = decisions[0]?.stages?.length ?? 0;
    const context = sized(this.canvas, width, Math.max(1, lanes * (NAME + LANE + GAP)));
    context.fillStyle = colour("panel");
    context.fillRect(0, 0, width, lanes * (NAME + LANE + GAP));
    const block = (width - AXIS - RIGHT) / steps;
    for (let lane = 0; lane < lanes; lane += 1) {
      const top = lane * (NAME + LANE + GAP) + NAME;
      context.font = FONT;
      context.fillStyle = colour("ink");
      context.textBaseline = "middle";
      context.textAlign = "left";
      context.fillText(named(slots, lane, "slot"), 0, top + LANE / 2, AXIS - 6);
      context.fillStyle = colour("sunk");
      context.fillRect(AXIS, top, block * steps, LANE);
      this.drawLane(context, lane, top, block);
    }
  }

  drawLane(context, lane, top, block) {
    let stretch = { stage: null, count: 0 };
    let resident = null;
    for (const decision of this.data.decisions) {
      const stage = decision.stages?.[lane];
      const box = { x: AXIS + decision.step * block, y: top, width: block, height: LANE };
      drawBlock(context, { ...box, ...pixels(decision.step, block) }, stage, decision.alphas?.[lane]);
      stretch = { stage, count: stretch.stage === stage ? stretch.count + 1 : 1 };
      drawGlyph(context, box, stage, stretch.count);
      const blueprint = decision.blueprints?.[lane] ?? null;
      if (blueprint !== null && (blueprint !== resident || (stage === "germinated" && stretch.count === 1))) {
        context.fillStyle = colour("panel");
        context.fillRect(box.x, top - NAME + 2, context.canvas.width, NAME - 3);
        context.fillStyle = colour("ink");
        context.font = FONT;
        context.textAlign = "left";
        context.textBaseline = "middle";
        context.fillText(blueprint, box.x, top - NAME / 2 + 1);
      }
      resident = blueprint;
    }
  }

  close() {
    this.resize.disconnect();
    onTheme.delete(this.redraw);
  }
}

/** A step's place in whole pixels, where neighbours meet without a seam. */
function pixels(step, block) {
  const x = Math.round(AXIS + step * block);
  return { x, width: Math.round(AXIS + (step + 1) * block) - x };
}
