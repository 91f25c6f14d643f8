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
