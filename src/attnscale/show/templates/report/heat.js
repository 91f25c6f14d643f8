// Maps: a field for each value, painted into one image, with a bar of colours beside it.
const colours = (...all) => all.map((colour) => [1, 3, 5].map((start) => parseInt(colour.slice(start, start + 2), 16)));
const VIRIDIS = colours("#440154", "#472d7b", "#3b528b", "#2c728e", "#21918c", "#28ae80", "#5ec962", "#addc30", "#fde725");
const DIVERGING = colours("#2166ac", "#67a9cf", "#d1e5f0", "#f7f7f7", "#fddbc7", "#ef8a62", "#b2182b"); // ColorBrewer's RdBu
const paletteOf = (view) => (view.diverging ? DIVERGING : VIRIDIS);

function colourAt(palette, share) {
  const place = Math.min(Math.max(share, 0), 1) * (palette.length - 1), index = Math.min(Math.floor(place), palette.length - 2);
  return palette[index].map((from, part) => Math.round(from + (palette[index + 1][part] - from) * (place - index)));
}

const FEW_COLUMNS = 6; // so few, and the numbers themselves stand in the fields

// Two digits, and zero where a number is too small for its colour to differ.
const inField = (value) => told(Math.abs(value) < 5e-4 ? 0 : Number(value.toPrecision(2)));

const rawOf = (view) => (view.log ? Math.log10 : (value) => value);

// One pixel a field; where fields are few, as large as they are shown, with a gap of one.
function painted(view, rows, columns, field) {
  const isFine = rows > 40 || columns > 40, gap = isFine ? 0 : 1;
  const wide = isFine ? 1 : Math.max(2, field.width / columns), high = isFine ? 1 : Math.max(2, field.height / rows);
  const raw = rawOf(view), low = raw(view.low), span = raw(view.high) - low || 1;
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [Math.max(1, Math.round(columns * wide)), Math.max(1, Math.round(rows * high))];
  const brush = canvas.getContext("2d");
  view.values.forEach((values, row) => values.forEach((value, column) => {
    if (!known(value) || (view.log && value <= 0)) return;
    brush.fillStyle = `rgb(${colourAt(paletteOf(view), (raw(value) - low) / span).join(" ")})`;
    const [left, top] = [Math.round(column * wide), Math.round(row * high)];
    brush.fillRect(left, top, Math.round((column + 1) * wide) - left - gap, Math.round((row + 1) * high) - top - gap);
  }));
  return canvas.toDataURL();
}

const beside = (view, row, column) => {
  const error = view.errors?.[row][column], bound = view.bounds?.[row][column];
  return error ? " ± " + told(error) : bound != null && bound !== view.values[row][column] ? " to " + told(bound) : "";
};
const columnName = (view, column) => (view.columns ? view.columns[column] : String(column));
const reading = (view, row, column) => [
  view.column + " " + columnName(view, column), view.unit + " " + told(view.values[row][column]) + beside(view, row, column),
];

function drawBar(svg, view, box, id) {
  const stops = paletteOf(view).map((colour, index, all) => element("stop", {
    offset: `${(100 * index) / (all.length - 1)}%`, "stop-color": `rgb(${colour.join(" ")})`,
  }));
  svg.append(element("linearGradient", { id, x1: "0", x2: "0", y1: "1", y2: "0" }, ...stops));
  svg.append(element("rect", { x: box.right + 10, y: box.top, width: 12, height: box.bottom - box.top, fill: `url(#${id})` }));
  const scale = scaleOf({ range: [view.low, view.high], log: view.log }, []);
  for (const { at, text } of barTicks(view, box)) {
    svg.append(label("", { x: box.right + 27, y: box.bottom - scale.share(at) * (box.bottom - box.top) + 4 }, text));
  }
}

const barTicks = (view, box) =>
  ticksOf(scaleOf({ range: [view.low, view.high], log: view.log }, []), Math.max(2, Math.min(6, (box.bottom - box.top) / 30)));

function drawHeat(place, view, width) {
  const rows = view.values.length, columns = view.values[0]?.length ?? 0;
  const each = Math.min(26, Math.max(5, 900 / rows)), height = Math.max(190, 84 + each * rows);
  const numbers = (count) => Array.from({ length: count }, (_, index) => String(index));
  const x = { ...view.x, ticks: view.x.ticks ?? numbers(columns) }, y = { ...view.y, ticks: view.y.ticks ?? numbers(rows) };
  const box = { top: 8, bottom: height - 44, width };
  const up = marksOf(y, null, box.bottom - box.top, width, false);
  box.left = 22 + roomFor(up);
  box.right = width - 32 - roomFor(barTicks(view, box));
  const across = marksOf(x, null, box.right - box.left, width, true);
  const toX = (column) => box.left + ((column + 0.5) * (box.right - box.left)) / columns;
  const toY = (row) => box.top + ((row + 0.5) * (box.bottom - box.top)) / rows;
  const svg = element("svg", { class: "main-svg", width, height, viewBox: `0 0 ${px(width)} ${px(height)}`, "aria-hidden": "true" });
  const field = { x: box.left, y: box.top, width: box.right - box.left, height: box.bottom - box.top };
  const image = element("image", { ...field, href: painted(view, rows, columns, field), preserveAspectRatio: "none" });
  image.style.imageRendering = "pixelated";
  svg.append(element("rect", { ...field, fill: theme().card }), element("g", { class: "heat" }, image));
  frame(svg, view, box, toX, toY, { x: across, y: up }, false);
  if (columns <= FEW_COLUMNS) view.values.forEach((values, row) => values.forEach((value, column) => {
    const [red, green, blue] = colourAt(paletteOf(view), (value - view.low) / (view.high - view.low || 1));
    const fill = 0.3 * red + 0.59 * green + 0.11 * blue > 140 ? "#000000" : "#ffffff"; // by brightness of the field
    if (known(value)) svg.append(label("", { x: toX(column), y: toY(row) + 4, fill, "text-anchor": "middle" }, inField(value)));
  }));
  drawBar(svg, view, box, place.id + "-bar");
  const over = element("rect", { class: "field", ...field, fill: "transparent" });
  over.addEventListener("pointermove", (event) => {
    const own = over.getBoundingClientRect();
    const row = Math.min(rows - 1, Math.floor(((event.clientY - own.top) / own.height) * rows));
    const column = Math.min(columns - 1, Math.floor(((event.clientX - own.left) / own.width) * columns));
    if (row < 0 || column < 0) return;
    point(place, [view.rows[row], ...reading(view, row, column)], toX(column), toY(row));
    read(place.id, [row, column]);
  });
  over.addEventListener("pointerleave", () => unpoint(place));
  svg.append(element("g", { class: "frame" }), over);
  place.replaceChildren(svg);
}

// A field in a black and white frame, which shows on every colour.
function drawFrame(place, view, row, column) {
  const field = place.querySelector(".field"), number = (name) => Number(field.getAttribute(name));
  const width = number("width") / view.values[0].length, height = number("height") / view.values.length;
  const around = { x: number("x") + column * width, y: number("y") + row * height, width, height, fill: "none" };
  const frames = [["#000000", 5], ["#ffffff", 2]].map(([stroke, size]) => element("rect", { ...around, stroke, "stroke-width": size }));
  place.querySelector(".frame").replaceChildren(...frames);
}
