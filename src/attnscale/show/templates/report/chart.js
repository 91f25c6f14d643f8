// Charts: bands, bars, lines and points over one pair of axes.
const MARKS = [
  "M-4,0a4,4 0 1,0 8,0a4,4 0 1,0 -8,0", "M-4,-4h8v8h-8z", "M0,-5L5,0L0,5L-5,0z", "M0,-5L5,4H-5z",
  "M-4,-4L4,4M4,-4L-4,4", "M-5,0H5M0,-5V5",
];
const NEAR = 30; // pixels from a pointer within which a point answers

const valuesOf = (view, names) => view.series.flatMap((series) => names.flatMap((name) => series[name]));

// Runs of points without a gap.
function runs(points) {
  const found = [[]];
  for (const one of points) one ? found.at(-1).push(one) : found.at(-1).length && found.push([]);
  return found.filter((run) => run.length);
}

const path = (points) => points.map(([x, y], index) => `${index ? "L" : "M"}${px(x)},${px(y)}`).join("");

function drawBand(svg, series, at) {
  const both = series.x.map((x, index) => {
    const low = at(x, series.low[index]), high = at(x, series.high[index]);
    return low && high ? [low, high] : null;
  });
  for (const run of runs(both)) {
    const around = [...run.map(([, high]) => high), ...run.map(([low]) => low).reverse()];
    const alone = run.length === 1; // one place: a stroke from its lowest to its highest
    svg.append(element("path", {
      class: "band", d: path(around) + (alone ? "" : "z"), fill: alone ? "none" : tone(series.tone), "fill-opacity": "0.18",
      stroke: alone ? tone(series.tone) : "none", "stroke-opacity": "0.5", "stroke-width": 3,
    }));
  }
}

function drawBars(svg, series, points, floor) {
  const there = points.filter(Boolean);
  const gap = there.slice(1).reduce((least, [x], index) => Math.min(least, x - there[index][0]), Infinity);
  const width = Number.isFinite(gap) ? Math.max(0.5, gap) : 12;
  for (const [x, y] of there) {
    svg.append(element("rect", {
      class: "bar", x: x - width / 2, y: Math.min(y, floor), width, height: Math.abs(floor - y), fill: tone(series.tone), "fill-opacity": "0.45",
    }));
  }
}

function drawSeries(svg, series, index, points) {
  const colour = tone(series.tone), stroke = { stroke: colour, "stroke-width": 2, fill: "none" };
  if (series.mode !== "points") {
    for (const run of runs(points)) {
      svg.append(element("path", { class: "line", d: path(run), "stroke-dasharray": series.dashed ? "8 5" : "none", ...stroke }));
    }
  }
  if (series.mode === "points" || series.mode === "both") {
    const size = series.mode === "points" ? "" : " scale(0.7)", mark = MARKS[index % MARKS.length];
    for (const [x, y] of points.filter(Boolean)) {
      svg.append(element("path", { class: "mark", d: mark, transform: `translate(${px(x)} ${px(y)})${size}`, ...stroke, fill: colour }));
    }
  }
}

function legendOf(view) {
  const list = html("ul", "legend");
  for (const series of view.series.filter(({ name }) => name)) {
    const swatch = element("svg", { width: 26, height: 10, "aria-hidden": "true" });
    const dash = series.dashed ? "8 5" : "none", width = series.mode === "bars" || !series.y.length ? 9 : 2.5;
    swatch.append(element("line", {
      x1: 0, x2: 26, y1: 5, y2: 5, stroke: tone(series.tone), "stroke-width": width, "stroke-dasharray": dash,
      "stroke-opacity": width > 3 ? "0.45" : "1",
    }));
    list.append(html("li", "", swatch, " " + series.name));
  }
  return list;
}

function drawChart(place, view, width) {
  const height = width < NARROW ? 260 : 300;
  const x = scaleOf(view.x, valuesOf(view, ["x"]), { air: view.series.some(({ mode }) => mode !== "lines") ? 0.03 : 0 });
  const y = scaleOf(view.y, valuesOf(view, ["y", "low", "high"]), { zero: true, air: 0.05 });
  const up = marksOf(view.y, y, height - 60, width, false);
  const box = { left: 22 + roomFor(up), right: width - 12, top: 8, bottom: height - 44, width };
  const toX = (value) => box.left + x.share(value) * (box.right - box.left);
  const toY = (value) => box.bottom - y.share(value) * (box.bottom - box.top);
  const at = (one, other) => (x.usable(one) && y.usable(other) ? [toX(one), toY(other)] : null);
  const svg = element("svg", { class: "main-svg", width, height, viewBox: `0 0 ${px(width)} ${px(height)}`, "aria-hidden": "true" });
  const across = marksOf(view.x, x, box.right - box.left, width, true);
  frame(svg, view, box, toX, toY, { x: across, y: up }, true);
  const clip = place.id + "-box";
  const inside = element("g", { "clip-path": `url(#${clip})` });
  svg.append(element("clipPath", { id: clip }, element("rect", {
    x: box.left - 5, y: box.top - 5, width: box.right - box.left + 10, height: box.bottom - box.top + 10,
  })), inside);
  const answering = [];
  view.series.forEach((series, index) => {
    if (series.low.length) drawBand(inside, series, at);
    if (!series.y.length) return;
    const points = series.x.map((one, number) => at(one, series.y[number]));
    if (series.mode === "bars") drawBars(inside, series, points, toY(Math.max(y.log ? 10 ** y.low : 0, y.log ? 0 : y.low)));
    else drawSeries(inside, series, index, points);
    points.forEach((place, number) => place && answering.push({ place, series, number }));
  });
  svg.addEventListener("pointermove", (event) => answer(place, svg, answering, event));
  svg.addEventListener("pointerleave", () => unpoint(place));
  place.replaceChildren(svg, ...(view.series.length > 1 ? [legendOf(view)] : []));
}

function answer(place, svg, answering, event) {
  const own = svg.getBoundingClientRect(), x = event.clientX - own.left, y = event.clientY - own.top;
  let nearest = null, least = NEAR;
  for (const one of answering) {
    const away = Math.hypot(one.place[0] - x, one.place[1] - y);
    if (away < least) [nearest, least] = [one, away];
  }
  if (!nearest) return unpoint(place);
  const { series, number } = nearest, name = series.points[number];
  const lines = name === undefined ? [told(series.x[number]) + ": " + told(series.y[number])] : [name, told(series.y[number])];
  return point(place, [...lines, ...(series.name ? [series.name] : [])], ...nearest.place);
}
