// Small pictures in SVG. Colours come from classes, so light, dark and print need no new drawing.

const SVG = "http://www.w3.org/2000/svg";

function element(name, attributes = {}, ...children) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

const byId = (id) => document.getElementById(id);

function html(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

// Show a number as text, and keep all of its digits beside it.
function show(id, value, written = figure(value)) {
  const place = byId(id);
  place.textContent = written;
  place.dataset.value = value;
}

const whole = (value) => Math.round(value).toLocaleString("en-GB");
const percent = (value) => (value < 0.0005 ? "under 0.1%" : value > 0.9995 && value < 1 ? "over 99.9%" : `${(100 * value).toPrecision(3)}%`);

function figure(value) {
  if (!Number.isFinite(value)) return "–";
  const size = Math.abs(Number(value.toPrecision(12))); // so that 0.9999999999999999 is 1
  if (size === 0) return "0";
  if (size >= 1e6 || size < 1e-4) return value.toExponential(1).replace("e+", "e").replace("-", "−");
  const places = size >= 1000 ? 0 : size >= 100 ? 1 : size >= 1 ? 2 : size >= 0.1 ? 3 : 4;
  return value.toLocaleString("en-GB", { minimumFractionDigits: places, maximumFractionDigits: places }).replace("-", "−");
}

// Asking for a width makes the browser lay the page out, so it is asked once for each size of the window.
const widths = new Map();

function widthOf(host) {
  if (!widths.has(host)) widths.set(host, Math.max(140, host.clientWidth || 480));
  return widths.get(host);
}

// A plot with its axes; x and y map values to pixels.
function plot(host, { label, height = 220, x, y, left = 40, below = 0 }) {
  const width = widthOf(host), bottom = height - 36 - below, right = width - 16, top = 8;
  const svg = element("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": label });
  const along = (axis, from, to) => {
    const map = axis.log ? Math.log : (value) => value;
    const [low, high] = axis.domain.map(map);
    return (value) => Number((from + (to - from) * (clamped(map(value), low, high) - low) / (high - low)).toFixed(2));
  };
  const px = along(x, left, right), py = along(y, bottom, top);
  for (const tick of y.ticks) {
    svg.append(element("line", { class: "grid", x1: left, x2: right, y1: py(tick), y2: py(tick) }));
    svg.append(element("text", { class: "tick end", x: left - 6, y: py(tick) + 4 }, (y.format || figure)(tick)));
  }
  for (const tick of x.ticks) {
    svg.append(element("text", { class: "tick middle", x: px(tick), y: bottom + 15 }, (x.format || figure)(tick)));
  }
  svg.append(element("line", { class: "axis", x1: left, x2: right, y1: bottom, y2: bottom }));
  svg.append(element("text", { class: "tick middle", x: (left + right) / 2, y: bottom + 32 }, x.label || ""));
  host.replaceChildren(svg);
  return { svg, px, py, left, right, top, bottom };
}

const path = (points) => points.map(([a, b], i) => `${i ? "L" : "M"}${a.toFixed(1)} ${b.toFixed(1)}`).join("");

// About so many round numbers from low to high.
function roundTicks(low, high, about = 5) {
  const raw = (high - low) / about, power = 10 ** Math.floor(Math.log10(raw));
  const step = power * [1, 2, 5, 10].find((multiple) => multiple * power >= raw);
  const ticks = [];
  for (let i = Math.ceil(low / step); i * step <= high * (1 + 1e-9); i++) ticks.push(Number((i * step).toPrecision(12)));
  return ticks;
}

const plain = (value) => String(Number(value.toPrecision(6))).replace("-", "−");

// The square map of a matrix in two colours: what is positive, and what is negative; the square root lets small show.
function matrixMap(host, matrix, { label, largest, faded = () => false, side = 280, write = null }) {
  const size = matrix.length, cell = side / size;
  const box = (i, j) => ({ x: j * cell + 0.5, y: i * cell + 0.5, width: cell - 1, height: cell - 1, rx: Math.min(3, cell / 8) });
  const svg = element("svg", { viewBox: `0 0 ${side} ${side}`, width: side, height: side, role: "img", "aria-label": label });
  svg.append(...matrix.flatMap((row, i) => row.map((_, j) => element("rect", { class: "cell", ...box(i, j) }))));
  matrix.forEach((row, i) => row.forEach((value, j) => {
    const strength = Math.sqrt(Math.min(1, Math.abs(value) / largest)), pale = faded(i, j);
    if (strength > 0.01) {
      svg.append(element("rect", { class: value < 0 ? "negative" : "positive", ...box(i, j), "fill-opacity": (pale ? 0.15 : 1) * strength }));
    }
    if (write) {
      const style = pale ? "number pale" : strength > 0.75 ? "number over" : "number";
      svg.append(element("text", { class: style, x: (j + 0.5) * cell, y: (i + 0.5) * cell + 4 }, write(value)));
    }
  }));
  host.replaceChildren(svg);
}
