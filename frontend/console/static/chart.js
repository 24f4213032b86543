// Line and stacked-area plots over the last minutes, on a canvas, with the numbers beside it as text.

import { make, setText } from "./dom.js";

const HEIGHT = 150;
const LEFT = 50;
const RIGHT = 10;
const TOP = 10;
const BOTTOM = 20;
const LEAST = 60; // seconds shown, and
const MOST = 300;

let hovered = null; // the time that the pointer is at, in whichever plot
const charts = new Set();

addEventListener("themechange", () => charts.forEach((chart) => chart.draw()));

export class Chart {
  /**
   * `series`: [{name, color (a custom property of the style sheet), value(sample)}]; `format` writes a value.
   * `stacked`: areas on top of each other. `top(samples)`: the least upper end of the axis.
   */
  constructor({ title, unit, series, format, stacked = false, top = () => 0 }) {
    Object.assign(this, { title, series, format, stacked, top });
    this.samples = [];
    this.values = series.map(() => make("b", {}, "–"));
    const legend = series.map(({ name, color }, at) =>
      make("span", { class: "key-item" }, make("i", { class: color }), `${name} `, this.values[at]),
    );
    this.canvas = make("canvas", { role: "img", "aria-label": title });
    this.element = make(
      "figure",
      { class: "panel chart" },
      make("figcaption", {}, make("h3", {}, title, make("small", {}, ` ${unit}`)), make("p", { class: "legend" }, ...legend)),
      this.canvas,
    );
    this.canvas.addEventListener("pointermove", (event) => hover(this.timeAt(event.offsetX)));
    this.canvas.addEventListener("pointerleave", () => hover(null));
    new ResizeObserver(() => this.draw()).observe(this.canvas);
    charts.add(this);
  }

  update(samples) {
    this.samples = samples;
    this.draw();
  }

  get end() {
    return this.samples.at(-1)?.time ?? 0;
  }

  /** Seconds shown: all there are, within bounds. */
  get span() {
    return Math.min(MOST, Math.max(LEAST, this.end - (this.samples[0]?.time ?? 0)));
  }

  timeAt(x) {
    return this.end - this.span * (1 - (x - LEFT) / (this.canvas.clientWidth - LEFT - RIGHT));
  }

  draw() {
    const width = this.canvas.clientWidth;
    if (!width) return;
    const scale = devicePixelRatio || 1;
    this.canvas.width = Math.round(width * scale);
    this.canvas.height = Math.round(HEIGHT * scale);
    const style = getComputedStyle(document.documentElement);
    this.color = (name) => style.getPropertyValue(`--${name}`).trim();
    const context = (this.context = this.canvas.getContext("2d"));
    context.scale(scale, scale);
    context.font = `11px ${getComputedStyle(document.body).fontFamily}`;
    const shown = this.samples.filter(({ time }) => time >= this.end - this.span);
    const points = shown.map((sample) => ({ time: sample.time, values: this.heights(sample) }));
    const largest = Math.max(this.top(shown), ...points.flatMap(({ values }) => values.filter((value) => value !== null)));
    const step = niceStep(largest / 3);
    this.limit = Math.max(step, Math.ceil(largest / step - 1e-9) * step);
    this.x = (time) => LEFT + (1 - (this.end - time) / this.span) * (width - LEFT - RIGHT);
    this.y = (value) => TOP + (1 - value / this.limit) * (HEIGHT - TOP - BOTTOM);
    this.axes(step, width);
    const order = this.series.map((_, at) => at);
    for (const at of this.stacked ? order.reverse() : order) this.plot(points, at);
    this.numbers(shown);
  }

  /** The y of each series in one sample; null where there is none. */
  heights(sample) {
    const values = this.series.map(({ value }) => value(sample) ?? null);
    if (!this.stacked || values.includes(null)) return this.stacked ? values.map(() => null) : values;
    let sum = 0;
    return values.map((value) => (sum += value));
  }

  axes(step, width) {
    const { context } = this;
    context.lineWidth = 1;
    context.strokeStyle = this.color("line");
    context.fillStyle = this.color("muted");
    context.textAlign = "right";
    context.textBaseline = "middle";
    for (let value = 0; value <= this.limit + step / 2; value += step) {
      const y = Math.round(this.y(value)) + 0.5;
      line(context, LEFT, y, width - RIGHT, y);
      context.fillText(value ? this.format(value) : "0", LEFT - 6, y);
    }
    context.textBaseline = "alphabetic";
    const gap = this.span > 180 ? 60 : this.span > 90 ? 30 : 15;
    for (let back = 0; back <= this.span; back += gap) {
      const x = this.x(this.end - back);
      context.textAlign = back === 0 ? "right" : x < LEFT + 15 ? "left" : "center";
      const text = gap === 60 ? `−${back / 60} min` : `−${back} s`;
      context.fillText(back ? text : "now", x, HEIGHT - 5);
    }
  }

  plot(points, at) {
    const { context } = this;
    const color = this.color(this.series[at].color);
    for (const run of runs(points, at)) {
      const path = new Path2D();
      run.forEach(({ time, values }, index) => path[index ? "lineTo" : "moveTo"](this.x(time), this.y(values[at])));
      if (run.length === 1) path.arc(this.x(run[0].time), this.y(run[0].values[at]), 1, 0, 7);
      if (this.stacked) {
        const area = new Path2D(path);
        area.lineTo(this.x(run.at(-1).time), this.y(0));
        area.lineTo(this.x(run[0].time), this.y(0));
        context.fillStyle = this.color("panel"); // covers the areas above it
        context.fill(area);
        context.globalAlpha = 0.55;
        context.fillStyle = color;
        context.fill(area);
        context.globalAlpha = 1;
      }
      context.strokeStyle = color;
      context.lineWidth = this.stacked ? 1 : 1.75;
      context.lineJoin = "round";
      context.stroke(path);
    }
  }

  /** Values under the pointer, or the newest ones. */
  numbers(shown) {
    let sample = shown.at(-1);
    if (hovered !== null && shown.length) {
      sample = shown.reduce((best, each) => (Math.abs(each.time - hovered) < Math.abs(best.time - hovered) ? each : best));
      const x = Math.round(this.x(sample.time)) + 0.5;
      this.context.strokeStyle = this.color("muted");
      this.context.lineWidth = 1;
      line(this.context, x, TOP, x, HEIGHT - BOTTOM);
    }
    const texts = this.series.map(({ value }) => this.format(sample && value(sample)));
    texts.forEach((text, at) => setText(this.values[at], text));
    if (hovered === null) {
      const said = this.series.map(({ name }, at) => `${name} ${texts[at]}`).join(", ");
      this.canvas.setAttribute("aria-label", `${this.title}: ${said}`);
    }
  }
}

function hover(time) {
  hovered = time;
  charts.forEach((chart) => chart.draw());
}

function line(context, x1, y1, x2, y2) {
  context.beginPath();
  context.moveTo(x1, y1);
  context.lineTo(x2, y2);
  context.stroke();
}

/** 1, 2 or 5 times a power of ten, at least `size`. */
function niceStep(size) {
  if (!(size > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(size));
  return [1, 2, 5, 10].find((factor) => factor * power >= size * 0.999) * power;
}

/** Stretches of points that have a value and follow each other without a pause. */
function* runs(points, at) {
  let run = [];
  for (const point of points) {
    const pause = run.length && point.time - run.at(-1).time > 5;
    if ((point.values[at] === null || pause) && run.length) {
      yield run;
      run = [];
    }
    if (point.values[at] !== null) run.push(point);
  }
  if (run.length) yield run;
}
