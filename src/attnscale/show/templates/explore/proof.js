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
