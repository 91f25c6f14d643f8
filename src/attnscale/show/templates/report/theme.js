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
