// The page: figures drawn for its width and colours, switches, the keyboard, and paper.
const chosen = Object.fromEntries(Object.keys(FIGURES).map((name) => [name, 0]));
const cursor = {};
const leader = (name) => FIGURES[name].follows ?? name;
const viewOf = (name) => FIGURES[name].views[chosen[leader(name)]];

function draw(name) {
  const place = document.getElementById(name), view = viewOf(name);
  const width = printing ? (place.closest(".several") ? HALF : PAPER) : place.clientWidth;
  (view.kind === "heat" ? drawHeat : drawChart)(place, view, width);
  place.dataset.drawn = chosen[leader(name)];
  document.getElementById(name + "-notice").textContent = view.notice;
}

// What a pointer or the arrow keys point at, as text below the map.
function read(name, [row, column]) {
  const view = viewOf(name), out = document.getElementById(name + "-readout");
  cursor[name] = [row, column];
  out.textContent = view.rows[row] + ", " + reading(view, row, column).join(": ");
}

function move(name, event) {
  const view = viewOf(name);
  const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
  if (view.kind !== "heat" || !step) return;
  event.preventDefault();
  const [row, column] = cursor[name] ?? [-step[0], -step[1]];
  const clamp = (value, size) => Math.min(Math.max(value, 0), size - 1);
  const [y, x] = [clamp(row + step[0], view.values.length), clamp(column + step[1], view.values[0].length)];
  read(name, [y, x]);
  drawFrame(document.getElementById(name), view, y, x);
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
