// The page: figures drawn for its width, switches, and the keyboard.
const FIGURES = JSON.parse(byId("data").textContent);
const chosen = {}, cursor = {};
const viewOf = (name) => FIGURES[name][chosen[name] ?? 0];

function draw(name) {
  const view = viewOf(name);
  (view.kind === "heat" ? drawHeat : drawChart)(byId(name), view);
  byId(`${name}-notice`).textContent = view.notice;
}

// Show the selected field of a map as text.
function read(name, row, column) {
  cursor[name] = [row, column];
  const [layer, head, value] = reading(viewOf(name), row, column);
  byId(`${name}-readout`).textContent = `${layer}, ${head}: ${value}`;
}

function move(name, event) {
  const view = viewOf(name), step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
  if (view.kind !== "heat" || !step) return;
  event.preventDefault();
  const [row, column] = cursor[name] ?? [-step[0], -step[1]];
  const next = [clamped(row + step[0], 0, view.values.length - 1), clamped(column + step[1], 0, view.values[0].length - 1)];
  read(name, ...next);
  drawFrame(byId(name), view, ...next);
}

function choose({ target }) {
  const name = target.dataset.switch;
  chosen[name] = Number(target.value);
  draw(name);
  if (cursor[name] && viewOf(name).kind === "heat") read(name, ...cursor[name]);
}

function drawAll() {
  widths.clear();
  Object.keys(FIGURES).forEach(draw);
}

for (const control of document.querySelectorAll("[data-switch]")) control.addEventListener("change", choose);
for (const name of Object.keys(FIGURES)) byId(name).addEventListener("keydown", (event) => move(name, event));
let resizing;
addEventListener("resize", () => { clearTimeout(resizing); resizing = setTimeout(drawAll, 80); });
addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((part) => { part.open = true; }));
// Draw the figures after the browser has shown the text.
requestAnimationFrame(() => setTimeout(() => {
  drawAll();
  document.documentElement.dataset.drawn = String(Math.round(performance.now()));
}));
