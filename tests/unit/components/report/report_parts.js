// Opens a report page in node, on elements that only remember what they were given, and prints what it shows.
// The plots of uPlot are replaced by their inputs; test_report_browser.py draws them.
const vm = require("node:vm"), fs = require("node:fs");

class Element {
  constructor(tag) {
    Object.assign(this, { tag, children: [], dataset: {}, style: {}, attributes: {}, words: "", className: "", hidden: false, value: "" });
    this.classList = { add: (name) => { this.className += ` ${name}`; }, toggle() {} };
  }

  get textContent() { return this.words + this.children.map((child) => child.textContent ?? child).join(""); }

  set textContent(words) { [this.words, this.children] = [String(words), []]; }

  append(...children) { this.children.push(...children); }

  replaceChildren(...children) { [this.words, this.children] = ["", children]; }

  setAttribute(name, value) {
    this.attributes[name] = String(value);
    if (name.startsWith("data-")) this.dataset[name.slice(5)] = String(value);
  }

  all() { return this.children.filter((child) => child.all).flatMap((child) => [child, ...child.all()]); }

  querySelectorAll(tag) { return this.all().filter((child) => child.tag === tag); }
}

const named = {}, page = fs.readFileSync(process.argv[2], "utf8"), drawn = [], timers = [], reloads = [], store = {}, frames = [];
const scripts = [...page.matchAll(/<script>\n([^]*?)<\/script>/g)].map((match) => match[1]);
const root = new Element("html"), create = (tag) => new Element(tag);
const document = { documentElement: root, createElement: create, createElementNS: (_, tag) => create(tag),
  getElementById: (id) => (named[id] ??= new Element(id)) };
document.getElementById("data").textContent = page.match(/id="data" type="application\/json">([^]*?)<\/script>/)[1];
function uPlot(options, lines) { Object.assign(this, { options, lines, over: new Element("div"), destroy() {} }); drawn.push(this); }
Object.assign(uPlot, { paths: { linear: () => null, points: () => null }, pxRatio: 1 });
const window = { matchMedia: () => ({ matches: false }) };
const context = vm.createContext({ document, window, uPlot, atob, console, getComputedStyle: () => ({ getPropertyValue: () => "" }),
  requestAnimationFrame: (draw) => frames.push(draw), setTimeout: (task, ms) => timers.push([task, ms]), location: { reload: () => reloads.push(1) },
  sessionStorage: { getItem: (key) => store[key] ?? null, setItem: (key, value) => { store[key] = value; } } });
const run = (code) => {
  const answer = vm.runInContext(code, context);
  while (frames.length) frames.shift()();
  return answer;
};
run(scripts[1]); // scripts[0] is uPlot

const change = (id, value) => { named[id].value = value; named[id].onchange({ target: named[id] }); run(""); };
const places = (chart) => drawn.filter((plot) => plot === run(`state.charts[${chart}].uplot`)).flatMap((plot) => plot.lines.slice(1)
  .map(([steps]) => [...steps].map((step) => Math.round(1000 * step) / 1000)));
const cells = (row) => row.children.map((cell) => [cell.className, cell.textContent]);
const rows = () => named.runs.querySelectorAll("tr").map(cells);
const found = { table: rows(), order: run("state.table.rows().map(({ index }) => index)"), tiles: named.tiles.children.map((tile) => tile.textContent) };
found.chosen_axes = named.axis.children.map((option) => option.value);
found.places = { step: places(0) };
for (const axis of ["tokens", "seconds"]) { change("axis", axis); found.places[axis] = places(0); found[axis] = places(1); }
const plots = () => run("state.parallel.plots().map(({ runs, axes }) => ({ runs, axes: axes.map(({ title, values }) => [title, values]) }))");
found.parallel = { hidden: named.sweep.hidden, plots: plots() };
found.lines = named.parallel.querySelectorAll("polyline").map((line) => [line.dataset.run, line.attributes.points]);
change("metric", "train/loss");
found.other_metric = plots().map(({ axes }) => axes.at(-1));
change("which", 0);
found.marked = named.one.querySelectorAll("mark").map((piece) => piece.textContent);
found.shown = named.one.textContent;
found.names = run("data.runs.map((_, index) => state.name(index))");
found.charts = named.charts.children.map((chart) => chart.children[0].textContent);
found.reload_ms = timers.map(([, ms]) => ms);
found.fixed = run("[0.5, 12.34567, 1234.5, 0, 1e-7, null].map((value) => fixed(value, 4))");
found.durations = run("[1.25, 59.4, 59.7, 119.7, 3599.7].map(duration)");
if (timers.length) {
  run("state.toggle(0); state.charts[1].button.onclick(); at('theme').onclick()");
  named.extremes.onchange({ target: { checked: false } });
  timers[0][0]();
  run("state.selected = new Set(data.runs.keys()); state.axis = 'step'; state.extremes = true; state.charts[1].useLog(false); theme('light')");
  run("restore(JSON.parse(sessionStorage.getItem(data.title)))");
  found.restored = { reloads: reloads.length, axis: run("state.axis"), selected: run("[...state.selected]"),
    logs: run("state.charts.map((chart) => chart.log)"), extremes: run("state.extremes"), theme: root.dataset.theme };
}
console.log(JSON.stringify(found));
