"use strict";

const [GAP, HEIGHT, EDGE] = [240, 240, 34]; // pixels: between axes, of the plot, above and below the axes
const WIDE = 10; // positive numbers over a larger ratio have a logarithmic axis

/** Return an element of SVG with attributes and children. */
function svg(tag, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** Return the ticks of an axis, and the height (0 to 1) of each value on it. Values that are not all numbers are sorted. */
function scale(values) {
  const ticks = [...new Set(values)].sort((a, b) => compare(a, b, 1)), last = ticks.length - 1;
  if (!last) return { ticks, height: () => 0.5 };
  const numbers = ticks.map(Number);
  if (!numbers.every(Number.isFinite)) return { ticks, height: (value) => ticks.indexOf(value) / last };
  const bend = numbers[0] > 0 && numbers[last] / numbers[0] >= WIDE ? Math.log : (value) => value;
  const [low, high] = [numbers[0], numbers[last]].map(bend);
  return { ticks, height: (value) => (bend(Number(value)) - low) / (high - low || 1) };
}

/** Lines of runs through an axis for each override that differs, and one for a final metric on the right. */
class ParallelPlot {
  constructor(data, state, root) {
    Object.assign(this, { data, state, root, metric: "loss" });
    this.metrics = ["loss", ...new Set(data.runs.flatMap((run) => Object.keys(run.results)))]
      .filter((key) => key === "loss" || /^eval\/|^train\/loss$/.test(key));
  }

  setting(run, key) {
    return text(run.overrides[key] ?? run.config[key] ?? this.data.common[key]);
  }

  /** Return the groups of comparable runs with their axes; without those in which no override differs. */
  plots() {
    const final = (run) => (this.metric === "loss" ? run.loss : run.results[this.metric]);
    return groups(this.data.runs).map((group) => {
      const runs = [...this.data.runs.keys()].filter((index) => {
        const run = this.data.runs[index];
        return run.group === group && run.ranked && typeof final(run) === "number";
      });
      const axis = (title, value) => ({ title, values: runs.map((index) => value(this.data.runs[index])) });
      const axes = this.data.columns.map((key) => axis(key, (run) => this.setting(run, key)))
        .filter(({ values }) => new Set(values).size > 1);
      return { group, runs, axes: [...axes, axis(this.metric, final)] };
    }).filter(({ axes }) => axes.length > 1);
  }

  draw() {
    const plots = this.plots();
    this.root.replaceChildren(...plots.flatMap((plot) => [
      make("h3", { textContent: plot.group }), make("div", { className: "scroll" }, this.picture(plot)),
    ]));
    return plots.length > 0;
  }

  picture({ runs, axes }) {
    const width = GAP * axes.length, scales = axes.map(({ values }) => scale(values));
    const x = (place) => GAP * (place + 0.5), y = (height) => HEIGHT - EDGE - height * (HEIGHT - 2 * EDGE);
    const lines = runs.map((index, row) => {
      const points = axes.map(({ values }, place) => `${x(place)},${y(scales[place].height(values[row]))}`).join(" ");
      const name = svg("title", {}, this.state.name(index)), chosen = this.state.selected.has(index);
      const stroke = (chosen && this.state.colour(index)) || "var(--soft)";
      const line = svg("polyline", { points, stroke, "data-run": index, opacity: chosen ? 1 : 0.3 }, name);
      line.onmouseenter = () => this.state.point(index);
      line.onmouseleave = () => this.state.point(null);
      line.onclick = () => this.state.toggle(index);
      return line;
    });
    const labels = axes.flatMap(({ title }, place) => {
      const bar = svg("line", { x1: x(place), x2: x(place), y1: y(0), y2: y(1) });
      let above = Infinity;
      const ticks = scales[place].ticks.flatMap((value) => {
        const at = y(scales[place].height(value));
        if (above - at < 12) return []; // would cover the last one
        above = at;
        return [svg("text", { x: x(place) + (place ? 6 : -6), y: at + 4, "text-anchor": place ? "start" : "end" }, number(value, 4))];
      });
      return [bar, svg("text", { x: x(place), y: 14, "text-anchor": "middle", class: "title" }, title), ...ticks];
    });
    return svg("svg", { width, height: HEIGHT, class: "parallel" }, ...lines, ...labels);
  }
}
