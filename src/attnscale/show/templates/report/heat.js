// Maps: a field for each value, drawn as one image, with a colour bar.

const PER_NAME = 16; // least pixels for the name of a layer on an axis
const colours = (...all) => all.map((colour) => [1, 3, 5].map((start) => parseInt(colour.slice(start, start + 2), 16)));
const VIRIDIS = colours("#440154", "#472d7b", "#3b528b", "#2c728e", "#21918c", "#28ae80", "#5ec962", "#addc30", "#fde725");
const DIVERGING = colours("#2166ac", "#67a9cf", "#d1e5f0", "#f7f7f7", "#fddbc7", "#ef8a62", "#b2182b"); // ColorBrewer's RdBu
const paletteOf = (view) => (view.diverging ? DIVERGING : VIRIDIS);

function colourAt(palette, share) {
  const place = clamped(share, 0, 1) * (palette.length - 1), index = Math.min(Math.floor(place), palette.length - 2);
  return `rgb(${palette[index].map((from, part) => Math.round(from + (palette[index + 1][part] - from) * (place - index))).join(" ")})`;
}

// A small map is drawn at its final size with a gap of one pixel between fields; a large one with one pixel per field.
function painted(view, rows, columns, field) {
  const isFine = rows > 40 || columns > 40, gap = isFine ? 0 : 1;
  const wide = isFine ? 1 : Math.max(2, field.width / columns), high = isFine ? 1 : Math.max(2, field.height / rows);
  const map = view.log ? Math.log10 : (value) => value, low = map(view.low), span = map(view.high) - low || 1;
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [Math.max(1, Math.round(columns * wide)), Math.max(1, Math.round(rows * high))];
  const brush = canvas.getContext("2d");
  view.values.forEach((values, row) => values.forEach((value, column) => {
    if (!isKnown(value) || (view.log && value <= 0)) return;
    brush.fillStyle = colourAt(paletteOf(view), (map(value) - low) / span);
    const [left, top] = [Math.round(column * wide), Math.round(row * high)];
    brush.fillRect(left, top, Math.round((column + 1) * wide) - left - gap, Math.round((row + 1) * high) - top - gap);
  }));
  return canvas.toDataURL();
}

// Text of a field: its row, its column, and its value with its error or upper bound.
function reading(view, row, column) {
  const value = view.values[row][column], error = view.errors?.[row][column], bound = view.bounds?.[row][column];
  const beside = error ? ` ± ${figure(error)}` : bound != null && bound !== value ? ` to ${figure(bound)}` : "";
  const name = view.columns ? view.columns[column] : column;
  return [view.rows[row], `${view.column} ${name}`, `${view.unit} ${isKnown(value) ? figure(value) : "none"}${beside}`];
}

function drawHeat(host, view) {
  const rows = view.values.length, columns = view.values[0]?.length ?? 0;
  const height = Math.max(190, 84 + clamped(900 / rows, 5, 26) * rows);
  const numbers = (count) => Array.from({ length: count }, (_, index) => String(index));
  const longest = Math.max(...(view.x.ticks ?? [""]).map((name) => cut(name).length), String(columns).length);
  const x = { ...namedAxis(view.x.ticks ?? numbers(columns), widthOf(host) - 120, 14 + LETTER * longest), label: view.x.title };
  const y = { ...namedAxis(view.y.ticks ?? numbers(rows), height - 52, PER_NAME), label: view.y.title };
  y.domain.reverse();
  const bar = { domain: [view.low, view.high === view.low ? view.low + 1 : view.high], log: view.log };
  bar.ticks = roundTicks(...bar.domain, 6, bar.log);
  const { svg, px, py, left, right, top, bottom } = plot(host, { height, x, y, beside: 24 + LETTER * Math.max(1, ...bar.ticks.map((tick) => plain(tick).length)) });
  const field = { x: left, y: top, width: right - left, height: bottom - top };
  const image = element("image", { ...field, href: painted(view, rows, columns, field), preserveAspectRatio: "none", style: "image-rendering: pixelated" });
  svg.append(element("rect", { ...field, class: "empty" }), element("g", { class: "heat" }, image));
  drawBar(svg, view, bar, { x: right + 10, y: top, width: 12, height: bottom - top }, `${host.id}-bar`);
  const over = element("rect", { class: "field", ...field, fill: "transparent" });
  over.addEventListener("pointermove", (event) => {
    const own = over.getBoundingClientRect(), at = (share, size) => clamped(Math.floor(share * size), 0, size - 1);
    const [row, column] = [at((event.clientY - own.top) / own.height, rows), at((event.clientX - own.left) / own.width, columns)];
    point(host, reading(view, row, column), px(column), py(row));
    read(host.id, row, column);
  });
  over.addEventListener("pointerleave", () => unpoint(host));
  svg.append(element("g", { class: "frame" }), over);
}

function drawBar(svg, view, bar, box, id) {
  const stops = paletteOf(view).map((_, index, all) =>
    element("stop", { offset: index / (all.length - 1), "stop-color": colourAt(all, index / (all.length - 1)) }));
  svg.append(element("linearGradient", { id, x1: 0, x2: 0, y1: 1, y2: 0 }, ...stops), element("rect", { ...box, fill: `url(#${id})` }));
  const map = bar.log ? Math.log : (value) => value, [low, high] = bar.domain.map(map);
  for (const tick of bar.ticks) {
    svg.append(element("text", { class: "tick", x: box.x + 17, y: box.y + box.height * (1 - (map(tick) - low) / (high - low)) + 4 }, plain(tick)));
  }
}

// A black and white frame around a field, visible on every colour.
function drawFrame(host, view, row, column) {
  const field = host.querySelector(".field"), number = (name) => Number(field.getAttribute(name));
  const width = number("width") / view.values[0].length, height = number("height") / view.values.length;
  const around = { x: number("x") + column * width, y: number("y") + row * height, width, height, fill: "none" };
  const frames = [["#000000", 5], ["#ffffff", 2]].map(([stroke, size]) => element("rect", { ...around, stroke, "stroke-width": size }));
  host.querySelector(".frame").replaceChildren(...frames);
}
