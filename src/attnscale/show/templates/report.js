"use strict";
// Draw the figures of a report from the numbers in the page, for the screen's colours or for paper.
const FIGURES = JSON.parse(document.getElementById("figures").textContent);
const PAPER = 660, HALF = 320; // pixels across a printed page
const NARROW = 480, NARROW_LABEL = 9; // pixels of a phone, and the characters of a name beside its axes
const dark = matchMedia("(prefers-color-scheme: dark)");
const THEMES = {
  // tones after Okabe and Ito, told apart by colour-blind eyes; darker on white, lighter on black
  light: {
    ink: "#1c1e26", soft: "#5d6370", line: "#e3e6eb", card: "#f5f6f8",
    tones: ["#0072b2", "#c44e00", "#00805d", "#a8407f", "#7d6600", "#4b4fb0", "#5b5b5b", "#00697a"],
  },
  dark: {
    ink: "#e8eaf0", soft: "#a2a9b8", line: "#31353f", card: "#1f222b",
    tones: ["#56b4e9", "#ff9350", "#2fc79a", "#eb9fcb", "#e5c84a", "#a9acff", "#b5b5b5", "#55ccdd"],
  },
};
const MARKS = ["circle", "square", "diamond", "triangle-up", "x", "cross", "star", "hexagon"];
let printing = false;
const chosen = Object.fromEntries(Object.keys(FIGURES).map((name) => [name, 0]));
const cursor = {};

const theme = () => (dark.matches && !printing ? THEMES.dark : THEMES.light);
const tone = (index) => (index === "ink" ? theme().ink : theme().tones[index % theme().tones.length]);
const faint = (colour) => colour + "2e";
const told = (value) => (value === null || value === undefined ? "none" : String(Number(value.toPrecision(4))));
const leader = (name) => FIGURES[name].follows ?? name;
const viewOf = (name) => FIGURES[name].views[chosen[leader(name)]];

// Pixels that a label takes along its axis.
const across = (labels) => 14 + 7 * Math.max(...labels.map((label) => plain(label).length));
const down = () => 16;

// Names come escaped, since plotly reads tags; as plain text they are for the page's own elements, and to be cut.
const entities = { "&lt;": "<", "&gt;": ">", "&amp;": "&" };
const plain = (label) => label.replaceAll("<br>", ": ").replace(/&(lt|gt|amp);/g, (entity) => entities[entity]);
const escaped = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
const cut = (label) => (plain(label).length > NARROW_LABEL ? escaped("…" + plain(label).slice(1 - NARROW_LABEL)) : label);

function axis(spec, length, room, extra) {
  const { ink, soft, line } = theme();
  const made = {
    title: { text: spec.title, font: { size: 13, color: soft }, standoff: 10 }, tickfont: { size: 12, color: ink },
    gridcolor: line, linecolor: line, zeroline: false, fixedrange: true, automargin: true, ...extra,
  };
  if (spec.log) Object.assign(made, { type: "log", dtick: undefined, exponentformat: "none", minorloglabels: "none" });
  if (spec.range) made.range = spec.log ? spec.range.map(Math.log10) : spec.range;
  if (spec.ticks) {
    const labels = innerWidth < NARROW ? spec.ticks.map(cut) : spec.ticks;
    const each = Math.max(1, Math.ceil((labels.length * room(labels)) / length));
    const at = labels.map((_, index) => index).filter((index) => index % each === 0);
    const shown = room === across ? { range: [-0.5, labels.length - 0.5], ticklabeloverflow: "allow" } : {};
    Object.assign(made, { type: "linear", tickangle: 0, ...shown, tickvals: at, ticktext: at.map((index) => labels[index]) });
  }
  return made;
}

function bandOf(series, colour) {
  const edge = { type: "scatter", mode: "lines", line: { width: 0, color: colour }, x: series.x, hoverinfo: "skip" };
  const own = { name: series.name, showlegend: series.legend && !series.y.length };
  return [
    { ...edge, y: series.low, showlegend: false },
    { ...edge, ...own, y: series.high, fill: "tonexty", fillcolor: faint(colour) },
  ];
}

function tracesOf(series, index) {
  const colour = tone(series.tone);
  const traces = series.low.length ? bandOf(series, colour) : [];
  if (!series.y.length) return traces;
  const named = series.points.length ? "%{text}<br>%{y:.4~g}<extra></extra>" : "%{x:.4~g}: %{y:.4~g}";
  const made = { name: series.name, x: series.x, y: series.y, text: series.points, hovertemplate: named, showlegend: series.legend };
  if (series.mode === "bars") {
    return [...traces, { ...made, type: "bar", marker: { color: colour, opacity: 0.45, line: { width: 0 } } }];
  }
  const dash = series.dashed ? "dash" : "solid";
  const mode = { points: "markers", both: "lines+markers" }[series.mode] ?? "lines";
  const shape = series.mode === "steps" ? "hvh" : "linear";
  const marker = { size: series.mode === "points" ? 8 : 5, symbol: MARKS[index % MARKS.length], color: colour };
  return [...traces, { ...made, type: "scatter", mode, marker, line: { color: colour, width: 2, dash, shape } }];
}

function chart(view, width) {
  const small = width < NARROW;
  return {
    traces: view.series.flatMap(tracesOf),
    layout: {
      height: (small ? 300 : 340) + 20 * Math.max(0, view.series.length - (small ? 1 : 3)),
      margin: { l: 8, r: 12, t: 8, b: 8 }, bargap: 0,
      xaxis: axis(view.x, width, across), yaxis: axis(view.y, width, down, { rangemode: view.y.log ? "normal" : "tozero" }),
      legend: { orientation: "h", traceorder: "normal", x: 0, y: -0.22, yanchor: "top", font: { size: 12, color: theme().ink } },
      showlegend: view.series.length > 1, hovermode: "closest",
    },
  };
}

function logTicks(low, high) {
  const ticks = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++) {
    ticks.push(...[1, 3].map((digit) => digit * 10 ** power).filter((value) => value >= low && value <= high));
  }
  return ticks.length ? ticks : [low, high];
}

const beside = (view, row, column) => {
  const error = view.errors?.[row][column], bound = view.bounds?.[row][column];
  return error ? " ± " + told(error) : bound != null && bound !== view.values[row][column] ? " to " + told(bound) : "";
};
const columnName = (view, column) => (view.columns ? view.columns[column] : String(column));
const reading = (view, row, column) =>
  view.column + " " + columnName(view, column) + "<br>" + view.unit + " " + told(view.values[row][column]) + beside(view, row, column);

function heat(view, width) {
  const rows = view.values.length, columns = view.values[0]?.length ?? 0;
  const each = Math.min(26, Math.max(5, 900 / rows));
  const scaled = (value) => (value === null ? null : view.log ? Math.log10(value) : value);
  const ticks = view.log ? logTicks(view.low, view.high) : undefined;
  const gap = columns > 40 || rows > 40 ? 0 : 1;
  return {
    traces: [{
      type: "heatmap", z: view.log ? view.values.map((row) => row.map(scaled)) : view.values, xgap: gap, ygap: gap,
      zmin: scaled(view.low), zmax: scaled(view.high), colorscale: "Viridis",
      customdata: view.values.map((values, row) => values.map((_, column) => view.rows[row] + "<br>" + reading(view, row, column))),
      hovertemplate: "%{customdata}<extra></extra>",
      colorbar: {
        thickness: 12, outlinewidth: 0, tickfont: { size: 12, color: theme().ink },
        ...(ticks && { tickvals: ticks.map(Math.log10), ticktext: ticks.map(told) }),
      },
    }],
    layout: {
      height: Math.max(190, 84 + each * rows), margin: { l: 8, r: 8, t: 8, b: 8 }, hovermode: "closest",
      plot_bgcolor: theme().card,
      xaxis: axis(view.x, width, across, { showgrid: false, ...(columns <= 16 && !view.x.ticks && { dtick: 1 }) }),
      yaxis: axis(view.y, each * rows, down, { showgrid: false, autorange: "reversed" }),
    },
  };
}

function draw(name) {
  const place = document.getElementById(name), view = viewOf(name);
  const width = printing ? (place.closest(".several") ? HALF : PAPER) : place.clientWidth;
  const { traces, layout } = (view.kind === "heat" ? heat : chart)(view, width);
  const { ink, card, line } = theme();
  const looks = {
    width, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: ink, family: "system-ui, -apple-system, 'Segoe UI', Roboto, Arial, sans-serif" },
    hoverlabel: { bgcolor: card, bordercolor: line, align: "left", namelength: -1, font: { color: ink, size: 13 } },
  };
  Plotly.react(place, traces, { ...looks, ...layout }, { displayModeBar: false });
  if (!place.dataset.drawn && view.kind === "heat") {
    place.on("plotly_hover", (event) => read(name, event.points[0].pointIndex));
  }
  place.dataset.drawn = chosen[leader(name)];
  document.getElementById(name + "-notice").textContent = view.notice;
}

// What a pointer or the arrow keys point at, as text below the map.
function read(name, [row, column]) {
  const view = viewOf(name), out = document.getElementById(name + "-readout");
  cursor[name] = [row, column];
  out.textContent = view.spoken[row] + ", " + plain(reading(view, row, column));
}

// A field in a black and white frame, which shows on every colour.
const framed = (y, x) => [["#000000", 5], ["#ffffff", 2]].map(([color, width]) => (
  { type: "rect", x0: x - 0.5, x1: x + 0.5, y0: y - 0.5, y1: y + 0.5, line: { color, width } }
));

function move(name, event) {
  const view = viewOf(name);
  const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
  if (view.kind !== "heat" || !step) return;
  event.preventDefault();
  const [row, column] = cursor[name] ?? [-step[0], -step[1]];
  const clamp = (value, size) => Math.min(Math.max(value, 0), size - 1);
  const [y, x] = [clamp(row + step[0], view.values.length), clamp(column + step[1], view.values[0].length)];
  read(name, [y, x]);
  Plotly.relayout(document.getElementById(name), { shapes: framed(y, x) });
}

function choose(event) {
  const name = event.target.dataset.switch;
  chosen[name] = Number(event.target.value);
  for (const figure of Object.keys(FIGURES)) {
    if (leader(figure) !== name) continue;
    draw(figure);
    if (cursor[figure] && viewOf(figure).kind === "heat") read(figure, cursor[figure]);
  }
}

const drawAll = () => Object.keys(FIGURES).forEach(draw);
function print(now) {
  if (printing === now) return;
  printing = now;
  document.querySelectorAll("details").forEach((part) => { if (now) part.open = true; });
  drawAll();
}

for (const control of document.querySelectorAll("[data-switch]")) control.addEventListener("change", choose);
for (const name of Object.keys(FIGURES)) document.getElementById(name).addEventListener("keydown", (event) => move(name, event));
let resizing;
addEventListener("resize", () => { clearTimeout(resizing); resizing = setTimeout(drawAll, 80); });
dark.addEventListener("change", drawAll);
addEventListener("beforeprint", () => print(true));
addEventListener("afterprint", () => print(false));
matchMedia("print").addEventListener("change", (event) => print(event.matches));
// The text is there first; figures follow, the top one first.
requestAnimationFrame(() => setTimeout(() => {
  drawAll();
  document.documentElement.dataset.drawn = String(Math.round(performance.now()));
}));
