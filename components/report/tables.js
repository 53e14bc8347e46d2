"use strict";

const UNITS = [["T", 1e12], ["G", 1e9], ["M", 1e6]];
const LONG = 25; // tables with more rows are folded

/** Return an element with properties and children; text is not parsed as HTML. */
function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

function swatch(colour, filled = true) {
  const element = make("span", { className: "swatch" });
  if (colour) element.style.borderColor = colour;
  if (colour && filled) element.style.background = colour;
  return element;
}

function number(value, digits = 5) {
  if (value === null || value === undefined) return "";
  if (typeof value !== "number") return text(value);
  const size = Math.abs(value);
  const [unit, factor] = UNITS.find((one) => size >= one[1]) || [];
  if (unit) return `${Number((value / factor).toPrecision(3))}${unit}`;
  if (size >= 1e4) return Math.round(value).toLocaleString("en");
  if (size && size < 1e-3) return value.toExponential(digits > 5 ? digits - 1 : 2).replace(/\.?0+e/, "e");
  return String(Number(value.toPrecision(digits)));
}

function text(value) {
  if (value === null || value === undefined) return "–";
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}

function duration(seconds) {
  if (seconds === null || seconds === undefined) return "";
  if (seconds < 60) return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
  const minutes = Math.floor(seconds / 60);
  return minutes < 60 ? `${minutes} min ${Math.round(seconds % 60)} s` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

/** Compare numbers by size and texts alphabetically; missing values come last in both directions. */
function compare(a, b, direction) {
  const missing = (value) => value === null || value === undefined || value === "";
  if (missing(a) || missing(b)) return missing(a) - missing(b);
  const numbers = [Number(a), Number(b)];
  if (numbers.every((one) => !Number.isNaN(one))) return direction * (numbers[0] - numbers[1]);
  return direction * String(a).localeCompare(String(b), "en", { numeric: true });
}

/** Return a mapping as a table of two columns, or a list of rows as a table with a column per key. */
function grid(section) {
  if (Array.isArray(section) && section.length && section.every((row) => row && typeof row === "object")) {
    const keys = [...new Set(section.flatMap((row) => Object.keys(row)))];
    const right = (key) => (section.every((row) => typeof row[key] !== "string") ? "right" : "");
    const head = make("tr", {}, ...keys.map((key) => make("th", { className: right(key), textContent: key })));
    const body = section.map((row) => make("tr", {}, ...keys.map((key) => make("td", { className: right(key), textContent: cell(row[key]) }))));
    return make("table", {}, make("thead", {}, head), make("tbody", {}, ...body));
  }
  if (section && typeof section === "object" && !Array.isArray(section)) {
    const rows = Object.entries(section).map(([key, value]) =>
      make("tr", {}, make("td", { className: "soft", textContent: key }), make("td", { className: "words", textContent: cell(value) })));
    return make("table", {}, ...rows);
  }
  return make("pre", { textContent: JSON.stringify(section, null, 2) });
}

function cell(value) {
  if (typeof value !== "number") return text(value);
  return Number.isInteger(value) && Math.abs(value) < 1e8 ? value.toLocaleString("en") : number(value);
}

/** Return named tables side by side; long ones are folded. */
function grids(sections) {
  return make("div", { className: "columns" }, ...sections.map(([name, section]) => {
    const title = name.replaceAll("_", " "), rows = Object.keys(section ?? {}).length;
    if (rows <= LONG) return make("div", {}, make("h3", { textContent: title }), grid(section));
    return make("details", {}, make("summary", { textContent: `${title} (${rows})` }), grid(section));
  }));
}

class RunTable {
  constructor(table, data, state) {
    Object.assign(this, { table, data, state, filter: "", by: null, direction: 1 });
    const result = (...keys) => (run) => run.results[keys.find((key) => key in run.results)];
    const overrides = data.columns.map((key) => ({ title: key, value: (run) => run.overrides[key] }));
    this.columns = [
      { title: "run", value: (run) => run.number },
      { title: "status", value: (run) => run.status },
      ...overrides,
      { title: "loss", value: (run) => run.loss, digits: 5, numeric: true, best: Math.min },
      { title: "train/loss", value: result("train/loss"), numeric: true },
      { title: "steps", value: (run) => run.steps, numeric: true },
      { title: "tokens/s", value: result("perf/tokens_per_s"), numeric: true },
      { title: "GiB", value: result("perf/peak_memory_gib", "perf/rss_gib"), numeric: true, digits: 3 },
      { title: "time", value: (run) => run.seconds, show: duration, numeric: true },
    ].filter((column) => column.title === "run" || data.runs.some((run) => ![null, undefined].includes(column.value(run))));
    this.sort(this.columns.find((column) => column.title === "loss") || this.columns[0]);
  }

  sort(column) {
    this.direction = column === this.by ? -this.direction : 1;
    this.by = column;
    this.draw();
  }

  /** Return the runs that match the filter, in the order of the table. */
  rows() {
    const words = this.filter.toLowerCase().split(/\s+/).filter(Boolean);
    const known = (run) => this.columns.map((column) => `${column.title}=${text(column.value(run))}`).join(" ").toLowerCase();
    return this.data.runs
      .map((run, index) => ({ run, index }))
      .filter(({ run }) => words.every((word) => known(run).includes(word)))
      .sort((a, b) => compare(this.by.value(a.run), this.by.value(b.run), this.direction) || a.index - b.index);
  }

  draw() {
    const head = this.columns.map((column) => {
      const th = make("th", { textContent: column.title, className: column.numeric ? "right" : "", onclick: () => this.sort(column) });
      if (column === this.by) th.setAttribute("aria-sort", this.direction > 0 ? "ascending" : "descending");
      return th;
    });
    const best = new Map(this.columns.filter((column) => column.best).map((column) => {
      const values = this.data.runs.filter((run) => run.status === "completed").map(column.value)
        .filter((value) => typeof value === "number");
      return [column, values.length > 1 ? column.best(...values) : null];
    }));
    const body = this.rows().map(({ run, index }) => this.row(run, index, best));
    this.table.replaceChildren(make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...body));
  }

  row(run, index, best) {
    const chosen = this.state.selected.has(index);
    const cells = this.columns.map((column, place) => {
      const value = column.value(run);
      const shown = column.show ? column.show(value) : column.numeric ? number(value, column.digits) : text(value);
      const td = make("td", { className: column.numeric ? "right" : "" });
      if (place === 0) td.append(swatch(this.state.colour(index), chosen), " ");
      if (column.title === "status") td.append(make("span", { className: `status ${run.status}`, textContent: shown }));
      else td.append(shown);
      if (best.has(column) && value === best.get(column)) td.classList.add("best");
      return td;
    });
    const tr = make("tr", { className: chosen ? "selected" : "", onclick: () => this.state.toggle(index) }, ...cells);
    tr.onmouseenter = () => this.state.point(index);
    tr.onmouseleave = () => this.state.point(null);
    tr.dataset.run = index;
    return tr;
  }
}
