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
  charts: [],
  table: null,
  pending: null,

  style: (name) => getComputedStyle(document.documentElement).getPropertyValue(name),
  colour(run) {
    const dark = document.documentElement.dataset.theme === "dark";
    return state.drawn.has(run) ? colour(state.drawn.get(run), state.drawn.size, dark) : null;
  },
  name(run) {
    const { number: label, overrides } = data.runs[run];
    const word = (key) => (key.includes(".") ? `${key.split(".").pop()}=${overrides[key]}` : overrides[key]);
    const words = data.columns.slice(0, 3).map((key) => overrides[key] && word(key));
    return alone ? "" : [label, ...words.filter(Boolean)].join(" · ");
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
    state.draw("overlay");
  },
  refresh() {
    state.table?.draw();
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

function byLoss() {
  return [...state.drawn.keys()].sort((a, b) => compare(data.runs[a].loss, data.runs[b].loss, 1));
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
  const counts = new Map(), best = finished().find((run) => known(data.runs[run].loss));
  for (const { status } of data.runs) counts.set(status, (counts.get(status) || 0) + 1);
  const found = [
    alone ? tile("run", data.runs[0].status, (data.runs[0].error || "").split("\n")[0])
      : tile("runs", data.runs.length, [...counts].map(([status, count]) => `${count} ${status}`).join(", ")),
  ];
  if (known(best)) {
    const loss = number(data.runs[best].loss);
    found.push(alone ? tile("loss", loss) : tile("best loss", loss, state.name(best), "tile wide"));
  }
  for (const [key, title] of SPEEDS) {
    const value = most(data.runs.map((run) => run.results[key]));
    if (Number.isFinite(value)) found.push(tile(title, number(value, 3), alone ? "at the end" : "the most of any run"));
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
      const value = typeof run.config[key] === "number" ? number(run.config[key], 6) : text(run.config[key]);
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
  const config = { ...data.common, ...run.config };
  if (run.folder && Object.keys(config).length) {
    parts.push(make("details", {}, make("summary", { textContent: "config.yaml" }), grid(config)));
  }
  at("one").replaceChildren(...parts);
}

function listen() {
  at("all").onclick = () => state.select(state.table.rows().map(({ index }) => index));
  at("none").onclick = () => state.select([]);
  at("best").onclick = () => state.select(finished().slice(0, 5));
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
  at("reset").onclick = () => state.zoomTo(null);
  at("which").onchange = (event) => choose(Number(event.target.value));
  at("theme").onclick = () => theme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");
  window.onresize = () => state.draw("draw");
}

function theme(name) {
  document.documentElement.dataset.theme = name;
  state.refresh();
}

function open() {
  document.title = `${data.title} · report`;
  at("title").textContent = data.title;
  const what = alone ? data.runs[0].folder : `${data.runs.length} runs`;
  at("subtitle").textContent = `${what} · page written ${data.written.replace("T", " ")}`;
  state.charts = data.charts.map((spec) => new Chart(spec, state, at("charts")));
  const sound = byLoss().filter((run) => data.runs[run].status !== "failed");
  state.selected = new Set((sound.length ? sound : byLoss()).slice(0, MOST_AT_FIRST));
  state.extremes = at("extremes").checked = state.drawn.size <= FEW;
  state.table = new RunTable(at("runs"), data, state);
  if (alone) at("heading").textContent = "Data and settings";
  at("results").hidden = at("which").hidden = alone;
  at("curves").hidden = !data.charts.length;
  at("which").append(...data.runs.map((_, index) => make("option", { value: index, textContent: `run ${state.name(index)}` })));
  tiles();
  failures();
  differences();
  choose(byLoss()[0] ?? 0);
  listen();
  theme(window.matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
}

open();
