"use strict";
// Elements, numbers as text, and a plot with its axes. Colours come from CSS classes, for light, dark and print.
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
