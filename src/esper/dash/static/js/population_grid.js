// Many networks on one canvas; only what has changed is drawn.

import { drawBlock, drawGlyph, sized } from "./lane.js";
import { objective } from "./population_model.js";
import { colour } from "./theme.js";

const GAP = 12;
const LEAST_WIDTH = 186;
const MOST_WIDTH = 420;
const PADDING = 9;
const TITLE = 19;
const SPARK = 26;
const LANE = 14;
const LANE_GAP = 2;
const MARK = 26;
const MARK_FULL = 0.2; // a contribution that fills its mark
const FONT = "12px system-ui, sans-serif";
const BOLD = "650 12px system-ui, sans-serif";

export class Grid {
  constructor(canvas, population, networks) {
    this.canvas = canvas;
    this.population = population;
    this.networks = networks;
    this.places = new Map(networks.map((one, index) => [one.environment, index]));
    this.waiting = new Set();
    this.frame = null;
  }

  /** Lay out and draw everything for a width in CSS pixels. */
  layOut(width) {
    const fitting = Math.max(1, Math.floor((width + GAP) / (LEAST_WIDTH + GAP)));
    this.columns = Math.min(fitting, Math.max(1, this.networks.length));
    const share = Math.floor((width - GAP * (this.columns - 1)) / this.columns);
    this.width = this.columns < fitting ? Math.min(share, MOST_WIDTH) : share;
    this.height = 2 * PADDING + TITLE + SPARK + this.population.lanes * (LANE + LANE_GAP);
    this.block = (this.width - 2 * PADDING - MARK) / this.population.steps;
    const rows = Math.ceil(this.networks.length / this.columns);
    this.context = sized(this.canvas, width, Math.max(1, rows * (this.height + GAP) - GAP));
    this.context.fillStyle = colour("paper");
    this.context.fillRect(0, 0, width, rows * (this.height + GAP));
    for (const network of this.networks) this.drawCard(network);
  }

  /** Draw a network's newest steps with the next frame. */
  refresh(network) {
    if (!this.places.has(network.environment)) return;
    this.waiting.add(network);
    this.frame ??= requestAnimationFrame(() => this.drawWaiting());
  }

  drawWaiting() {
    this.frame = null;
    for (const network of this.waiting) this.drawNews(network, this.corner(network));
    this.waiting.clear();
  }

  close() {
    cancelAnimationFrame(this.frame);
  }

  /** The upper left corner of a network's card. */
  corner(network) {
    const index = this.places.get(network.environment);
    const column = index % this.columns;
    return { x: column * (this.width + GAP), y: Math.floor(index / this.columns) * (this.height + GAP) };
  }

  /** Index of the card at a point, or -1. */
  at(x, y) {
    const column = Math.floor(x / (this.width + GAP));
    const index = Math.floor(y / (this.height + GAP)) * this.columns + column;
    return column < this.columns && index >= 0 && index < this.networks.length ? index : -1;
  }

  drawCard(network) {
    const { x, y } = this.corner(network);
    const context = this.context;
    context.fillStyle = colour("panel");
    context.strokeStyle = colour("line");
    context.lineWidth = 1;
    context.beginPath();
    context.roundRect(x + 0.5, y + 0.5, this.width - 1, this.height - 1, 9);
    context.fill();
    context.stroke();
    for (let lane = 0; lane < this.population.lanes; lane += 1) {
      context.fillStyle = colour("sunk");
      context.fillRect(x + PADDING, this.laneTop(y, lane), this.block * this.population.steps, LANE);
    }
    network.drawn = 0;
    network.stretches = [];
    this.drawNews(network, { x, y });
  }

  drawNews(network, corner) {
    for (; network.drawn < network.steps.length; network.drawn += 1) this.drawStep(network, network.drawn, corner);
    this.drawTitle(network, corner);
    this.drawMarks(network, corner);
  }

  drawStep(network, index, { x, y }) {
    const step = network.steps[index];
    const left = x + PADDING + index * this.block;
    for (let lane = 0; lane < this.population.lanes; lane += 1) {
      const stage = step.stages?.[lane];
      const box = { x: left, y: this.laneTop(y, lane), width: this.block, height: LANE };
      drawBlock(this.context, box, stage, step.alphas?.[lane]);
      const stretch = network.stretches[lane];
      const count = stretch?.stage === stage ? stretch.count + 1 : 1;
      network.stretches[lane] = { stage, count };
      drawGlyph(this.context, box, stage, count);
    }
    this.drawSpark(network, index, left, y);
  }

  drawSpark(network, index, left, y) {
    const height = (accuracy) => y + PADDING + TITLE + (SPARK - 5) * (1 - Math.min(1, Math.max(0, accuracy ?? 0))) + 1;
    const context = this.context;
    const now = height(network.steps[index].metric);
    context.strokeStyle = colour("accent");
    context.lineWidth = 1.5;
    context.beginPath();
    context.moveTo(left - this.block / 2, index ? height(network.steps[index - 1].metric) : now);
    if (!index) context.moveTo(left, now);
    context.lineTo(left + this.block / 2, now);
    context.stroke();
  }

  drawTitle(network, { x, y }) {
    const context = this.context;
    const right = x + this.width - PADDING;
    context.fillStyle = colour("panel");
    context.fillRect(x + PADDING - 2, y + 5, this.width - 2 * PADDING + 4, TITLE);
    context.textBaseline = "alphabetic";
    context.fillStyle = colour("ink");
    context.font = BOLD;
    context.textAlign = "right";
    const worth = objective(network);
    context.fillText(typeof worth === "number" ? worth.toFixed(3) : "–", right, y + 19);
    context.textAlign = "left";
    const number = String(network.environment);
    context.fillText(number, x + PADDING, y + 19);
    const after = x + PADDING + context.measureText(number).width + 7;
    context.font = FONT;
    context.fillStyle = colour("soft");
    context.fillText(network.family ?? "", after, y + 19, Math.max(20, right - after - 50));
    if (!network.rollbacks) return;
    context.fillStyle = colour("bad");
    context.textAlign = "right";
    context.fillText(`↺${network.rollbacks}`, right - 42, y + 19);
  }

  /** Contributions as they were last measured: to the right of the middle where the seed helps. */
  drawMarks(network, { x, y }) {
    const context = this.context;
    const measured = network.steps.at(-1)?.contributions ?? [];
    const left = x + this.width - PADDING - MARK + 4;
    const middle = left + (MARK - 4) / 2;
    for (let lane = 0; lane < this.population.lanes; lane += 1) {
      const top = this.laneTop(y, lane);
      context.fillStyle = colour("panel");
      context.fillRect(left, top, MARK - 4, LANE);
      context.fillStyle = colour("line");
      context.fillRect(middle, top, 1, LANE);
      const value = measured[lane];
      if (typeof value !== "number" || value === 0) continue;
      const length = Math.max(1.5, (Math.min(1, Math.abs(value) / MARK_FULL) * (MARK - 4)) / 2);
      context.fillStyle = colour(value > 0 ? "good" : "bad");
      context.fillRect(value > 0 ? middle : middle - length, top + 3, length, LANE - 6);
    }
  }

  laneTop(y, lane) {
    return y + PADDING + TITLE + SPARK + lane * (LANE + LANE_GAP);
  }
}
