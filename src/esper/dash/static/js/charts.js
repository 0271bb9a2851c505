// Line charts with words around them.

import { card, element } from "./dom.js";
import { brief } from "./formats.js";
import { average, onSmoothing, smoothing } from "./smoothing.js";
import { colour, onTheme } from "./theme.js";

const COLOURS = 12;
export const AXIS = 56; // width of the vertical axis, which canvases beside it line up with
export const RIGHT = 16;
const LABELLED = 108; // room for the names of levels
const FONT = "11px system-ui, sans-serif";
const LABEL_HEIGHT = 12;

/** Whether a line has one value at most, which only a point can show. */
const isPoint = (line) => line.values.filter((value) => value !== null).length < 2;

/**
 * A card with a chart.
 *
 * `lines` are { label, values, dashed?, points?, broken? } over `x`, broken where a value is missing; `levels` are { label, value }, drawn across and named on the
 * right; `marks` are { x, label } that are flagged. Around values that are all the same the axis reaches `constant` up
 * and down, where that is given. `update` takes a new `{ x, lines, levels, marks }`. Where the reader smooths curves, the
 * raw curve stays behind its average.
 */
export class Chart {
  constructor({ title, note, height = 210, unit = "iteration", range = null, constant = null }) {
    this.options = { title, height, unit, range, constant };
    this.box = element("div", { className: "plot", role: "img" });
    this.keys = element("ul", { className: "legend" });
    this.none = element("p", { className: "note", hidden: true }, "No measurements yet.");
    this.node = card(title, note, this.box, this.none, this.keys);
    this.plot = null;
    this.averages = [];
    this.redraw = () => this.build();
    onTheme.add(this.redraw);
    onSmoothing.add(this.redraw);
    this.resize = new ResizeObserver(() => this.fit());
    this.resize.observe(this.box);
  }

  update({ x, lines, levels = [], marks = [] }) {
    const shape = (data) => JSON.stringify([data?.lines.map((line) => [line.label, isPoint(line)]), data?.levels]);
    const now = { x, lines: lines.filter((line) => line.values.some((value) => value !== null)), levels, marks };
    const same = this.plot && shape(now) === shape(this.data);
    this.data = now;
    const last = now.lines.map((line) => `${line.label} ${brief(line.values.findLast((value) => value !== null))}`);
    this.box.setAttribute("aria-label", `${this.options.title}. Newest: ${last.join(", ") || "nothing"}.`);
    this.none.hidden = now.lines.length > 0;
    this.box.hidden = this.keys.hidden = !now.lines.length;
    if (same) {
      this.plot.setData(this.columns());
      this.showValues(null);
    } else this.build();
  }

  columns() {
    const { x, lines, levels } = this.data;
    const weight = smoothing();
    this.averages = weight ? lines.map((line) => average(line.values, weight, line.broken)) : [];
    return [x, ...lines.map((line) => line.values), ...this.averages, ...levels.map((level) => x.map(() => level.value))];
  }

  build() {
    this.plot?.destroy();
    this.plot = null;
    const width = this.box.clientWidth;
    if (!this.data?.lines.length || !width) return;
    this.width = width;
    const { height, unit, range, constant } = this.options;
    const around = (_, low, high) => (low === high ? [low - constant, high + constant] : uPlot.rangeNum(low, high, 0.1, true));
    const axis = { stroke: colour("soft"), font: FONT, grid: { stroke: colour("line"), width: 1 }, ticks: { show: false } };
    const room = this.data.levels.length && width > 340 ? LABELLED : RIGHT;
    this.plot = new uPlot(
      {
        width,
        height,
        padding: [8, room, 0, 0],
        legend: { show: false },
        cursor: { drag: { x: false, y: false }, y: false },
        scales: { x: { time: false, ...(range ? { range } : {}) }, ...(constant ? { y: { range: around } } : {}) },
        axes: [
          { ...axis, label: unit, labelSize: 16, labelFont: FONT, size: 26, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000] },
          { ...axis, size: AXIS, values: (_, ticks) => ticks.map(brief) },
        ],
        series: [
          {},
          ...this.data.lines.map((line, index) => this.line(line, index, Boolean(smoothing()))),
          ...(smoothing() ? this.data.lines.map((line, index) => this.line({ ...line, points: false }, index)) : []),
          ...this.data.levels.map(() => this.level()),
        ],
        hooks: { draw: [(plot) => this.annotate(plot, room)], setCursor: [(plot) => this.showValues(plot.cursor.idx)] },
      },
      this.columns(),
      this.box,
    );
    this.showKeys();
  }

  line(line, index, faint = false) {
    const stroke = faint ? faded(this.colourOf(line, index)) : this.colourOf(line, index);
    const dash = line.dashed ? [6, 4] : index >= COLOURS ? [2, 3] : undefined;
    return { stroke, width: 2, dash, spanGaps: !line.broken, points: { show: isPoint(line) || Boolean(line.points), size: 6, fill: stroke } };
  }

  colourOf(line, index) {
    return colour(line.colour ?? `c${(index % COLOURS) + 1}`);
  }

  level() {
    return { stroke: colour("soft"), width: 1, dash: [4, 4], points: { show: false } };
  }

  /** Names of levels beside their ends, and flags. */
  annotate(plot, room) {
    const context = plot.ctx;
    const ratio = devicePixelRatio || 1;
    context.save();
    context.font = `${11 * ratio}px system-ui, sans-serif`;
    context.textBaseline = "middle";
    context.textAlign = "left";
    context.fillStyle = colour("soft");
    const right = plot.bbox.left + plot.bbox.width + 6 * ratio;
    const places = this.data.levels.map((level) => ({ level, y: plot.valToPos(level.value, "y", true) }));
    let above = -Infinity;
    for (const { level, y } of places.sort((one, other) => one.y - other.y)) {
      above = Math.max(y, above + LABEL_HEIGHT * ratio);
      if (room === LABELLED) context.fillText(level.label, right, above, (LABELLED - 8) * ratio);
    }
    context.fillStyle = colour("bad");
    for (const mark of this.data.marks) {
      const x = plot.valToPos(mark.x, "x", true);
      context.beginPath();
      context.moveTo(x, plot.bbox.top + 7 * ratio);
      context.lineTo(x - 4 * ratio, plot.bbox.top);
      context.lineTo(x + 4 * ratio, plot.bbox.top);
      context.fill();
    }
    context.restore();
  }

  showKeys() {
    this.values = this.data.lines.map(() => element("output"));
    const keys = this.data.lines.map((line, index) => {
      const key = element("span", { className: line.dashed || index >= COLOURS ? "key dashed" : "key", "aria-hidden": "true" });
      key.style.borderTopColor = this.colourOf(line, index);
      return element("li", {}, key, element("span", {}, line.label), this.values[index]);
    });
    this.keys.replaceChildren(...keys);
    this.showValues(null);
  }

  /** The values under the cursor, or the newest, and their averages. */
  showValues(index) {
    if (!this.values) return;
    const pick = (values) => (index === null || index === undefined ? values.findLast((one) => one !== null) : values[index]);
    this.data.lines.forEach((line, number) => {
      const smoothed = this.averages[number] ? ` (smoothed ${brief(pick(this.averages[number]))})` : "";
      if (this.values[number]) this.values[number].textContent = `${brief(pick(line.values))}${smoothed}`;
    });
  }

  fit() {
    const width = this.box.clientWidth;
    if (width && width !== this.width) this.build();
  }

  close() {
    this.plot?.destroy();
    this.resize.disconnect();
    onTheme.delete(this.redraw);
    onSmoothing.delete(this.redraw);
  }
}

/** A colour, `rgb(...)`, as a faint one. */
const faded = (stroke) => stroke.replace(/^rgb\((.*)\)$/, "rgba($1, 0.28)");
