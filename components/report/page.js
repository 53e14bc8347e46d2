"use strict";

const MOST_AT_FIRST = 20; // runs whose curves are drawn when the page opens
const FEW = 4; // runs whose extremes are drawn from the start
const data = JSON.parse(document.getElementById("data").textContent);
const SPEEDS = [["perf/tokens_per_s", "tokens/s"], ["perf/peak_memory_gib", "memory, GiB"], ["perf/rss_gib", "memory, GiB"], ["perf/mfu", "MFU"]];
const alone = data.runs.length === 1;
const at = (id) => document.getElementById(id);

/** The selection and the run under the mouse; changes are drawn once per frame. */
const state = {
  selected: new Set(),
  pointed: null, // a run
  zoom: null,
  smoothing: 0,
  extremes: false,
  axis: "step",
  charts: [],
  table: null,
  pending: null,

  style: (name) => getComputedStyle(document.documentElement).getPropertyValue(name),
  colour(run) {
    const dark = document.documentElement.dataset.theme === "dark";
    return state.drawn.has(run) ? colour(state.drawn.get(run), state.drawn.size, dark) : null;
  },
  name: (run) => (alone ? "" : data.runs[run].name),
  /** Return the places of the points of a curve on the chosen axis, or null if the run does not say. */
  along(curve) {
    const { axis } = state, line = data.runs[curve.run].axes[axis];
    if (axis === "step") return curve.steps;
    return line ? (curve.places ??= {})[axis] ??= along(line, curve.steps) : null;
  },

  toggle(run) {
    if (!state.selected.delete(run)) state.selected.add(run);
    choose(run);
    state.refresh();
  },
  select(runs) {
    state.selected = new Set(runs);
    state.refresh();
  },
  zoomTo(part) {
    state.zoom = part;
    at("reset").hidden = part === null;
    state.refresh();
  },
  point(run) {
    state.pointed = run;
    for (const line of at("parallel").querySelectorAll("polyline")) {
      line.classList.toggle("pointed", line.dataset.run === String(run));
    }
    state.draw("overlay");
  },
  refresh() {
    state.table?.draw();
    at("sweep").hidden = !state.parallel?.draw();
    state.draw("draw");
    const shown = [...state.selected].filter((run) => state.drawn.has(run)).length;
    at("shown").textContent = `${shown} of ${data.runs.length} drawn below; click a row to draw or hide it`;
  },
  draw(what) {
    if (state.pending === "draw" || state.pending === what) return;
    if (state.pending === null) {
      requestAnimationFrame(() => {
        const asked = state.pending;
        state.pending = null;
        for (const chart of state.charts) chart[asked]();
      });
    }
    state.pending = what;
  },
};

/** Runs that have curves, in the order in which they get colours. */
state.drawn = new Map([...new Set(data.charts.flatMap((chart) => chart.curves.map((curve) => curve.run)))]
  .sort((a, b) => a - b).map((run, place) => [run, place]));

/** Return the runs with curves by group, because only losses of one group are comparable, and then by loss. */
function byLoss() {
  const order = groups(data.runs), place = (run) => order.indexOf(data.runs[run].group);
  return [...state.drawn.keys()].sort((a, b) => place(a) - place(b) || compare(data.runs[a].loss, data.runs[b].loss, 1));
}

/** Return the best completed runs of each group, at most ``count`` each. */
function best(count) {
  return groups(data.runs).flatMap((group) => finished().filter((run) => data.runs[run].group === group).slice(0, count));
}

/** Return the completed runs, because only these have a final loss; all runs if none is completed. */
function finished() {
  const completed = byLoss().filter((run) => data.runs[run].status === "completed");
  return completed.length ? completed : byLoss();
}

function tile(title, value, below = "", kind = "tile") {
  const soft = (words) => make("span", { className: "soft", textContent: words });
  return make("div", { className: kind }, soft(title), make("b", { textContent: value }), soft(below));
}

function tiles() {
  const known = (value) => value !== null && value !== undefined;
  const most = (values) => Math.max(...values.filter(known));
  const counts = new Map();
  for (const { status } of data.runs) counts.set(status, (counts.get(status) || 0) + 1);
  const found = [
    alone ? tile("run", data.runs[0].status, (data.runs[0].error || "").split("\n")[0])
      : tile("runs", data.runs.length, [...counts].map(([status, count]) => `${count} ${status}`).join(", ")),
  ];
  for (const run of best(1).filter((one) => known(data.runs[one].loss) && (alone || data.runs[one].ranked))) {
    const { loss, group } = data.runs[run], words = groups(data.runs).length > 1 ? `${state.name(run)}, ${group}` : state.name(run);
    found.push(alone ? tile("loss", number(loss)) : tile("best loss", number(loss), words, "tile wide"));
  }
  for (const [key, title] of SPEEDS) {
    const value = most(data.runs.map((run) => run.results[key]));
    const words = [key === "perf/mfu" ? `of ${data.mfu_peak}` : "", alone ? "at the end" : "the most of any run"];
    if (Number.isFinite(value)) found.push(tile(title, number(value, 3), words.filter(Boolean).join(", ")));
  }
  const steps = most(data.runs.map((run) => run.steps));
  if (Number.isFinite(steps)) found.push(tile("steps", steps.toLocaleString("en"), alone ? "" : "of the longest run"));
  at("tiles").replaceChildren(...found);
}

function title(words, more = "") {
  return make("div", { className: "bar" }, make("h2", { textContent: words }), make("span", { className: "soft", textContent: more }));
}

function failures() {
  const bad = ["failed", "invalid", "unfinished"].flatMap((status) =>
    data.runs.map((run, index) => ({ run, index })).filter(({ run }) => run.status === status));
  if (!bad.length) return;
  const shown = bad.map(({ run, index }, place) => {
    const silent = run.status === "unfinished" ? "Still running, or killed before it could say why." : "No error was written.";
    const what = run.error || silent;
    const [first, ...rest] = what.split("\n");
    const status = make("span", { className: `status ${run.status}`, textContent: run.status });
    const head = make("summary", {}, status, ` ${state.name(index)}  `, make("code", { textContent: first }));
    const logs = Object.entries(run.logs).flatMap(([name, words]) => [
      make("h3", { textContent: name }), make("pre", { textContent: words }),
    ]);
    if (rest.length) logs.unshift(make("pre", { textContent: rest.join("\n") }));
    return make("details", { className: "failure", open: place === 0 && logs.length > 0 }, head, ...logs);
  });
  at("failures").replaceChildren(title("What went wrong"), ...shown);
}

function differences() {
  const keys = [...new Set(data.runs.flatMap((run) => Object.keys(run.config)))];
  if (!keys.length) return;
  const rows = keys.map((key) => {
    const groups = new Map();
    for (const run of data.runs) {
      if (!run.folder || !(key in run.config)) continue;
      const value = setting(run.config[key]);
      groups.set(value, [...(groups.get(value) || []), run.number]);
    }
    const pairs = [...groups].map(([value, numbers]) => {
      const who = numbers.length > 8 ? `${numbers.length} runs` : numbers.join(", ");
      return make("span", { className: "pair" }, make("code", { textContent: value }),
        make("span", { className: "soft", textContent: `  ${who}` }));
    });
    return make("tr", {}, make("td", {}, make("code", { textContent: key })), make("td", { className: "words" }, ...pairs));
  });
  at("differences").replaceChildren(title("What differs", "values of the composed config, and the runs that have them"),
    make("div", { className: "scroll" }, make("table", {}, ...rows)));
}

/** Show the facts of one run. */
function choose(index) {
  const run = data.runs[index], parts = [];
  at("which").value = index;
  const said = [run.command, run.error].filter(Boolean);
  parts.push(...said.map((words) => make("pre", { className: "wrap", textContent: words })));
  if (run.missing.length) parts.push(make("p", { className: "soft", textContent: `Not there: ${run.missing.join("; ")}.` }));
  const tables = [data.documents[run.audit], run.facts, data.documents[run.preflight]];
  parts.push(grids(tables.flatMap((table) => Object.entries(table ?? {}))));
  const samples = (data.documents[run.samples] ?? []).map((pieces) =>
    make("pre", { className: "wrap" }, ...pieces.map(([words, trained]) => make(trained ? "mark" : "span", { textContent: words }))));
  if (samples.length) parts.push(make("h3", { textContent: "samples; the loss is computed on the highlighted tokens" }), ...samples);
  for (const [name, rows] of Object.entries(run.completions)) {
    const keys = [...new Set(rows.flatMap((row) => Object.keys(row)))];
    const cells = (tag, words) => make("tr", {}, ...words.map((value) => make(tag, { className: "words", textContent: value })));
    parts.push(make("h3", { textContent: name }), make("div", { className: "scroll" }, make("table", {},
      cells("th", keys), ...rows.map((row) => cells("td", keys.map((key) => text(row[key] ?? "")))))));
  }
  const config = { ...data.common, ...run.config };
  if (run.folder && Object.keys(config).length) {
    parts.push(make("details", {}, make("summary", { textContent: "config.yaml" }), grid(config)));
  }
  at("one").replaceChildren(...parts);
}

function listen() {
  at("all").onclick = () => state.select(state.table.rows().map(({ index }) => index));
  at("none").onclick = () => state.select([]);
  at("best").onclick = () => state.select(best(5));
  at("filter").oninput = (event) => { state.table.filter = event.target.value; state.table.draw(); };
  at("smoothing").oninput = (event) => {
    state.smoothing = Number(event.target.value);
    at("weight").textContent = event.target.value;
    state.draw("draw");
  };
  at("extremes").onchange = (event) => {
    state.extremes = event.target.checked;
    state.draw("draw");
  };
  at("axis").onchange = (event) => {
    state.axis = event.target.value;
    state.zoomTo(null);
  };
  at("metric").onchange = (event) => {
    state.parallel.metric = event.target.value;
    state.refresh();
  };
  at("reset").onclick = () => state.zoomTo(null);
  at("which").onchange = (event) => choose(Number(event.target.value));
  at("theme").onclick = () => theme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");
  window.onresize = () => state.draw("draw");
}

function theme(name) {
  document.documentElement.dataset.theme = name;
  state.refresh();
}

const KEPT = ["axis", "metric", "smoothing", "filter", "which"];

/** Load the page again, and keep what was chosen on it. */
function reload() {
  const kept = {
    runs: data.runs.length,
    selected: [...state.selected],
    zoom: state.zoom,
    values: KEPT.map((id) => at(id).value),
    logs: state.charts.filter((chart) => chart.log).map((chart) => chart.key),
    extremes: state.extremes,
    theme: document.documentElement.dataset.theme,
  };
  sessionStorage.setItem(data.title, JSON.stringify(kept));
  location.reload();
}

/** Choose what was chosen before the page was loaded again; runs that are new are drawn. */
function restore(kept) {
  const fresh = [...state.selected].filter((run) => run >= kept.runs);
  state.select([...kept.selected, ...fresh]);
  KEPT.forEach((id, place) => {
    at(id).value = kept.values[place];
    (at(id).oninput ?? at(id).onchange)({ target: at(id) });
  });
  for (const chart of state.charts) chart.useLog(kept.logs.includes(chart.key));
  state.extremes = at("extremes").checked = kept.extremes;
  theme(kept.theme);
  state.zoomTo(kept.zoom);
}

function open() {
  document.title = `${data.title} · report`;
  at("title").textContent = data.title;
  const what = alone ? data.runs[0].folder : `${data.runs.length} runs`;
  at("subtitle").textContent = `${what} · page written ${data.written.replace("T", " ")}`;
  state.charts = data.charts.map((spec) => new Chart(spec, state, at("charts")));
  for (const { axes } of data.runs) for (const name of Object.keys(axes)) axes[name] = decoded(axes[name]);
  const known = (axis) => axis === "step" || data.runs.some((run) => axis in run.axes);
  at("axis").append(...Object.keys(AXIS_NAMES).filter(known).map((value) => make("option", { value, textContent: AXIS_NAMES[value] })));
  const sound = byLoss().filter((run) => data.runs[run].status !== "failed");
  state.selected = new Set((sound.length ? sound : byLoss()).slice(0, MOST_AT_FIRST));
  state.extremes = at("extremes").checked = state.drawn.size <= FEW;
  state.table = new RunTable(at("runs"), data, state);
  state.parallel = new ParallelPlot(data, state, at("parallel"));
  at("metric").append(...state.parallel.metrics.map((value) => make("option", { value, textContent: value })));
  if (alone) at("heading").textContent = "Data and settings";
  at("results").hidden = at("which").hidden = alone;
  at("curves").hidden = !data.charts.length;
  at("which").append(...data.runs.map((_, index) => make("option", { value: index, textContent: state.name(index) })));
  tiles();
  failures();
  differences();
  choose(byLoss()[0] ?? 0);
  listen();
  theme(window.matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  if (!data.refresh) return;
  const kept = JSON.parse(sessionStorage.getItem(data.title));
  if (kept) restore(kept);
  setTimeout(reload, 1000 * data.refresh);
}

open();
