// The same statistics along d_k, from 1 to 1024, under the chosen rule and beside another.

const STATISTICS = { entropy_ratio: "first", top1: "second", gradient_gain: "third" };
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
