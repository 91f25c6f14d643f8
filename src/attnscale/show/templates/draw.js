"use strict";
// What both pages draw with: elements, numbers as text, axes, and charts. Colours come from CSS classes, for light, dark
// and print.
const LETTER = 7; // approximate width in pixels

const byId = (id) => document.getElementById(id);
const clamped = (value, low, high) => Math.min(high, Math.max(low, value));

function filled(made, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

const html = (name, attributes = {}, ...children) => filled(document.createElement(name), attributes, children);
const element = (name, attributes = {}, ...children) =>
  filled(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);

// A measured number: about three digits, 47,400 rather than 4.74e4.
function figure(value) {
  if (!Number.isFinite(value)) return "–";
  const size = Math.abs(Number(value.toPrecision(12))); // so that 0.9999999999999999 is 1
  if (size === 0) return "0";
  if (size >= 1e6 || size < 1e-4) return value.toExponential(1).replace("e+", "e").replace("-", "−");
  const places = size >= 1000 ? 0 : size >= 100 ? 1 : size >= 1 ? 2 : size >= 0.1 ? 3 : 4;
  return value.toLocaleString("en-GB", { minimumFractionDigits: places, maximumFractionDigits: places }).replace("-", "−");
}

// A round number, with no more digits than it needs.
function plain(value) {
  const short = Number(value.toPrecision(6)), size = Math.abs(short);
  return (size >= 1000 && size < 1e6 ? short.toLocaleString("en-GB") : String(short)).replace("-", "−");
}

const path = (points) => points.map(([x, y], i) => `${i ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");

// About `about` round numbers from low to high; on a logarithmic axis, powers of ten and digits between them.
function roundTicks(low, high, about, log = false) {
  if (log) {
    const from = Math.floor(Math.log10(low)), to = Math.ceil(Math.log10(high)), every = Math.max(1, Math.ceil((to - from) / about));
    const span = Math.log10(high / low), digits = span > 2.5 ? [1] : span > 1.2 ? [1, 3] : [1, 2, 5];
    const powers = Array.from({ length: to - from + 1 }, (_, i) => from + i).filter((power) => power % every === 0);
    return powers.flatMap((power) => digits.map((digit) => digit * 10 ** power)).filter((tick) => tick >= low && tick <= high);
  }
  const raw = (high - low) / about, power = 10 ** Math.floor(Math.log10(raw));
  const step = power * [1, 2, 5, 10].find((multiple) => multiple * power >= raw * 0.999);
  const ticks = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + 1e-9 * step; i++) ticks.push(Number((i * step).toPrecision(12)));
  return ticks;
}

// Reading a width forces a layout, so each width is read once and kept until the window is resized.
const widths = new Map();

function widthOf(host) {
  if (!widths.has(host)) widths.set(host, Math.max(140, host.clientWidth || 480));
  return widths.get(host);
}

// A plot with its axes, each { domain, ticks, log, format, label }; px and py map values to pixels.
function plot(host, { label, height = 220, x, y, below = 0, beside = 0 }) {
  const text = (axis, tick) => (axis.format || plain)(tick);
  const longest = Math.max(0, ...y.ticks.map((tick) => text(y, tick).length));
  const width = widthOf(host), top = 8, bottom = height - 36 - below;
  const left = 14 + LETTER * longest + (y.label ? 18 : 0), right = width - 16 - beside;
  const svg = element("svg", { viewBox: `0 0 ${width} ${height}`, width, height, ...(label ? { role: "img", "aria-label": label } : { "aria-hidden": true }) });
  const along = ({ domain, log }, from, to) => {
    const map = log ? Math.log : (value) => value, [low, high] = domain.map(map);
    return (value) => Number((from + (to - from) * clamped((map(value) - low) / (high - low), 0, 1)).toFixed(2));
  };
  const px = along(x, left, right), py = along(y, bottom, top), middle = (top + bottom) / 2;
  for (const tick of y.ticks) {
    svg.append(element("line", { class: "grid", x1: left, x2: right, y1: py(tick), y2: py(tick) }));
    svg.append(element("text", { class: "tick end", x: left - 6, y: py(tick) + 4 }, text(y, tick)));
  }
  for (const tick of x.ticks) {
    const half = LETTER * text(x, tick).length / 2;
    svg.append(element("text", { class: "tick middle", x: clamped(px(tick), half, width - half), y: bottom + 15 }, text(x, tick)));
  }
  svg.append(element("line", { class: "axis", x1: left, x2: right, y1: bottom, y2: bottom }));
  svg.append(element("text", { class: "tick middle", x: (left + right) / 2, y: bottom + 32 }, x.label || ""));
  if (y.label) svg.append(element("text", { class: "tick middle", x: 12, y: middle, transform: `rotate(-90 12 ${middle})` }, y.label));
  host.replaceChildren(svg);
  return { svg, px, py, left, right, top, bottom };
}

// Charts: bands, lines and points over one pair of axes.

const NEAR = 30; // pixels within which the pointer selects a point
const isKnown = (value) => value !== null && value !== undefined && Number.isFinite(value);

// An axis with names at 0, 1, 2, …; skips names that do not fit into `length` pixels.
function namedAxis(names, length, each) {
  const every = Math.max(1, Math.ceil(names.length * each / length));
  const ticks = names.map((_, index) => index).filter((index) => index % every === 0);
  return { domain: [-0.5, names.length - 0.5], ticks, format: (index) => cut(names[index]) };
}

const cut = (name) => (name.length > 22 ? "…" + name.slice(-21) : name); // layers differ at the end of their names

function axisOf({ title, log, ticks, range }, values, length, isHeight) {
  if (ticks) return { ...namedAxis(ticks, length, 14 + LETTER * Math.max(...ticks.map((name) => cut(name).length))), label: title };
  let [low, high] = range ?? values.reduce(([least, most], value) => [Math.min(least, value), Math.max(most, value)], [Infinity, -Infinity]);
  if (!range && !log && isHeight) [low, high] = [Math.min(0, low), Math.max(0, high) + 0.05 * (high - Math.min(0, low))];
  if (!range && log) [low, high] = [low * (low / high) ** 0.05, high * (high / low) ** 0.05];
  if (!(high > low)) [low, high] = isKnown(low) && low > 0 ? [low / 2, 2 * low] : [-0.5, 0.5];
  return { domain: [low, high], log, label: title, ticks: roundTicks(low, high, clamped(Math.floor(length / (isHeight ? 36 : 70)), 2, 7), log) };
}

// Runs of points without a gap.
function runs(points) {
  const found = [[]];
  for (const one of points) one ? found.at(-1).push(one) : found.push([]);
  return found.filter((run) => run.length);
}

// A series has x and y, and may have a band (low, high), a tone, marks, and a name for the legend or for each point.
function drawChart(host, view) {
  const all = view.series.map((series) => ({ name: "", y: [], low: [], high: [], tone: "ink", points: [], ...series }));
  const height = view.height ?? 300, isShown = (value, axis) => isKnown(value) && (!axis.log || value > 0);
  const valuesOf = (names, axis) => all.flatMap((series) => names.flatMap((name) => series[name])).filter((value) => isShown(value, axis));
  const x = axisOf(view.x, valuesOf(["x"], view.x), widthOf(host) - 80, false);
  const y = axisOf(view.y, valuesOf(["y", "low", "high"], view.y), height - 60, true);
  const { svg, px, py } = plot(host, { label: view.label, height, x, y });
  const readable = [];
  for (const { name, tone, dashed, marks, points, ...series } of all) {
    const place = (values) => series.x.map((at, i) => (isShown(at, view.x) && isShown(values[i], view.y) ? [px(at), py(values[i])] : null));
    const [middle, low, high] = [series.y, series.low, series.high].map(place);
    for (const run of runs(low.map((point, i) => point && high[i] && [point, high[i]]))) {
      const around = [...run.map((both) => both[1]), ...run.map((both) => both[0]).reverse()];
      svg.append(element("path", { class: `band tone-${tone}`, d: `${path(around)}z` }));
    }
    for (const run of runs(middle)) svg.append(element("path", { class: `line tone-${tone}${dashed ? " dashed" : ""}`, d: path(run) }));
    middle.forEach((point, i) => {
      if (!point) return;
      if (marks) svg.append(element("circle", { class: `mark tone-${tone}`, cx: point[0], cy: point[1], r: 3.5 }));
      const start = () => (points[i] === undefined ? [`${figure(series.x[i])}: ${figure(series.y[i])}`] : [points[i], figure(series.y[i])]);
      readable.push({ point, lines: () => [...start(), ...(name ? [name] : [])] }); // text of numbers takes long to make
    });
  }
  svg.addEventListener("pointermove", (event) => readNearest(host, svg, readable, event));
  svg.addEventListener("pointerleave", () => unpoint(host));
  const kind = ({ dashed, y }) => (dashed ? " dashed" : y.length ? "" : " area");
  const key = (series) => html("span", { class: `key tone-${series.tone}${kind(series)}` });
  const named = all.filter(({ name }) => name).map((series) => html("li", {}, key(series), ` ${series.name}`));
  if (all.length > 1) host.append(html("ul", { class: "legend" }, ...named));
}

function readNearest(host, svg, readable, event) {
  const own = svg.getBoundingClientRect(), [x, y] = [event.clientX - own.left, event.clientY - own.top];
  let nearest = null, least = NEAR;
  for (const one of readable) {
    const away = Math.hypot(one.point[0] - x, one.point[1] - y);
    if (away < least) [nearest, least] = [one, away];
  }
  if (nearest) point(host, nearest.lines(), ...nearest.point);
  else unpoint(host);
}

// Show lines of text next to a point of a figure.
function point(host, lines, x, y) {
  unpoint(host);
  const breakable = (line) => line.replace(/\.(?!\d)|(?<!\d)\./g, ".\u200b"); // names break at their dots
  const label = html("div", { class: "hovertext" }, ...lines.map((line) => html("div", {}, breakable(line))));
  host.append(label);
  const left = x + label.offsetWidth + 16 > host.clientWidth ? x - label.offsetWidth - 12 : x + 12;
  label.style.left = `${Math.max(0, left)}px`;
  label.style.top = `${clamped(y - 12, 0, Math.max(0, host.clientHeight - label.offsetHeight))}px`;
}

const unpoint = (host) => host.querySelector(".hovertext")?.remove();
