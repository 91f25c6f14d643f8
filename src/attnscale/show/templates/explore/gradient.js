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
  const curves = columns.map((column, i) => {
    const { curve } = found[i];
    return { ...lineOf(column), x: curve.map((_, at) => 100 * at / (curve.length - 1)), y: curve.map((share) => 100 * share) };
  });
  drawChart(byId("received-plot"), {
    label: "Shares of the gradient over queries",
    series: [...curves, { name: "equal shares", x: [0, 100], y: [0, 100], dashed: true }],
    x: { title: "% of the queries", range: [0, 100] }, y: { title: "% of the gradient", range: [0, 100] },
  });
}

// Var[q·k] = d σ_q² σ_k², one step at a time: the formula, its value, and an estimate from a sample.

const PROOF_DRAWS = 20000;
const PROOF_DIM = 8;

function drawProof({ settings }) {
  const { dim, step, q, k, seed } = settings, unit = (q * k) ** 2;
  const sample = drawnOnce(`proof ${seed} ${dim}`, () => sampleTerms(seed, dim));
  const steps = proofSteps(dim, q, k, sample), shown = steps[step - 1];
  byId("proof-list").replaceChildren(...steps.map((each, i) => {
    const button = html("button", { type: "button", "data-step": i + 1, ...(i + 1 === step ? { "aria-current": "step" } : {}) }, each.name);
    return html("li", {}, button);
  }));
  byId("proof-title").textContent = `${step}. ${shown.title}`;
  byId("proof-formula").textContent = shown.formula;
  byId("proof-why").textContent = shown.why;
  const [exact, drawn] = shown.labels || ["by the formula", `sampled, ${whole(PROOF_DRAWS)} draws`];
  byId("proof-value-label").textContent = exact;
  byId("proof-sampled-label").textContent = drawn;
  show("proof-value", shown.value, shown.labels ? whole(shown.value) : figure(shown.value));
  show("proof-sampled", shown.sampled, figure(shown.sampled));
  byId("proof-back").setAttribute("aria-disabled", step === 1);
  byId("proof-next").setAttribute("aria-disabled", step === steps.length);
  matrixMap(byId("proof-plot"), sample.terms.map((row) => row.map((term) => term * unit)), {
    label: `Sampled averages of the ${dim * dim} terms of the squared score`, largest: unit, side: 264,
    faded: (i, j) => !shown.lit(i, j), write: (value) => (dim > 6 ? "" : value.toFixed(unit < 0.1 ? 4 : unit >= 100 ? 0 : 2).replace("-", "−")),
  });
}

function proofSteps(dim, q, k, sample) {
  const unit = (q * k) ** 2, variance = dim * unit, all = () => true, own = (i, j) => i === j, mixed = (i, j) => i !== j;
  const sum = Array.from({ length: dim }, (_, i) => `q${sub(i + 1)}k${sub(i + 1)}`);
  const written = dim > 4 ? `${sum[0]} + ${sum[1]} + … + ${sum[dim - 1]}` : sum.join(" + ");
  const many = (count, one) => (count === 1 ? `1 ${one}` : `${count} ${one}s`);
  return [
    { name: "score", title: "A score is a sum", formula: `q·k = ${written}`, lit: own,
      why: `${many(dim, "product")}. All components are independent, with mean 0 and a spread of ${plain(q)} in q and ${plain(k)} in k.`,
      labels: [dim === 1 ? "product" : "products", "one draw of q·k"], value: dim, sampled: sample.first * q * k },
    { name: "mean", title: "Its mean is zero", formula: "E[qᵢkᵢ] = E[qᵢ] · E[kᵢ] = 0 · 0", lit: own,
      why: "Independent factors: the mean of a product is the product of the means. So the mean of the sum is zero too.",
      value: 0, sampled: sample.mean * q * k },
    { name: "square", title: "So its variance is its mean square", formula: "Var[q·k] = E[(q·k)²] = Σᵢ Σⱼ E[qᵢkᵢ qⱼkⱼ]", lit: all,
      why: `${dim} × ${dim} = ${many(dim * dim, "term")}; the map shows the average of each over ${whole(PROOF_DRAWS)} draws. Below: their sum.`,
      value: variance, sampled: sample.square * unit },
    { name: "own terms", title: `On the diagonal, ${many(dim, "term")}`, formula: "i = j:   E[qᵢ²kᵢ²] = E[qᵢ²] · E[kᵢ²] = σ_q² σ_k²", lit: own,
      why: "A product with itself: squares do not cancel. Below: one of these terms.",
      value: unit, sampled: sample.own * unit },
    { name: "mixed terms", title: dim > 1 ? `Off the diagonal, ${many(dim * dim - dim, "term")}` : "Off the diagonal, nothing", formula: "i ≠ j:   E[qᵢ] · E[kᵢ] · E[qⱼ] · E[kⱼ] = 0", lit: mixed,
      why: dim > 1 ? "Four independent factors of mean zero. Below: the average of these terms." : "A single product has no partner. Choose more dimensions to see mixed terms.",
      value: 0, sampled: sample.mixed * unit },
    { name: "sum", title: "Only the diagonal remains", formula: `Var[q·k] = dₖ · σ_q² σ_k² = ${dim} · ${figure(unit)}`, lit: own,
      why: `The spread is its root, √dₖ · σ_q σ_k = ${figure(Math.sqrt(variance))}: it grows with the square root of dₖ.`,
      value: variance, sampled: sample.square * unit },
    { name: "scale", title: "Divide by the spread, not by dₖ", formula: "Var[q·k / c] = Var[q·k] / c² = 1   for   c = √dₖ · σ_q σ_k", lit: own,
      why: `That is ${figure(Math.sqrt(variance))} here, and √dₖ exactly when q and k have unit spread. Dividing by dₖ would leave ${figure(unit / dim)}.`,
      value: 1, sampled: sample.square / dim },
  ];
}

const sub = (number) => String(number).replace(/\d/g, (digit) => "₀₁₂₃₄₅₆₇₈₉"[digit]);

// Averages of each term qᵢkᵢ qⱼkⱼ over draws of unit spread, and averages of sums of these terms.
function sampleTerms(seed, dim) {
  const drawn = drawnOnce(`terms ${seed}`, () => normals(30000 + seed, 2 * PROOF_DIM * PROOF_DRAWS));
  const terms = Array.from({ length: dim }, () => new Array(dim).fill(0)), products = new Array(dim);
  let mean = 0, first = 0;
  for (let draw = 0; draw < PROOF_DRAWS; draw++) {
    const at = 2 * PROOF_DIM * draw;
    for (let i = 0; i < dim; i++) products[i] = drawn[at + i] * drawn[at + PROOF_DIM + i];
    for (let i = 0; i < dim; i++) for (let j = 0; j < dim; j++) terms[i][j] += products[i] * products[j] / PROOF_DRAWS;
    const score = products.reduce((sum, product) => sum + product, 0);
    mean += score / PROOF_DRAWS;
    if (draw === 0) first = score;
  }
  const square = terms.flat().reduce((sum, term) => sum + term, 0), diagonal = terms.reduce((sum, row, i) => sum + row[i], 0);
  return { terms, first, mean, square, own: diagonal / dim, mixed: dim > 1 ? (square - diagonal) / (dim * dim - dim) : 0 };
}
