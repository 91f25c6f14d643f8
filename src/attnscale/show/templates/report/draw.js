"use strict";
// Colours for the screen or for paper, and elements made of data: a name is text, whatever is in it.
const FIGURES = JSON.parse(document.getElementById("figures").textContent);
const PAPER = 660, HALF = 320; // pixels across a printed page
const NARROW = 480; // pixels of a phone
const LABEL = 22, NARROW_LABEL = 9; // characters of a name beside an axis; pointing shows all of it
const LETTER = 7; // pixels across, about
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
let printing = false;

const theme = () => (dark.matches && !printing ? THEMES.dark : THEMES.light);
const tone = (index) => (index === "ink" ? theme().ink : theme().tones[index % theme().tones.length]);
const known = (value) => value !== null && value !== undefined && Number.isFinite(value);

// A number for people: four digits, 47,400 rather than 4.74e+4.
function told(value) {
  if (!known(value)) return "none";
  const short = Number(value.toPrecision(4)), size = Math.abs(short);
  return size >= 1e3 && size < 1e6 ? short.toLocaleString("en-GB") : String(short);
}

// Pixels in whole tenths: a curve of thousands of points stays short.
const px = (value) => String(Math.round(10 * value) / 10);

function element(name, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, typeof value === "number" ? px(value) : value);
  made.append(...children);
  return made;
}

function html(name, className, ...children) {
  const made = document.createElement(name);
  made.className = className;
  made.append(...children);
  return made;
}

// The end of a name, which tells layers apart.
function cut(name, width) {
  const most = width < NARROW ? NARROW_LABEL : LABEL;
  return name.length > most ? "…" + name.slice(1 - most) : name;
}

// What a pointer is at, in lines beside it.
function point(place, lines, x, y) {
  let label = place.querySelector(".hovertext");
  if (!label) place.append(label = html("div", "hovertext"));
  label.replaceChildren(...lines.map((line) => html("div", "", line.replace(/\.(?!\d)|(?<!\d)\./g, ".\u200b")))); // breaks at dots
  label.hidden = false;
  const left = x + label.offsetWidth + 16 > place.clientWidth ? x - label.offsetWidth - 12 : x + 12;
  label.style.left = px(Math.max(0, left)) + "px";
  label.style.top = px(Math.max(0, Math.min(y - 12, place.clientHeight - label.offsetHeight))) + "px";
}

function unpoint(place) {
  const label = place.querySelector(".hovertext");
  if (label) label.hidden = true;
}
// Axes: values to pixels, round ticks, and names thinned to those that there is room for.
function extent(values, usable) {
  let low = Infinity, high = -Infinity;
  for (const value of values) {
    if (!usable(value)) continue;
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return low <= high ? [low, high] : [1, 1];
}

// A scale takes a value to a share of its length, from 0 to 1.
function scaleOf(spec, values, { zero = false, air = 0 } = {}) {
  const raw = spec.log ? Math.log10 : (value) => value;
  const usable = (value) => known(value) && (!spec.log || value > 0);
  let [low, high] = (spec.range ?? extent(values, usable)).map(raw);
  if (spec.ticks) [low, high] = [-0.5, spec.ticks.length - 0.5];
  else if (!spec.range) {
    if (zero && !spec.log) [low, high] = [Math.min(0, low), Math.max(0, high)];
    const more = air * (high - low);
    [low, high] = [zero && low === 0 ? 0 : low - more, zero && high === 0 ? 0 : high + more];
  }
  if (high - low < 1e-12) [low, high] = [low - 0.5, high + 0.5];
  return { share: (value) => (raw(value) - low) / (high - low), usable, low, high, log: spec.log };
}

function ticksOf(scale, most) {
  const marks = [];
  if (scale.log) {
    const digits = scale.high - scale.low > 2 ? [1] : scale.high - scale.low > 1 ? [1, 3] : [1, 2, 5];
    const every = Math.max(1, Math.ceil((scale.high - scale.low) / most));
    for (let power = Math.floor(scale.low); power <= Math.ceil(scale.high); power++) {
      if (power % every === 0) marks.push(...digits.map((digit) => digit * 10 ** power));
    }
  } else {
    const rough = (scale.high - scale.low) / most, unit = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((factor) => factor * unit).find((size) => size >= rough * 0.999);
    for (let index = Math.ceil(scale.low / step - 1e-9); index * step <= scale.high + 1e-9 * step; index++) marks.push(index * step);
  }
  return marks.filter((mark) => scale.share(mark) >= -1e-6 && scale.share(mark) <= 1 + 1e-6).map((at) => ({ at, text: told(at) }));
}

// Names at 0, 1, 2, …, as many as fit into so many pixels.
function namesOf(names, length, each) {
  const every = Math.max(1, Math.ceil((names.length * each) / length));
  return names.map((text, at) => ({ at, text })).filter(({ at }) => at % every === 0);
}

function marksOf(spec, scale, length, width, isAcross) {
  if (!spec.ticks) return ticksOf(scale, Math.max(2, Math.min(7, Math.floor(length / (isAcross ? 70 : 36)))));
  const names = spec.ticks.map((name) => cut(name, width));
  const longest = Math.max(1, ...names.map((name) => name.length));
  return namesOf(names, length, isAcross ? 14 + LETTER * longest : 16);
}

const roomFor = (marks) => 12 + LETTER * Math.max(1, ...marks.map(({ text }) => text.length));
const label = (className, attributes, text) => element("text", { class: className, "font-size": 12, fill: theme().ink, ...attributes }, text);

// Both axes about a box, with their titles; `x` and `y` take values to pixels.
function frame(svg, view, box, x, y, marks, hasGrid) {
  const { line, soft } = theme(), middle = (box.left + box.right) / 2;
  const rule = (ends) => svg.append(element("line", { stroke: line, ...ends }));
  for (const { at, text } of marks.x) {
    if (hasGrid) rule({ x1: x(at), x2: x(at), y1: box.top, y2: box.bottom });
    const half = (LETTER * text.length) / 2, held = Math.min(Math.max(x(at), half), box.width - half);
    svg.append(element("g", { class: "xtick" }, label("", { x: held, y: box.bottom + 16, "text-anchor": "middle" }, text)));
  }
  for (const { at, text } of marks.y) {
    if (hasGrid) rule({ x1: box.left, x2: box.right, y1: y(at), y2: y(at) });
    svg.append(element("g", { class: "ytick" }, label("", { x: box.left - 6, y: y(at) + 4, "text-anchor": "end" }, text)));
  }
  svg.append(label("xtitle", { x: middle, y: box.bottom + 36, "text-anchor": "middle", fill: soft, "font-size": 13 }, view.x.title));
  const along = (box.top + box.bottom) / 2;
  svg.append(label("ytitle", {
    x: 12, y: along, transform: `rotate(-90 12 ${px(along)})`, "text-anchor": "middle", fill: soft, "font-size": 13,
  }, view.y.title));
}
