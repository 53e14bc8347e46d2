"use strict";

const COLOURS = [
  "#3f6fe0", "#e8a317", "#e5573f", "#2fa39a", "#7a4fd0", "#4fa83d", "#d9569b", "#8f6a4e", "#5aa9e6", "#8c93a3",
];
const SPARSE = 20; // points, which are drawn one by one and never smoothed
const MARGIN = { left: 54, right: 22, top: 8, bottom: 24 };

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

/** Exponential mean with the bias of its start taken off. */
function smooth(values, weight) {
  if (!weight || values.length <= SPARSE) return values;
  let sum = 0, total = 0;
  return values.map((value) => {
    sum = weight * sum + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return sum / total;
  });
}

/** The index whose step is nearest. */
function nearest(steps, step) {
  let low = 0, high = steps.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (steps[middle] < step) low = middle;
    else high = middle;
  }
  return step - steps[low] <= steps[high] - step ? low : high;
}

function ticks(from, to, count) {
  const rough = (to - from) / count || 1, power = 10 ** Math.floor(Math.log10(rough));
  const width = [1, 2, 5, 10].find((factor) => factor * power >= rough) * power;
  const found = [];
  for (let index = Math.ceil(from / width - 1e-9); index * width <= to + width * 1e-9; index++) {
    found.push(index * width);
  }
  return found;
}

/** Where the range of a logarithm has few powers of ten, 2 and 5 times them as well. */
function logTicks(from, to) {
  const factors = to - from > 2.5 ? [1] : [1, 2, 5], found = [];
  for (let power = Math.floor(from); power <= Math.ceil(to); power++) {
    for (const factor of factors) found.push(Math.log10(factor * 10 ** power));
  }
  const inside = found.filter((value) => value >= from && value <= to);
  return inside.length > 1 ? inside : ticks(from, to, 4);
}

class Chart {
  constructor(spec, state, root) {
    this.key = spec.key;
    this.state = state;
    this.curves = spec.curves.map(decoded);
    this.log = false;
    this.base = make("canvas");
    this.over = make("canvas");
    this.tip = make("div", { className: "tip", hidden: true });
    const log = make("button", { type: "button", textContent: "log" });
    log.onclick = () => {
      this.log = !this.log;
      log.setAttribute("aria-pressed", this.log);
      this.draw();
    };
    this.plot = make("div", { className: "plot" }, this.base, this.over, this.tip);
    const head = make("div", { className: "head" }, make("b", { textContent: this.key }), log);
    root.append(make("div", { className: "chart" }, head, this.plot));
    this.listen();
  }

  listen() {
    const step = (event) => this.from.x + ((event.offsetX - MARGIN.left) / this.width) * (this.to.x - this.from.x);
    let start = null;
    this.over.onmousedown = (event) => { start = step(event); };
    this.over.onmousemove = (event) => {
      if (!this.from) return;
      this.state.point(step(event), this.closest(event, step(event)), start === null ? null : [start, step(event)]);
    };
    this.over.onmouseup = (event) => {
      const ends = [start, step(event)].sort((a, b) => a - b);
      if (start !== null && ends[1] - ends[0] > 0.01 * (this.to.x - this.from.x)) this.state.zoomTo(ends);
      start = null;
    };
    this.over.onmouseleave = () => { start = null; this.tip.hidden = true; this.state.point(null, null, null); };
    this.over.ondblclick = () => this.state.zoomTo(null);
  }

  /** Curves of the runs that are shown, smoothed, with what lies in the zoomed part alone. */
  visible() {
    const [from, to] = this.state.zoom || [-Infinity, Infinity];
    return this.curves.filter((curve) => this.state.selected.has(curve.run)).map((curve) => {
      let first = 0, last = curve.steps.length;
      while (first < last - 1 && curve.steps[first + 1] < from) first++;
      while (last > first + 1 && curve.steps[last - 2] > to) last--;
      const cut = (values) => values && values.subarray(first, last);
      const [steps, raw, low, high] = [curve.steps, curve.means, curve.low, curve.high].map(cut);
      return { run: curve.run, steps, raw, low, high, means: cut(smooth(curve.means, this.state.smoothing)) };
    });
  }

  scale(value) { return this.log ? (value > 0 ? Math.log10(value) : NaN) : value; }
  x(step) { return MARGIN.left + ((step - this.from.x) / (this.to.x - this.from.x)) * this.width; }
  y(value) { return MARGIN.top + (1 - (this.scale(value) - this.from.y) / (this.to.y - this.from.y)) * this.height; }

  /** Sets the ranges of both axes to what is to be seen. */
  fit() {
    const range = { x: [Infinity, -Infinity], y: [Infinity, -Infinity] };
    const widen = (axis, value) => {
      if (!Number.isFinite(value)) return;
      if (value < range[axis][0]) range[axis][0] = value;
      if (value > range[axis][1]) range[axis][1] = value;
    };
    for (const curve of this.shown) {
      curve.steps.forEach((step) => widen("x", step));
      const extremes = this.state.extremes ? [curve.low, curve.high] : [];
      for (const values of [curve.means, ...extremes]) values?.forEach((value) => widen("y", this.scale(value)));
    }
    if (this.state.zoom) range.x = [...this.state.zoom];
    if (range.x[0] === range.x[1]) range.x = [range.x[0] - 1, range.x[1] + 1];
    const room = (range.y[1] - range.y[0]) * 0.05 || Math.abs(range.y[0]) * 0.1 || 1;
    this.from = { x: range.x[0], y: range.y[0] - room };
    this.to = { x: range.x[1], y: range.y[1] + room };
  }

  prepare(canvas) {
    const ratio = window.devicePixelRatio || 1, { clientWidth, clientHeight } = this.plot;
    canvas.width = clientWidth * ratio;
    canvas.height = clientHeight * ratio;
    const pen = canvas.getContext("2d");
    pen.scale(ratio, ratio);
    this.width = clientWidth - MARGIN.left - MARGIN.right;
    this.height = clientHeight - MARGIN.top - MARGIN.bottom;
    return pen;
  }

  draw() {
    const pen = this.prepare(this.base);
    this.shown = this.visible();
    const many = this.shown.length;
    this.from = this.to = null;
    if (!this.shown.length) {
      pen.fillStyle = this.state.style("--soft");
      pen.fillText("none of the runs that are shown", MARGIN.left, this.height / 2);
      return;
    }
    this.fit();
    this.axes(pen);
    this.clip(pen);
    for (const curve of this.shown) {
      pen.strokeStyle = pen.fillStyle = this.state.colour(curve.run);
      pen.globalAlpha = 0.18;
      if (this.state.extremes && curve.low) this.band(pen, curve);
      if (many < 12 && this.state.smoothing) this.line(pen, curve.steps, curve.raw, 1);
      pen.globalAlpha = many < 50 ? 1 : 0.7;
      this.line(pen, curve.steps, curve.means, many < 12 ? 1.7 : 1);
    }
    this.overlay();
  }

  clip(pen) {
    pen.beginPath();
    pen.rect(MARGIN.left - 4, MARGIN.top - 4, this.width + 8, this.height + 8);
    pen.clip();
  }

  axes(pen) {
    pen.font = "11px system-ui, sans-serif";
    pen.strokeStyle = this.state.style("--grid");
    pen.fillStyle = this.state.style("--soft");
    pen.textAlign = "right";
    pen.textBaseline = "middle";
    for (const tick of this.log ? logTicks(this.from.y, this.to.y) : ticks(this.from.y, this.to.y, 5)) {
      const value = this.log ? 10 ** tick : tick, y = this.y(value);
      pen.beginPath();
      pen.moveTo(MARGIN.left, y);
      pen.lineTo(MARGIN.left + this.width, y);
      pen.stroke();
      pen.fillText(number(value, 3), MARGIN.left - 6, y);
    }
    pen.textAlign = "center";
    pen.textBaseline = "top";
    for (const tick of ticks(this.from.x, this.to.x, 5)) {
      if (Number.isInteger(tick)) pen.fillText(tick.toLocaleString("en"), this.x(tick), MARGIN.top + this.height + 7);
    }
  }

  line(pen, steps, values, width) {
    pen.lineWidth = width;
    pen.lineJoin = "round";
    pen.beginPath();
    steps.forEach((step, index) => {
      const y = this.y(values[index]);
      if (Number.isFinite(y)) pen.lineTo(this.x(step), y);
    });
    pen.stroke();
    if (steps.length > SPARSE) return;
    steps.forEach((step, index) => {
      pen.beginPath();
      pen.arc(this.x(step), this.y(values[index]), width + 1, 0, 7);
      pen.fill();
    });
  }

  band(pen, curve) {
    const floor = MARGIN.top + this.height;
    const at = (value) => { const y = this.y(value); return Number.isFinite(y) ? y : floor; };
    pen.beginPath();
    curve.steps.forEach((step, index) => pen.lineTo(this.x(step), at(curve.high[index])));
    for (let index = curve.steps.length - 1; index >= 0; index--) {
      pen.lineTo(this.x(curve.steps[index]), at(curve.low[index]));
    }
    pen.fill();
  }

  /** What follows the mouse: the step in every chart, the run it is at, the part to zoom into. */
  overlay() {
    const pen = this.prepare(this.over), { step, run, part } = this.state.pointer;
    if (!this.from) return;
    this.clip(pen);
    if (part) {
      pen.fillStyle = this.state.style("--accent");
      pen.globalAlpha = 0.15;
      pen.fillRect(this.x(part[0]), MARGIN.top, this.x(part[1]) - this.x(part[0]), this.height);
      pen.globalAlpha = 1;
    }
    const curve = this.shown.find((one) => one.run === run);
    if (curve && this.shown.length > 1) {
      pen.strokeStyle = pen.fillStyle = this.state.colour(run);
      this.line(pen, curve.steps, curve.means, 3);
    }
    if (step === null) return;
    pen.strokeStyle = this.state.style("--soft");
    pen.lineWidth = 1;
    pen.beginPath();
    pen.moveTo(this.x(step), MARGIN.top);
    pen.lineTo(this.x(step), MARGIN.top + this.height);
    pen.stroke();
  }

  /** The run whose curve is nearest to the mouse; shows the values of the nearest ones. */
  closest(event, step) {
    const slack = 0.02 * (this.to.x - this.from.x);
    const inside = ({ steps }) => step > steps[0] - slack && step < steps[steps.length - 1] + slack;
    const found = this.shown.filter(inside).map((curve) => {
      const index = nearest(curve.steps, step), value = curve.means[index];
      return { curve, index, value, away: Math.abs(this.y(value) - event.offsetY) };
    }).filter((one) => Number.isFinite(one.away)).sort((a, b) => a.away - b.away);
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
    this.tip.replaceChildren(make("div", { className: "soft", textContent: `step ${at}${more}` }), make("table", {}, ...rows));
    const room = event.clientX + 14 + this.tip.offsetWidth < document.documentElement.clientWidth;
    const left = room ? event.offsetX + 14 : event.offsetX - this.tip.offsetWidth - 14;
    Object.assign(this.tip.style, { left: `${left}px`, top: `${MARGIN.top}px` });
    return found[0].curve.run;
  }
}
