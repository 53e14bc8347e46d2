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

/** Return a value of a config as text; integers are exact, so that different ones never look equal. */
function setting(value) {
  return typeof value === "number" && !Number.isInteger(value) ? number(value, 6) : text(value);
}

function duration(seconds) {
  if (seconds === null || seconds === undefined) return "";
  const whole = Math.round(seconds), minutes = Math.floor(whole / 60);
  if (!minutes) return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
  return minutes < 60 ? `${minutes} min ${whole % 60} s` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

/** Return a number with fixed decimals, so that those of a column are aligned. */
function fixed(value, decimals) {
  if (typeof value !== "number" || Math.abs(value) >= 1e7 || (value && Math.abs(value) < 0.1 ** decimals)) return number(value);
  return value.toLocaleString("en", { minimumFractionDigits: decimals, maximumFractionDigits: decimals });
}

function isNumber(value) {
  return ![null, undefined, ""].includes(value) && Number.isFinite(Number(value));
}

/** Return the groups of runs with comparable losses, those without a loss last. */
function groups(runs) {
  const lossless = (group) => runs.every((run) => run.group !== group || run.loss === null);
  return [...new Set(runs.map((run) => run.group))].sort((a, b) => lossless(a) - lossless(b));
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
    const right = (key) => (section.some((row) => typeof row[key] === "number") ? "right" : "");
    const head = make("tr", {}, ...keys.map((key) => make("th", { className: right(key), textContent: key })));
    const body = section.map((row) => make("tr", {}, ...keys.map((key) => make("td", { className: right(key), textContent: cell(row[key]) }))));
    return make("table", {}, make("thead", {}, head), make("tbody", {}, ...body));
  }
  if (section && typeof section === "object" && !Array.isArray(section)) {
    const right = Object.values(section).every((value) => typeof value === "number") ? "right" : "words";
    const rows = Object.entries(section).map(([key, value]) =>
      make("tr", {}, make("td", { className: "soft", textContent: key }), make("td", { className: right, textContent: cell(value) })));
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
    const overrides = data.columns.map((key) => {
      const value = (run) => run.overrides[key];
      return { title: key, value, aligned: data.runs.every((run) => [null, undefined].includes(value(run)) || isNumber(value(run))) };
    });
    this.groups = groups(data.runs);
    this.columns = [
      { title: "", value: (run) => run.number, aligned: true },
      { title: "run", value: (run) => run.name },
      { title: "status", value: (run) => run.status },
      ...overrides,
      { title: "loss", value: (run) => run.loss, decimals: 4, best: Math.min },
      { title: "train/loss", value: result("train/loss"), decimals: 4 },
      { title: "steps", value: (run) => run.steps, decimals: 0 },
      { title: "tokens/s", value: result("perf/tokens_per_s"), decimals: 0 },
      { title: "GiB", value: result("perf/peak_memory_gib", "perf/rss_gib"), decimals: 2 },
      { title: "time", value: (run) => run.seconds, show: duration, aligned: true },
    ].filter((column) => column.title === "run" || data.runs.some((run) => ![null, undefined].includes(column.value(run))));
    this.sort(this.columns.find((column) => column.title === "loss") || this.columns[0]);
  }

  sort(column) {
    this.direction = column === this.by ? -this.direction : 1;
    this.by = column;
    this.draw();
  }

  /** Return the runs that match the filter, in the order of the table: groups of comparable losses are not mixed. */
  rows() {
    const words = this.filter.toLowerCase().split(/\s+/).filter(Boolean);
    const known = (run) => this.columns.map((column) => `${column.title}=${text(column.value(run))}`).join(" ").toLowerCase();
    return this.data.runs
      .map((run, index) => ({ run, index }))
      .filter(({ run }) => words.every((word) => known(run).includes(word)))
      .sort((a, b) => this.groups.indexOf(a.run.group) - this.groups.indexOf(b.run.group)
        || compare(this.by.value(a.run), this.by.value(b.run), this.direction) || a.index - b.index);
  }

  draw() {
    const head = this.columns.map((column) => {
      const th = make("th", { textContent: column.title, className: this.place(column), onclick: () => this.sort(column) });
      if (column === this.by) th.setAttribute("aria-sort", this.direction > 0 ? "ascending" : "descending");
      return th;
    });
    const rows = this.rows();
    const body = this.groups.flatMap((group) => {
      const own = rows.filter(({ run }) => run.group === group), best = this.best(group);
      const title = make("th", { colSpan: this.columns.length, textContent: group });
      const found = own.map(({ run, index }) => this.row(run, index, best));
      return own.length && this.groups.length > 1 ? [make("tr", { className: "group" }, title), ...found] : found;
    });
    this.table.replaceChildren(make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...body));
  }

  place(column) {
    return column.aligned || column.decimals !== undefined ? "right" : "";
  }

  /** Return the best value of each column among the completed runs of a group, if that is known to be comparable. */
  best(group) {
    return new Map(this.columns.filter((column) => column.best).map((column) => {
      const values = this.data.runs.filter((run) => run.group === group && run.ranked && run.status === "completed")
        .map(column.value).filter((value) => typeof value === "number");
      return [column, values.length > 1 ? column.best(...values) : null];
    }));
  }

  row(run, index, best) {
    const chosen = this.state.selected.has(index);
    const cells = this.columns.map((column, place) => {
      const value = column.value(run);
      const shown = column.show ? column.show(value) : column.decimals !== undefined ? fixed(value, column.decimals) : text(value);
      const td = make("td", { className: this.place(column) });
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
