// The spread against the freezing point √(2 ln n), for any number of keys; the point can be dragged.

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
  svg.append(element("path", { class: "region frozen", d: region(ceiling, edge(1)) }));
  svg.append(element("path", { class: "region healthy", d: region(edge(margin), floor) }));
  svg.append(element("path", { class: "line limit-curve", d: path(edge(1)) }));
  const levels = [0.3, 0.6].map((share) => py(share * freezingPoint(last))), line = py(spreadAt({ n: last }));
  const clear = Math.abs(levels[0] - line) > Math.abs(levels[1] - line) ? levels[0] : levels[1];
  svg.append(element("text", { class: "region-name", x: left + 10, y: line < top + 24 ? top + 40 : top + 18 }, "frozen"));
  svg.append(element("text", { class: "region-name end", x: right - 10, y: clear }, "healthy"));
  svg.append(element("path", { class: "line first", d: path(LENGTHS.map((keys) => [px(keys), py(spreadAt({ n: keys }))])) }));
  svg.append(element("line", { class: "chosen", x1: px(n), x2: px(n), y1: top, y2: bottom }));
  svg.append(element("circle", { class: "dot first handle", cx: px(n), cy: py(spread), r: 7 }));
  svg.dataset.from = left;
  svg.dataset.to = right;
  show("freezing-square", spread ** 2);
  show("freezing-limit", 2 * Math.log(n));
  byId("freezing-words").textContent = freezingWords(spread, freezing, word, spreadAt);
}

const lengthName = (keys) => (keys >= 2 ** 20 ? "1M" : keys >= 1024 ? `${Math.round(keys / 1024)}k` : String(keys));

function freezingWords(spread, freezing, word, spreadAt) {
  const now = spread >= freezing ? "Frozen: a handful of keys takes everything."
    : word === "saturated" ? "Saturated: close to freezing, a few keys take most of the weight."
    : word === "diluted" ? "Diluted: the weights hardly differ."
    : "Healthy: many keys share the weight, and they differ.";
  const [few, many] = [LENGTHS[0], LENGTHS.at(-1)], fixed = Math.abs(spreadAt({ n: few }) / spreadAt({ n: many }) - 1) < 1e-9;
  const where = fixed ? thawWords(spread) : passWords(spreadAt);
  return `${now} A spread of ${figure(spread)} is ${figure(spread / freezing)} of the freezing point. ${where}`;
}

// A spread that is the same for every number of keys is frozen below e^(σ²/2) of them.
function thawWords(spread) {
  const thaws = Math.exp(spread ** 2 / 2);
  if (thaws <= 2) return "No row of two keys or more would freeze.";
  if (thaws > LENGTHS.at(-1)) return `It stays frozen below e^${plain(spread ** 2 / 2)} keys, more than any row has.`;
  return `It freezes below ${whole(Math.ceil(thaws))} keys.`;
}

// A rule that looks at the number of keys moves the spread with it: where the two lines cross.
function passWords(spreadAt) {
  const frozen = (keys) => spreadAt({ n: keys }) >= freezingPoint(keys);
  const after = LENGTHS.findIndex((keys, i) => i > 0 && frozen(keys) !== frozen(LENGTHS[i - 1]));
  const still = "This rule moves the spread with the keys";
  if (after < 0) return `${still}, and it ${frozen(2) ? "is frozen for any number" : "never freezes"}.`;
  let [low, high] = [LENGTHS[after - 1], LENGTHS[after]];
  while (high - low > 0.5) [low, high] = frozen((low + high) / 2) === frozen(low) ? [(low + high) / 2, high] : [low, (low + high) / 2];
  return `${still}: it ${frozen(high) ? "freezes" : "thaws"} over more than ${whole(low)} keys.`;
}

// Where a pointer is, in keys.
function keysUnder(event, svg, control) {
  const box = svg.getBoundingClientRect(), width = svg.viewBox.baseVal.width;
  const x = (event.clientX - box.left) * width / box.width, { from, to } = svg.dataset;
  const share = clamped((x - from) / (to - from), 0, 1);
  return Math.round(control.low * (control.high / control.low) ** share);
}
