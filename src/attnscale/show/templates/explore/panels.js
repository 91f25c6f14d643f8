// Show a number as text, and keep the exact value in data-value.
function show(id, value, written = figure(value)) {
  byId(id).textContent = written;
  byId(id).dataset.value = value;
}

const lineOf = ({ rule, tone, slot }) => ({ name: rule, tone, dashed: slot === "third" });
const whole = (value) => Math.round(value).toLocaleString("en-GB");
const percent = (value) => (value < 0.0005 ? "under 0.1%" : value > 0.9995 && value < 1 ? "over 99.9%" : `${(100 * value).toPrecision(3)}%`);

// The columns at the top: the density of the scores, with σ and σ_c, and the weights of a row, on the same axes.

const STATISTICS = { entropy_ratio: "entropy (% of max)", top1: "top-1 weight", jacobian_trace: "1 − Σp²" };
const SHAPE = Array.from({ length: 81 }, (_, i) => (i - 40) / 8); // −5 … 5, in units of the spread
const normal = (x) => Math.exp(-(x ** 2) / 2) / Math.sqrt(2 * Math.PI);
const REACH = 24, HIGHEST = 0.42; // limits of the axes of every density; fixed, so that columns are comparable

function drawColumns(shown) {
  const { settings, critical, variance, columns } = shown;
  byId("third").hidden = !settings.third;
  byId("third-title").textContent = `q·k, ${settings.rule}`;
  for (const column of columns) {
    const { slot, spread, regime: word } = column;
    drawHill(column, critical);
    drawWeights(column, settings.n);
    show(`${slot}-spread`, spread);
    for (const name of Object.keys(STATISTICS)) show(`${slot}-${name}`, column.expected[name], name === "entropy_ratio" ? percent(column.expected[name]) : undefined);
    byId(`${slot}-verdict`).dataset.regime = word;
    byId(`${slot}-verdict`).textContent = `${word[0].toUpperCase()}${word.slice(1)}: σ is ${figure(spread / critical)} of the critical spread`;
  }
  if (settings.rule === "inverse_dim") byId("third-title").textContent = "q·k ÷ dₖ";
  byId("third-name").textContent = settings.rule === "inverse_dim" ? "÷ dₖ" : settings.rule;
  show("critical", critical);
  show("variance", variance);
  show("keys-shown", settings.n, whole(settings.n));
  byId("row-kind").textContent = settings.n > SHOWN_WEIGHTS ? ` (its ${SHOWN_WEIGHTS} heaviest keys)` : "";
}

function drawHill({ slot, spread, rule }, critical) {
  const { svg, px, py, bottom, left, right } = plot(byId(`${slot}-hill`), {
    label: `Scores under ${rule} have a spread of ${figure(spread)}; the critical spread is ${figure(critical)}`, height: 210, below: 24,
    x: { domain: [-REACH, REACH], ticks: [-20, -10, 0, 10, 20], format: plain },
    y: { domain: [0, HIGHEST], ticks: [] },
  });
  const points = SHAPE.map((x) => [px(x * spread), py(normal(x) / spread)]);
  svg.append(element("path", { class: `hill ${slot}`, d: `${path(points)}L${points.at(-1)[0]} ${bottom}L${points[0][0]} ${bottom}Z` }));
  svg.append(element("path", { class: `line ${slot}`, d: path(points) }));
  for (const [name, size, y] of [["σ", spread, bottom + 28], ["σ_c", critical, bottom + 46]]) {
    const kind = name === "σ" ? `line ${slot} bar` : "limit bar";
    svg.append(element("path", { class: kind, d: `M${px(-size)} ${y - 4}v8M${px(-size)} ${y}H${px(size)}M${px(size)} ${y - 4}v8` }));
    const isWide = px(size) > right - 30;
    svg.append(element("text", { class: "tick", x: isWide ? left : px(size) + 6, y: isWide ? y - 5 : y + 4 }, name.replace("_c", "")));
    if (name === "σ_c" && !isWide) svg.lastChild.append(element("tspan", { dy: 3, "font-size": 9 }, "c"));
  }
}

function drawWeights({ slot, row, rule }, n) {
  const shown = Math.min(SHOWN_WEIGHTS, row.keys);
  const { svg, px, py, bottom, left, right } = plot(byId(`${slot}-weights`), {
    label: `Weights of a row under ${rule}; the largest is ${percent(row.top1)}`, height: 150,
    x: { domain: [0, shown], ticks: [], label: n > SHOWN_WEIGHTS ? "heaviest keys" : `${n} keys` },
    y: { domain: [0, 1], ticks: [0, 0.5, 1], format: (value) => `${100 * value}%` },
  });
  const wide = (right - left) / shown;
  for (let i = 0; i < shown; i++) {
    const y = py(row.weights[i]);
    svg.append(element("rect", { class: `solid ${slot}`, x: px(i) + wide * 0.1, y, width: wide * 0.8, height: bottom - y }));
  }
  svg.append(element("line", { class: "limit", x1: left, x2: right, y1: py(1 / n), y2: py(1 / n) }));
}

// Statistics of each rule as functions of d_k, from 1 to 1024.

const DIMENSIONS = Array.from({ length: 17 }, (_, i) => 2 ** (i * 0.625));
const curvesOnce = remembered(2000);
const expectedOnce = (spread, keys, limits) =>
  curvesOnce(`${spread.toPrecision(9)} ${keys}`, () => expectedSoftmax(spread, keys, limits, DRAWN));

function drawAlong({ data, settings, columns }) {
  const points = columns.map(({ spreadAt }) => DIMENSIONS.map((d) => expectedOnce(spreadAt({ d }), settings.n, data.limits)));
  for (const [name, title] of Object.entries(STATISTICS)) {
    const highest = name === "entropy_ratio" ? 100 : 1; // entropy is shown in percent
    const curves = columns.map((column, i) => ({ ...lineOf(column), x: DIMENSIONS, y: points[i].map((at) => highest * at[name]) }));
    const chosen = { name: `dₖ = ${settings.d}`, x: [settings.d, settings.d], y: [0, highest], dashed: true };
    drawChart(byId(`along-${name}`), {
      label: `${title} along dₖ under ${columns.map(({ rule }) => rule).join(", ")}`, height: 220,
      series: [...curves, chosen], x: { title: "dₖ", log: true, range: [1, 1024] }, y: { range: [0, highest] },
    });
  }
}

// The spread against the critical spread √(2 ln n), for any number of keys.

const LENGTHS = Array.from({ length: 58 }, (_, i) => 2 ** (1 + i / 3));

function drawCritical({ data, settings, columns }) {
  const { n } = settings, { diluted, margin } = data.limits;
  const last = data.controls.find((control) => control.name === "n").high;
  const tallest = clamped(2 * Math.ceil(0.6 * Math.max(...columns.map(({ spread }) => spread))), 6, 16); // wider spreads are drawn at the edge
  const { svg, px, py, left, right, bottom, top } = plot(byId("critical-plot"), {
    label: `Spreads over ${whole(n)} keys, where the critical spread is ${figure(criticalSpread(n))}`, height: 240,
    x: { domain: [2, last], log: true, ticks: [2, 16, 128, 1024, 8192, 65536, last], format: lengthName, label: "keys" },
    y: { domain: [0, tallest], ticks: roundTicks(0, tallest, 4), format: plain },
  });
  const edge = (share) => LENGTHS.map((keys) => [px(keys), py(share * criticalSpread(keys))]);
  const region = (upper, lower) => `${path(upper)}${path([...lower].reverse()).replace("M", "L")}Z`;
  svg.append(element("path", { class: "region sharp", d: region([[left, top], [right, top]], edge(1)) }));
  svg.append(element("path", { class: "region healthy", d: region(edge(margin), [[left, py(diluted)], [right, py(diluted)]]) }));
  svg.append(element("path", { class: "limit-curve", d: path(edge(1)) }));
  svg.append(element("text", { class: "region-name", x: left + 10, y: top + 16 }, "sharp"));
  svg.append(element("text", { class: "region-name end", x: right - 10, y: py(0.6 * criticalSpread(last)) }, "healthy"));
  svg.append(element("line", { class: "chosen", x1: px(n), x2: px(n), y1: top, y2: bottom }));
  for (const { slot, spread, spreadAt } of columns) {
    svg.append(element("path", { class: `line ${slot}`, d: path(LENGTHS.map((keys) => [px(keys), py(spreadAt({ n: keys }))])) }));
    svg.append(element("circle", { class: `dot ${slot}`, cx: px(n), cy: py(spread), r: 5 }));
  }
}

const lengthName = (keys) => (keys >= 2 ** 20 ? "1M" : keys >= 1024 ? `${Math.round(keys / 1024)}k` : String(keys));

// Softmax of typed scores, unscaled and divided by √d_k; and the dot product of a typed query and key.

function drawOwn({ settings }) {
  const { scores, unread, left } = parseScores(settings.scores), root = Math.sqrt(settings.d);
  const raw = softmax(scores), scaled = softmax(scores.map((score) => score / root));
  byId("own-table").replaceChildren(...scores.map((score, i) => html("tr", {},
    cell(score, figureOf(score)), bar(raw[i], "unscaled"), cell(score / root, figure(score / root)), bar(scaled[i], "inverse_sqrt"))));
  show("own-trace-raw", rowStatistics(raw).jacobian_trace);
  show("own-trace-scaled", rowStatistics(scaled).jacobian_trace);
  show("own-root", root);
  const notes = unreadNotes(unread);
  if (left) notes.push(`Showing the first ${MANY_SCORES}.`);
  if (!scores.length) notes.push("Type some numbers, such as 14, 10, 12.");
  byId("own-notes").textContent = notes.join(" ");
}

const unreadNotes = (unread) => (unread.length ? [`Not read as numbers: ${unread.map((word) => `“${word}”`).join(", ")}.`] : []);
const figureOf = (score) => String(score).replace("-", "−");
const cell = (value, text) => html("td", { class: "number", "data-value": value }, text);

function bar(weight, slot) {
  const made = html("td", { class: "share", "data-value": weight });
  const fill = html("span", { class: `fill ${slot}` });
  fill.style.width = `${100 * weight}%`;
  made.append(html("span", { class: "track" }, fill), html("span", { class: "number" }, weight.toFixed(3)));
  return made;
}

function drawVectors({ settings }) {
  const [query, key] = [parseScores(settings.query), parseScores(settings.key)];
  const d = Math.min(query.scores.length, key.scores.length);
  const products = query.scores.slice(0, d).map((value, i) => value * key.scores[i]);
  const dot = products.reduce((a, b) => a + b, 0), scaled = d ? dot / Math.sqrt(d) : NaN;
  byId("vectors-table").replaceChildren(...products.map((product, i) => html("tr", {},
    cell(query.scores[i], figureOf(query.scores[i])), cell(key.scores[i], figureOf(key.scores[i])), cell(product, figureOf(product)))));
  show("vectors-d", d, String(d));
  show("vectors-root", Math.sqrt(d));
  show("vectors-dot", dot, plain(dot));
  show("vectors-scaled", scaled, d ? plain(scaled) : "–");
  const notes = unreadNotes([...query.unread, ...key.unread]);
  if (query.left || key.left) notes.push(`Taking the first ${MANY_SCORES}.`);
  if (query.scores.length !== key.scores.length) {
    notes.push(`q has ${query.scores.length} numbers and k ${key.scores.length}: the dot product takes the first ${d} of each.`);
  }
  byId("vectors-notes").textContent = notes.join(" ");
}

// Recorded results: loss against κ, and two training runs that are played back.

const SECONDS = 6; // duration of the playback
let playing = 0;

function drawKappa({ data }) {
  const { curves } = data.recorded.kappa, top = 1.05 * Math.max(...curves.flatMap((curve) => curve.high));
  const roots = curves.map(({ head_dim: dim }, i) => ({ name: `κ = √${dim}`, tone: i, x: [Math.sqrt(dim), Math.sqrt(dim)], y: [0, top], dashed: true }));
  drawChart(byId("kappa-plot"), {
    label: "Held-out loss against κ",
    series: [...curves.map((curve, i) => ({ ...curve, name: `dₖ = ${curve.head_dim}`, tone: i, marks: true })), ...roots],
    x: { title: "κ", log: true }, y: { title: "held-out loss", range: [0, top] },
  });
}

function drawRuns({ data, columns }) {
  const { steps, runs, guessing, critical } = data.recorded.demo, step = Number(byId("run-step").value);
  const limits = { loss: ["guessing among the values of the sequence", guessing], spread: ["critical spread", critical] };
  byId("run-step-value").textContent = step;
  for (const [name, [limit, height]] of Object.entries(limits)) {
    const series = columns.filter(({ slot }) => runs[slot]).map((column) => {
      const points = runs[column.slot][name].filter(([at]) => at <= step);
      show(`run-${column.slot}-${name}`, points.at(-1)[1]);
      return { ...lineOf(column), x: points.map(([at]) => at), y: points.map(([, value]) => value) };
    });
    const most = Math.max(height, ...Object.values(runs).flatMap((run) => run[name].map(([, value]) => value)));
    drawChart(byId(`run-${name}`), {
      label: `${name} of both runs up to step ${step}`, height: 240,
      series: [...series, { name: limit, x: [0, steps], y: [height, height], dashed: true }],
      x: { title: "step", range: [0, steps] }, y: { range: [0, 1.05 * most] },
    });
  }
}

function play() {
  const slider = byId("run-step"), last = Number(slider.max), from = Number(slider.value) < last ? Number(slider.value) : 0;
  clearInterval(playing);
  playing = playing ? 0 : setInterval(advance, 40, performance.now(), from, last);
  byId("play").textContent = playing ? "Pause" : "Play";
}

function advance(start, from, last) {
  byId("run-step").value = Math.min(last, from + Math.round((performance.now() - start) / 1000 / SECONDS * last));
  drawRuns(view(data, settings));
  if (Number(byId("run-step").value) === last) play();
}
