// Derivative of the weights by the scores, diag(p) − ppᵀ; for many keys, only of the heaviest.

const MAPPED = 16; // most keys in a map
const STEEPEST = 0.25; // maximum of p(1 − p)

// Map of a square matrix: one colour for positive entries, one for negative. The square root makes small ones visible.
function matrixMap(host, matrix, { label, largest, faded = () => false, side = 280, write = null }) {
  const size = matrix.length, cell = side / size;
  const box = (i, j) => ({ x: j * cell + 0.5, y: i * cell + 0.5, width: cell - 1, height: cell - 1, rx: Math.min(3, cell / 8) });
  const svg = element("svg", { viewBox: `0 0 ${side} ${side}`, width: side, height: side, role: "img", "aria-label": label });
  svg.append(...matrix.flatMap((row, i) => row.map((_, j) => element("rect", { class: "cell", ...box(i, j) }))));
  matrix.forEach((row, i) => row.forEach((value, j) => {
    const strength = Math.sqrt(Math.min(1, Math.abs(value) / largest)), pale = faded(i, j);
    if (strength > 0.01) {
      svg.append(element("rect", { class: value < 0 ? "negative" : "positive", ...box(i, j), "fill-opacity": (pale ? 0.15 : 1) * strength }));
    }
    if (write) {
      const style = pale ? "number pale" : strength > 0.75 ? "number over" : "number";
      svg.append(element("text", { class: style, x: (j + 0.5) * cell, y: (i + 0.5) * cell + 4 }, write(value)));
    }
  }));
  host.replaceChildren(svg);
}

function drawJacobians({ columns }) {
  byId("jacobians").replaceChildren(...columns.map(({ slot, rule, row }) => {
    const host = html("div", { class: "plot square" });
    const weights = row.keys > MAPPED ? row.weights.slice().sort().reverse().slice(0, MAPPED) : row.weights;
    const label = `Softmax Jacobian of ${whole(row.keys)} keys under ${rule}; its trace is ${figure(row.jacobian_trace)}`;
    matrixMap(host, softmaxJacobian(weights), { label, largest: STEEPEST, side: 240, write: weights.length <= 5 ? figure : null });
    const trace = html("output", { id: `jacobian-${slot}`, "data-value": row.jacobian_trace }, figure(row.jacobian_trace));
    return html("div", {}, html("h3", {}, html("span", { class: `swatch ${slot}` }), `${rule}, trace `, trace), host);
  }));
  byId("jacobian-keys").textContent = columns[0].row.keys > MAPPED ? `The map shows the ${MAPPED} heaviest keys.` : "";
}

// Distribution of the gradient. A gradient a on a row's weights is p ∘ (a − p·a) on its scores, and on its query that
// times scale · σ_k · √d. Drawn for many queries of typical length.

const DRAWN_QUERIES = 160;
const KEYS_A_QUERY = 512;

function passedBack(weights, pulls) {
  let mean = 0, square = 0;
  weights.forEach((p, j) => { mean += p * pulls[j]; });
  weights.forEach((p, j) => { square += (p * (pulls[j] - mean)) ** 2; });
  return Math.sqrt(square);
}

function gradientOf(column, { d, k, n, seed }) {
  const keys = Math.min(n, KEYS_A_QUERY);
  const z = drawnOnce(`queries ${seed}`, () => normals(40000 + seed, DRAWN_QUERIES * KEYS_A_QUERY));
  const pulls = drawnOnce(`pulls ${seed}`, () => normals(60000 + seed, DRAWN_QUERIES * KEYS_A_QUERY));
  const onScores = Float64Array.from({ length: DRAWN_QUERIES }, (_, i) => {
    const own = (drawn) => drawn.subarray(i * KEYS_A_QUERY, i * KEYS_A_QUERY + keys);
    return passedBack(softmax(own(z).map((each) => column.spread * each)), own(pulls));
  }).sort();
  const total = onScores.reduce((sum, size) => sum + size ** 2, 0), curve = [0]; // shares of the squared norm, which is additive
  for (const size of onScores) curve.push(curve.at(-1) + (total ? size ** 2 / total : 0));
  const median = onScores[DRAWN_QUERIES >> 1];
  return { curve, half: curve[DRAWN_QUERIES >> 1], onScores: median, onQuery: median * column.scale * k * Math.sqrt(d) };
}

function drawGradient(shown) {
  const { columns, settings } = shown, found = columns.map((column) => gradientOf(column, settings)), root = found[1];
  byId("gradient-table").replaceChildren(...columns.map(({ slot, rule }, i) => {
    const values = { scores: found[i].onScores / root.onScores, query: found[i].onQuery / root.onQuery, half: found[i].half };
    const written = (name, value) => (name === "half" ? percent(value) : `${figure(value)} ×`);
    return html("tr", {}, html("td", {}, html("span", { class: `swatch ${slot}` }), rule), ...Object.entries(values).map(([name, value]) =>
      html("td", { class: "number", id: `gradient-${slot}-${name}`, "data-value": value }, written(name, value))));
  }));
  drawJacobians(shown);
  const share = (value) => `${plain(100 * value)}%`;
  const { svg, px, py } = plot(byId("received-plot"), {
    label: "Shares of the gradient over queries", height: 250,
    x: { domain: [0, 1], ticks: [0, 0.25, 0.5, 0.75, 1], format: share, label: "of the queries" },
    y: { domain: [0, 1], ticks: [0, 0.25, 0.5, 0.75, 1], format: share },
  });
  svg.append(element("line", { class: "limit", x1: px(0), y1: py(0), x2: px(1), y2: py(1) }));
  columns.forEach(({ slot }, i) => {
    const { curve } = found[i];
    svg.append(element("path", { class: `line ${slot}`, d: path(curve.map((value, at) => [px(at / (curve.length - 1)), py(value)])) }));
  });
}
