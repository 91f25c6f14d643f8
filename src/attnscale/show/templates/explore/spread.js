// How far the scores spread: a sample of pairs of q and k against the density that theory gives.

const SHAPE = Array.from({ length: 121 }, (_, i) => (i - 60) / 12); // in units of the spread: −5 … 5
const BINS = 40;
const LEAST_REACH = 12;

function drawSpread({ settings, spread, freezing, scale }) {
  const density = drawnOnce(`density ${settings.d}`, () => scoreDensity(settings.d, SHAPE));
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
  svg.append(element("path", { class: "line first", d: path(SHAPE.map((x, i) => [px(x * spread), py(density[i] / spread)])) }));
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
