"use strict";

const COLOURS = [
  "#3f6fe0", "#e8a317", "#e5573f", "#2fa39a", "#7a4fd0", "#4fa83d", "#d9569b", "#8f6a4e", "#5aa9e6", "#8c93a3",
];
const SPARSE = 20; // up to this many points are drawn as dots and never smoothed
const FONT = "11px system-ui, sans-serif";
const WHOLE = Array.from({ length: 40 }, (_, power) => [1, 2, 5][power % 3] * 10 ** Math.floor(power / 3)); // integer tick increments
const AXIS_NAMES = { step: "step", tokens: "tokens", seconds: "seconds of training" };
const AXES = ["x", "y"].map((scale) => ({ scale, auto: true }));
const [LINE, DOTS] = [uPlot.paths.linear(), uPlot.paths.points()];

function colour(number, count, dark) {
  if (count <= COLOURS.length) return COLOURS[number];
  return `hsl(${(number * 137.508) % 360} 60% ${(number % 2 ? 56 : 44) + (dark ? 14 : 0)}%)`;
}

function floats(text) {
  return new Float32Array(Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0)).buffer);
}

function decoded(curve) {
  const steps = floats(curve.steps), means = floats(curve.means);
  const [low, high] = [curve.low, curve.high].map((text) => (text ? floats(text) : null));
  return { run: curve.run, steps, means, low, high };
}

/** Return the exponential moving average with bias correction. */
function smooth(values, weight) {
  if (!weight || values.length <= SPARSE) return values;
  let sum = 0, total = 0;
  return values.map((value) => {
    sum = weight * sum + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return sum / total;
  });
}

/** Return the index of the nearest step. */
function nearest(steps, step) {
  let low = 0, high = steps.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (steps[middle] < step) low = middle;
    else high = middle;
  }
  return step - steps[low] <= steps[high] - step ? low : high;
}

/** Return the values of a line at ``steps``; its first and last pieces are extended, and one point is joined to zero. */
function along(line, steps) {
  const [x, y] = [line.steps, line.means], last = Math.max(x.length - 2, 0);
  let piece = 0;
  return Float64Array.from(steps, (step) => {
    while (piece < last && x[piece + 1] < step) piece++;
    const slope = x.length > 1 ? (y[piece + 1] - y[piece]) / (x[piece + 1] - x[piece]) : y[0] / x[0];
    return Math.max(y[piece] + slope * (step - x[piece]), 0);
  });
}

/** Replace values that have no logarithm by undefined. */
function positive(values) {
  return Array.from(values, (value) => (value > 0 ? value : undefined));
}

/** Return the filled area of a closed line. */
function area(...line) {
  const { stroke, ...rest } = LINE(...line);
  return { ...rest, stroke: null, fill: stroke };
}

class Chart {
  constructor(spec, state, root) {
    this.key = spec.key;
    this.state = state;
    this.curves = spec.curves.map(decoded);
    this.log = false;
    this.tip = make("div", { className: "tip", hidden: true });
    this.over = make("canvas");
    this.button = make("button", { type: "button", textContent: "log" });
    this.button.onclick = () => this.useLog(!this.log);
    this.plot = make("div", { className: "plot" });
    const note = make("span", { className: "soft", textContent: spec.note ?? "" });
    const head = make("div", { className: "head" }, make("b", { textContent: `${this.key} ` }, note), this.button);
    root.append(make("div", { className: "chart" }, head, this.plot));
  }

  useLog(log) {
    this.log = log;
    this.button.setAttribute("aria-pressed", log);
    this.draw();
  }

  /** Return the curves of the selected runs, along the chosen axis, smoothed and cut to the zoomed range. */
  visible() {
    const [from, to] = this.state.zoom || [-Infinity, Infinity];
    return this.curves.filter((curve) => this.state.selected.has(curve.run) && this.state.along(curve)).map((curve) => {
      const places = this.state.along(curve);
      let first = 0, last = places.length;
      while (first < last - 1 && places[first + 1] < from) first++;
      while (last > first + 1 && places[last - 2] > to) last--;
      const cut = (values) => values && values.subarray(first, last);
      const [steps, low, high] = [places, curve.low, curve.high].map(cut);
      const [raw, means] = [curve.means, smooth(curve.means, this.state.smoothing)].map(cut)
        .map(this.log ? positive : (values) => values);
      return { run: curve.run, steps, raw, low, high, means };
    });
  }

  draw() {
    this.uplot?.destroy();
    this.uplot = null;
    this.shown = this.visible();
    this.tip.hidden = true;
    this.plot.replaceChildren();
    if (!this.shown.length) {
      this.plot.append(make("p", { className: "soft", textContent: "none of the runs that are shown" }));
      return;
    }
    const lines = this.lines();
    this.uplot = new uPlot(this.options(lines.map((line) => line.series)), [null, ...lines.map((line) => line.data)], this.plot);
    this.listen(this.uplot.over);
  }

  /** Return the series for uPlot: areas between extremes, values before smoothing, curves. */
  lines() {
    const many = this.shown.length, found = [];
    for (const curve of this.shown) {
      const { steps, raw, low, high, means } = curve, stroke = this.state.colour(curve.run);
      const add = (x, y, options) => found.push({
        data: [x, y],
        series: { facets: AXES, paths: LINE, pxAlign: 0, stroke, points: { show: false }, ...options },
      });
      if (this.state.extremes && low) {
        add([...steps, ...[...steps].reverse()], [...high, ...[...low].reverse()], { paths: area, fill: stroke, alpha: 0.18 });
      }
      if (many < 12 && this.state.smoothing) add(steps, raw, { width: 1, alpha: 0.18 });
      const width = many < 12 ? 1.7 : 1;
      const points = { show: false, filter: () => curve.dots, size: 2 * width + 2, width: 0, fill: stroke };
      add(steps, means, { width, alpha: many < 50 ? 1 : 0.7, points });
      curve.place = found.length; // uPlot counts from 1
      curve.dots = steps.length > SPARSE ? null : [...steps.keys()];
    }
    return found;
  }

  options(series) {
    const { state } = this, { clientWidth: width, clientHeight: height } = this.plot;
    const axis = { stroke: state.style("--soft"), font: FONT, ticks: { show: false } };
    const grid = { stroke: state.style("--grid"), width: 1 };
    const steps = (_, low, high) => state.zoom ?? (low === high ? [low - 1, high + 1] : [low, high]);
    const log = { distr: 3, range: (_, low, high) => (low === null ? [1, 10] : uPlot.rangeLog(low, high, 10, false)) };
    const whole = (_, ticks) => ticks.map((tick) => (tick < 1e6 ? tick.toLocaleString("en") : number(tick, 3)));
    const zoom = ({ select: { left, width: wide }, posToVal }) =>
      state.zoomTo([left, left + wide].map((place) => posToVal(place, "x")));
    return {
      mode: 2,
      width,
      height,
      padding: [8, 22, 0, 0],
      legend: { show: false },
      series: [{}, ...series],
      scales: { x: { time: false, range: steps }, y: this.log ? log : {} },
      axes: [
        { ...axis, size: 26, space: 60, incrs: WHOLE, grid: { show: false }, values: whole },
        { ...axis, size: 54, grid, values: (_, ticks) => ticks.map((tick) => number(tick, 3)) },
      ],
      cursor: {
        y: false,
        points: { show: false },
        dataIdx: () => null,
        drag: { setScale: false, dist: 4 },
        sync: { key: "step", setSeries: false, scales: ["x", null] },
        bind: { dblclick: () => () => state.zoomTo(null) },
      },
      hooks: { setSelect: [zoom], draw: [() => this.overlay()] },
    };
  }

  listen(plot) {
    plot.append(this.over, this.tip);
    plot.onmousemove = (event) => this.state.point(this.closest(event));
    plot.onmouseleave = () => { this.tip.hidden = true; this.state.point(null); };
  }

  /** Redraw the curve of the run under the mouse with a thick line. */
  overlay() {
    if (!this.uplot) return;
    const { left, top, width, height } = this.uplot.bbox, pen = this.over.getContext("2d");
    Object.assign(this.over, { width, height });
    const curve = this.shown.find((one) => one.run === this.state.pointed);
    if (!curve || this.shown.length === 1) return;
    pen.translate(-left, -top);
    pen.strokeStyle = this.state.colour(curve.run);
    pen.lineWidth = 3 * uPlot.pxRatio;
    pen.lineJoin = "round";
    pen.stroke(LINE(this.uplot, curve.place, 0, curve.steps.length - 1).stroke);
    pen.fillStyle = pen.strokeStyle;
    if (curve.dots) pen.fill(DOTS(this.uplot, curve.place, 0, 0, curve.dots).fill);
  }

  /** Show the values of the curves nearest to the mouse and return the run of the nearest one. */
  closest(event) {
    const step = this.uplot.posToVal(event.offsetX, "x"), { min, max } = this.uplot.scales.x, slack = 0.02 * (max - min);
    const inside = ({ steps }) => step > steps[0] - slack && step < steps[steps.length - 1] + slack;
    const found = this.shown.filter(inside).map((curve) => {
      const index = nearest(curve.steps, step), value = curve.means[index];
      return { curve, index, value, away: Math.abs(this.uplot.valToPos(value, "y") - event.offsetY) };
    }).filter((one) => Number.isFinite(one.value)).sort((a, b) => a.away - b.away);
    const near = found.slice(0, 8).sort((a, b) => b.value - a.value);
    this.tip.hidden = !near.length;
    if (!near.length) return null;
    const rows = near.map(({ curve, index, value }) => {
      const [low, high] = curve.low ? [curve.low[index], curve.high[index]] : [value, value];
      const spread = high > low ? `${number(low)} … ${number(high)}` : "";
      const cells = [swatch(this.state.colour(curve.run)), this.state.name(curve.run), number(value), spread];
      return make("tr", { className: curve === found[0].curve ? "nearest" : "" }, ...cells.map((cell) => make("td", {}, cell)));
    });
    const more = found.length > near.length ? `, nearest ${near.length} of ${found.length}` : "";
    const at = Math.round(found[0].curve.steps[found[0].index]).toLocaleString("en");
    const where = make("div", { className: "soft", textContent: `${AXIS_NAMES[this.state.axis]} ${at}${more}` });
    this.tip.replaceChildren(where, make("table", {}, ...rows));
    const room = event.clientX + 14 + this.tip.offsetWidth < document.documentElement.clientWidth;
    const left = room ? event.offsetX + 14 : event.offsetX - this.tip.offsetWidth - 14;
    Object.assign(this.tip.style, { left: `${left}px`, top: "0px" });
    return found[0].curve.run;
  }
}
