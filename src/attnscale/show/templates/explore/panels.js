// How far the scores spread: a sample of pairs of q and k, and the normal density of the same spread.

const SHAPE = Array.from({ length: 81 }, (_, i) => (i - 40) / 8); // in units of the spread: −5 … 5
const normal = (x) => Math.exp(-(x ** 2) / 2) / Math.sqrt(2 * Math.PI);
const BINS = 40;
const LEAST_REACH = 12;

function drawSpread({ settings, spread, freezing, scale }) {
  const pairs = drawPairs(settings.seed, settings.d);
  const bars = drawnOnce(`bars ${settings.seed} ${settings.d}`, () => histogram(pairs));
  const reach = Math.max(LEAST_REACH, 2 ** Math.ceil(Math.log2(3 * spread))); // in steps, so that one sees them widen
  const highest = Math.max(1 / Math.sqrt(2 * Math.PI), ...bars.slice(1, -1)) * 1.06 / spread;
  const { svg, px, py, bottom, top } = plot(byId("spread-plot"), {
    label: `Histogram of scores with a spread of ${figure(spread)}`, left: 12,
    x: { domain: [-reach, reach], ticks: roundTicks(-reach, reach, 7), format: plain, label: "score" },
    y: { domain: [0, highest], ticks: [] },
  });
  const width = 8 / BINS * spread;
  bars.forEach((share, i) => {
    const from = (i / BINS * 8 - 4) * spread, at = px(from), height = bottom - py(share / spread);
    if (Math.abs(from) < reach) svg.append(element("rect", { class: "bar", x: at, y: bottom - height, width: Math.max(0.5, px(from + width) - at - 0.6), height }));
  });
  svg.append(element("path", { class: "line first", d: path(SHAPE.map((x) => [px(x * spread), py(normal(x) / spread)])) }));
  for (const edge of [-freezing, freezing]) {
    if (Math.abs(edge) < reach) svg.append(element("line", { class: "limit", x1: px(edge), x2: px(edge), y1: top, y2: bottom }));
  }
  const sampled = spread * Math.sqrt(pairs.reduce((sum, x) => sum + x * x, 0) / pairs.length);
  show("score-scale", scale);
  show("score-spread", spread);
  show("sampled-spread", sampled);
}

function histogram(values) {
  const bars = new Array(BINS).fill(0), share = BINS / 8 / values.length;
  for (const value of values) if (Math.abs(value) < 4) bars[Math.floor((value + 4) / 8 * BINS)] += share;
  return bars;
}
// What softmax makes of one row: its largest weights, side by side.

const SHOWN_WEIGHTS = 40;

function drawWeights({ settings, row }) {
  const shown = Math.min(SHOWN_WEIGHTS, row.keys), top = row.weights[0];
  const ceiling = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1].find((limit) => limit >= top);
  const { svg, px, py, bottom, left, right } = plot(byId("weights-plot"), {
    label: `The ${shown} largest weights of a row; the first is ${percent(top)}`, left: 44,
    x: { domain: [0, shown], ticks: [], label: shown < settings.n ? `the ${shown} heaviest of ${whole(row.keys)} keys` : `all ${shown} keys, heaviest first` },
    y: { domain: [0, ceiling], ticks: roundTicks(0, ceiling, 4), format: (value) => `${plain(100 * value)}%` },
  });
  const wide = (right - left) / shown;
  for (let i = 0; i < shown; i++) {
    const y = py(row.weights[i]);
    svg.append(element("rect", { class: "solid", x: px(i) + wide * 0.1, y, width: wide * 0.8, height: bottom - y }));
  }
  const uniform = py(1 / row.keys);
  svg.append(element("line", { class: "limit", x1: left, x2: right, y1: uniform, y2: uniform }));
  let sum = 0, half = 0;
  while (sum < 0.5) sum += row.weights[half++];
  show("row-top", top, percent(top));
  show("row-half", half, `${whole(half)} ${half === 1 ? "key" : "keys"}`);
  const capped = row.keys < settings.n;
  byId("row-capped").textContent = capped ? `Drawn with ${whole(row.keys)} keys; expectations are for all ${whole(settings.n)}.` : "";
}
// The same statistics along d_k, from 1 to 1024, under the chosen rule and beside another.

const STATISTICS = { entropy_ratio: "first", top1: "second", jacobian_trace: "third" };
const DIMENSIONS = Array.from({ length: 17 }, (_, i) => 2 ** (i * 0.625));

function drawAlong(shown) {
  const { data, settings, rule, expected, spreadAt } = shown;
  const { svg, px, py, bottom, top } = plot(byId("along-plot"), {
    label: `Entropy, top-1 and gradient gain along dₖ under ${rule.name}`, height: 280,
    x: { domain: [1, 1024], log: true, ticks: [1, 4, 16, 64, 256, 1024], format: plain, label: "dₖ" },
    y: { domain: [0, 1], ticks: [0, 0.25, 0.5, 0.75, 1], format: plain },
  });
  const other = besideRule(data, rule);
  const beside = other && ((d) => spreadOf(other, { ...settings, d }));
  const lines = [...(beside ? [["beside", beside]] : []), ["", (d) => spreadAt({ d })]];
  svg.append(element("line", { class: "chosen", x1: px(settings.d), x2: px(settings.d), y1: top, y2: bottom }));
  for (const [kind, spreads] of lines) {
    const points = DIMENSIONS.map((d) => [px(d), expectedOnce(spreads(d), settings.n, data.limits)]);
    for (const [name, colour] of Object.entries(STATISTICS)) {
      svg.append(element("path", { class: `line ${colour} ${kind}`, d: smooth(points.map(([x, at]) => [x, py(at[name])])) }));
    }
  }
  for (const [name, colour] of Object.entries(STATISTICS)) {
    svg.append(element("circle", { class: `dot ${colour}`, cx: px(settings.d), cy: py(expected[name]), r: 4.5 }));
    show(`along-${name}`, expected[name]);
  }
  byId("along-rule").textContent = rule.name;
  byId("along-beside").textContent = other ? `Dotted: ${other.name}.` : "";
}

const curvesOnce = remembered(2000);
const expectedOnce = (spread, keys, limits) =>
  curvesOnce(`${spread.toPrecision(9)} ${keys}`, () => expectedSoftmax(spread, keys, limits, DRAWN));
// The spread against the freezing point √(2 ln n), for any number of keys.

const LENGTHS = Array.from({ length: 58 }, (_, i) => 2 ** (1 + i / 3));

function drawFreezing({ data, settings, spread, spreadAt, freezing, regime: word }) {
  const { n } = settings, { diluted, margin } = data.limits;
  const last = data.controls.find((control) => control.name === "n").high;
  const tallest = clamped(2 * Math.ceil(0.6 * spread), 6, 16); // a wider spread sits on the upper edge
  const { svg, px, py, left, right, bottom, top } = plot(byId("freezing-plot"), {
    label: `A spread of ${figure(spread)} over ${whole(n)} keys; the freezing point is ${figure(freezing)}`, height: 260,
    x: { domain: [2, last], log: true, ticks: [2, 16, 128, 1024, 8192, 65536, last], format: lengthName, label: "keys" },
    y: { domain: [0, tallest], ticks: roundTicks(0, tallest, 4), format: plain },
  });
  const edge = (share) => LENGTHS.map((keys) => [px(keys), py(share * freezingPoint(keys))]);
  const region = (upper, lower) => `${path(upper)}${path([...lower].reverse()).replace("M", "L")}Z`;
  const ceiling = [[left, top], [right, top]], floor = [[left, py(diluted)], [right, py(diluted)]];
  svg.append(element("path", { class: "region sharp", d: region(ceiling, edge(1)) }));
  svg.append(element("path", { class: "region healthy", d: region(edge(margin), floor) }));
  svg.append(element("path", { class: "line limit-curve", d: path(edge(1)) }));
  const levels = [0.3, 0.6].map((share) => py(share * freezingPoint(last))), line = py(spreadAt({ n: last }));
  const clear = Math.abs(levels[0] - line) > Math.abs(levels[1] - line) ? levels[0] : levels[1];
  svg.append(element("text", { class: "region-name", x: left + 10, y: line < top + 24 ? top + 40 : top + 18 }, "sharp"));
  svg.append(element("text", { class: "region-name end", x: right - 10, y: clear }, "healthy"));
  svg.append(element("path", { class: "line first", d: path(LENGTHS.map((keys) => [px(keys), py(spreadAt({ n: keys }))])) }));
  svg.append(element("line", { class: "chosen", x1: px(n), x2: px(n), y1: top, y2: bottom }));
  svg.append(element("circle", { class: "dot first", cx: px(n), cy: py(spread), r: 7 }));
  show("freezing-square", spread ** 2);
  show("freezing-limit", 2 * Math.log(n));
  byId("freezing-words").textContent = `${WORDS[word]} A spread of ${figure(spread)} is ${figure(spread / freezing)} of the freezing point.`;
}

const lengthName = (keys) => (keys >= 2 ** 20 ? "1M" : keys >= 1024 ? `${Math.round(keys / 1024)}k` : String(keys));

const WORDS = {
  sharp: "Sharp: a few keys take most of the weight.",
  diluted: "Diluted: the weights hardly differ.",
  healthy: "Healthy: many keys share the weight, and they differ.",
};

// Scores typed by hand, through softmax as they are and after scaling.

function drawOwn({ settings, rule }) {
  const { scores, unread, left } = parseScores(settings.scores);
  const scale = totalScale(rule, { ...settings, n: Math.max(2, scores.length) });
  const raw = softmax(scores), scaled = softmax(scores.map((score) => score * scale));
  byId("own-table").replaceChildren(...scores.map((score, i) => html("tr", {},
    cell(score, figureOf(score)), bar(raw[i], "second"), cell(score * scale, figure(score * scale)), bar(scaled[i], "first"))));
  const [before, after] = [rowStatistics(raw), rowStatistics(scaled)];
  show("own-gain-raw", before.jacobian_trace);
  show("own-gain-scaled", after.jacobian_trace);
  show("own-scale", scale);
  byId("own-rule").textContent = rule.name;
  const notes = [];
  if (unread.length) notes.push(`Not read as numbers: ${unread.map((word) => `“${word}”`).join(", ")}.`);
  if (left) notes.push(`Showing the first ${MANY_SCORES}.`);
  if (!scores.length) notes.push("Type some numbers, such as 14, 10, 12.");
  byId("own-notes").textContent = notes.join(" ");
}

const figureOf = (score) => String(score).replace("-", "−");
const cell = (value, text) => html("td", { class: "number", "data-value": value }, text);

function bar(weight, colour) {
  const made = html("td", { class: "share", "data-value": weight });
  const fill = html("span", { class: `fill ${colour}` });
  fill.style.width = `${100 * weight}%`;
  made.append(html("span", { class: "track" }, fill), html("span", { class: "number" }, weight.toFixed(3)));
  return made;
}
// One query and one key typed by hand: their products, the sum, and the score after scaling.

function drawVectors({ settings, rule }) {
  const [query, key] = [parseScores(settings.query), parseScores(settings.key)];
  const d = Math.min(query.scores.length, key.scores.length);
  const products = query.scores.slice(0, d).map((value, i) => value * key.scores[i]);
  const dot = products.reduce((a, b) => a + b, 0);
  byId("vectors-table").replaceChildren(...products.map((product, i) => html("tr", {},
    cell(query.scores[i], figureOf(query.scores[i])), cell(key.scores[i], figureOf(key.scores[i])), cell(product, figureOf(product)))));
  const scale = d ? totalScale(rule, { ...settings, d: clamped(d, 1, 1024) }) : NaN;
  show("vectors-d", d, String(d));
  show("vectors-root", Math.sqrt(d));
  show("vectors-dot", dot, figureOf(Number(dot.toPrecision(6))));
  show("vectors-scaled", dot * scale, Number.isFinite(scale) ? figureOf(Number((dot * scale).toPrecision(6))) : "–");
  byId("vectors-rule").textContent = rule.name;
  const unread = [...query.unread, ...key.unread], notes = [];
  if (unread.length) notes.push(`Not read as numbers: ${unread.map((word) => `“${word}”`).join(", ")}.`);
  if (query.left || key.left) notes.push(`Taking the first ${MANY_SCORES}.`);
  if (query.scores.length !== key.scores.length) {
    notes.push(`q has ${query.scores.length} numbers and k ${key.scores.length}: the dot product takes the first ${d} of each.`);
  }
  byId("vectors-notes").textContent = notes.join(" ");
}
