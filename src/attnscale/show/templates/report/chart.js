// Charts: bands, lines and points over one pair of axes.
const FIGURES = JSON.parse(byId("figures").textContent);
const NEAR = 30; // pixels within which the pointer selects a point
const PER_NAME = 16; // least pixels for the name of a layer on an axis

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

function drawChart(host, view) {
  const height = 300, width = widthOf(host);
  const isShown = (value, axis) => isKnown(value) && (!axis.log || value > 0);
  const valuesOf = (names, axis) => view.series.flatMap((series) => names.flatMap((name) => series[name])).filter((value) => isShown(value, axis));
  const x = axisOf(view.x, valuesOf(["x"], view.x), width - 80, false);
  const y = axisOf(view.y, valuesOf(["y", "low", "high"], view.y), height - 60, true);
  const { svg, px, py } = plot(host, { height, x, y });
  const answering = [];
  for (const series of view.series) {
    const place = (values) => series.x.map((one, i) => (isShown(one, view.x) && isShown(values[i], view.y) ? [px(one), py(values[i])] : null));
    const own = `tone-${series.tone}`, [middle, low, high] = [series.y, series.low, series.high].map(place);
    for (const run of runs(low.map((point, i) => point && high[i] && [point, high[i]]))) {
      svg.append(element("path", { class: `band ${own}`, d: path([...run.map((both) => both[1]), ...run.map((both) => both[0]).reverse()]) + "z" }));
    }
    for (const run of runs(middle)) svg.append(element("path", { class: `line ${own}${series.dashed ? " dashed" : ""}`, d: path(run) }));
    middle.forEach((point, i) => {
      if (!point) return;
      if (series.marks) svg.append(element("circle", { class: `mark ${own}`, cx: point[0], cy: point[1], r: 3.5 }));
      const name = series.points[i], lines = name === undefined ? [`${figure(series.x[i])}: ${figure(series.y[i])}`] : [name, figure(series.y[i])];
      answering.push({ point, lines: series.name ? [...lines, series.name] : lines });
    });
  }
  svg.addEventListener("pointermove", (event) => answer(host, svg, answering, event));
  svg.addEventListener("pointerleave", () => unpoint(host));
  const names = view.series.filter(({ name }) => name).map(({ name, tone, dashed }) =>
    html("li", {}, html("span", { class: `key tone-${tone}${dashed ? " dashed" : ""}` }), ` ${name}`));
  if (view.series.length > 1) host.append(html("ul", { class: "legend" }, ...names));
}

function answer(host, svg, answering, event) {
  const own = svg.getBoundingClientRect(), [x, y] = [event.clientX - own.left, event.clientY - own.top];
  let nearest = null, least = NEAR;
  for (const one of answering) {
    const away = Math.hypot(one.point[0] - x, one.point[1] - y);
    if (away < least) [nearest, least] = [one, away];
  }
  if (nearest) point(host, nearest.lines, ...nearest.point);
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
