// One chart of uPlot in the colours of the page: lines of several runs, bands, a readout, and a click on a point.

import uPlot from "../vendor/uplot/uPlot.esm.js";
import { faded, number, themed } from "./format.js";

/** Merge curves over one x axis: [{x, y}] -> [xs, ys, ys, ...]. */
export function aligned(curves) {
  const xs = [...new Set(curves.flatMap(({ x }) => x))].filter((x) => x !== null).sort((a, b) => a - b);
  const at = new Map(xs.map((x, index) => [x, index]));
  return [xs, ...curves.map(({ x, y }) => {
    const column = new Array(xs.length).fill(null);
    x.forEach((value, index) => { if (value !== null) column[at.get(value)] = y[index]; });
    return column;
  })];
}

/** The exponential mean of values; null stays null. `weight` in [0, 1) is that of what came before. */
export function smoothed(values, weight) {
  if (!weight) return values;
  let sum = 0, total = 0;
  return values.map((value) => {
    if (value === null) return null;
    sum = weight * sum + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return sum / total;
  });
}

/** A chart.
 * `curves`: [{label, color, x, y, width?, dash?, isFaint?, band?: [low, high]}]; options: height, isLog, onReadout, onPick, axis. */
export class Chart {
  constructor(element, options) {
    this.element = element;
    this.options = { height: 210, axis: number, ...options };
    this.resized = new ResizeObserver(() => this.plot?.setSize({ width: element.clientWidth, height: this.options.height }));
    this.resized.observe(element);
  }

  /** Draw curves; the range that was zoomed to is kept. */
  draw(curves) {
    const lines = curves.flatMap((curve) => (curve.band ? [...curve.band, curve] : [curve]));
    const data = aligned(lines);
    const kept = this.plot && this.isZoomed ? this.plot.scales.x : null;
    const shape = JSON.stringify([lines.map(({ label, color }) => [label, color]), this.options.isLog]);
    this.curves = lines;
    if (this.plot && this.shape === shape) this.plot.setData(data, !kept);
    else this.make(lines, data);
    this.shape = shape;
    if (kept) this.plot.setScale("x", { min: kept.min, max: kept.max });
  }

  make(lines, data) {
    this.plot?.destroy();
    const { height, isLog } = this.options;
    this.plot = new uPlot({
      width: Math.max(this.element.clientWidth, 100), height, pxAlign: false,
      padding: [8, 6, 0, 0],
      scales: { x: { time: false }, y: isLog ? { distr: 3, log: 10 } : {} },
      axes: [axis({ size: 28, space: 70, values: (_, ticks) => ticks.map(this.options.axis) }), axis({ size: 52, values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : number(tick))) })],
      series: [{}, ...lines.map((line) => seriesOf(line, data[0].length))],
      bands: bandsOf(lines),
      cursor: { drag: { x: true, y: false }, points: { size: 7 }, focus: { prox: 24 } },
      legend: { show: false },
      hooks: {
        setCursor: [(plot) => this.readOut(plot)],
        setSelect: [(plot) => { this.isZoomed = plot.select.width > 0; }],
      },
    }, data, this.element);
    this.plot.over.addEventListener("dblclick", () => { this.isZoomed = false; });
    this.plot.over.addEventListener("click", () => this.pick());
  }

  readOut(plot) {
    const index = plot.cursor.idx;
    if (!this.options.onReadout) return;
    if (index === null || index === undefined) return this.options.onReadout("");
    const named = this.curves.map((line, at) => [line, plot.data[at + 1][index]]).filter(([line, value]) => line.label && value !== null && value !== undefined);
    const texts = named.slice(0, 4).map(([line, value]) => `${named.length > 1 ? `${line.label} ` : ""}${number(value)}`);
    this.options.onReadout(`${this.options.axis(plot.data[0][index])}: ${texts.join(" · ")}${named.length > 4 ? ` · +${named.length - 4}` : ""}`);
  }

  pick() {
    const { idx: index, top } = this.plot.cursor;
    if (index === null || index === undefined || !this.options.onPick || this.plot.select.width > 3) return;
    const value = this.plot.posToVal(top, "y");
    const near = this.curves.map((line, at) => [line, this.plot.data[at + 1][index]]).filter(([line, y]) => line.label && y !== null && y !== undefined)
      .sort(([, a], [, b]) => Math.abs(a - value) - Math.abs(b - value))[0];
    if (near) this.options.onPick(this.plot.data[0][index], near[0]);
  }

  /** The chart as a PNG. */
  toBlob() {
    return new Promise((resolve) => this.plot.ctx.canvas.toBlob(resolve));
  }

  /** Draw with new colours of the page. */
  themed() {
    if (!this.plot) return;
    this.shape = "";
    this.make(this.curves, this.plot.data);
  }

  /** End it. */
  close() {
    this.resized.disconnect();
    this.plot?.destroy();
  }
}

function axis(more) {
  const stroke = themed("faint"), line = { stroke: themed("line"), width: 1 };
  return { stroke, font: "11px system-ui, sans-serif", grid: line, ticks: { ...line, size: 4 }, ...more };
}

function seriesOf(line, size) {
  return {
    label: line.label, stroke: line.color, width: line.width ?? (line.isFaint ? 1 : 1.6), alpha: line.isFaint ? 0.35 : 1,
    dash: line.dash, spanGaps: true, points: { show: size < 2 ? true : undefined, size: 4 },
  };
}

function bandsOf(lines) {
  return lines.flatMap((line, at) => (line.band ? [{ series: [at, at - 1], fill: faded(line.color, 0.14) }] : []));
}

/** A small line without axes. */
export function sparkPath(values, width, height) {
  const kept = values.filter((value) => value !== null);
  if (kept.length < 2) return "";
  const isFlat = Math.max(...kept) === Math.min(...kept);
  const low = Math.min(...kept) - (isFlat ? 0.5 : 0), span = isFlat ? 1 : Math.max(...kept) - low;
  const step = width / (values.length - 1);
  return values.map((value, index) => [index, value]).filter(([, value]) => value !== null)
    .map(([index, value], at) => `${at ? "L" : "M"}${(index * step).toFixed(1)},${(height - ((value - low) / span) * height).toFixed(1)}`).join("");
}
