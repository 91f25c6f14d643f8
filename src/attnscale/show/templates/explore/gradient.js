// How weights would move with the scores: diag(p) − ppᵀ, heaviest keys first, the lighter ones summed in groups that
// grow. A light key among a thousand has too little weight for its gradient to be seen; hundreds of them have not.

const GROUPS = 16;
const STEEPEST = 0.25; // the most p(1 − p) can be
const VISIBLE = 0.05; // of full colour: what is paler is blank to the eye

// Ranks at which groups end: the heaviest keys alone, then ever more together.
function groupEnds(keys, groups = GROUPS) {
  if (keys <= groups) return Array.from({ length: keys }, (_, i) => i + 1);
  const ends = [];
  for (let i = 1; i <= groups; i++) {
    const last = ends.at(-1) ?? 0, left = groups - i;
    ends.push(left ? Math.min(keys - left, Math.max(last + 1, Math.round(keys ** (i / groups)))) : keys);
  }
  return ends;
}

function groupedWeights(weights) {
  let at = 0;
  return Float64Array.from(groupEnds(weights.length), (end) => {
    let sum = 0;
    while (at < end) sum += weights[at++];
    return sum;
  });
}

function drawJacobian({ row }) {
  const groups = groupedWeights(row.weights), matrix = softmaxJacobian(groups);
  const alone = groups.length === row.keys;
  matrixMap(byId("jacobian-plot"), matrix, {
    label: alone ? `Softmax Jacobian of ${row.keys} keys` : `Softmax Jacobian of ${whole(row.keys)} keys in ${GROUPS} groups`,
    largest: STEEPEST, write: groups.length <= 5 ? figure : null,
  });
  const coloured = matrix.flat().filter((value) => Math.sqrt(Math.abs(value) / STEEPEST) > VISIBLE).length;
  show("jacobian-coloured", coloured / matrix.length ** 2, percent(coloured / matrix.length ** 2));
  byId("jacobian-groups").textContent = alone
    ? "Keys, heaviest first."
    : "Keys, heaviest first; those after the first few in groups that grow, of which a group’s own entry is the sum.";
  show("jacobian-trace", row.jacobian_trace);
  show("jacobian-largest", Math.max(...matrix.map((line, i) => line[i])));
}
// Who receives the gradient. A pull a on a row's weights reaches its scores as p ∘ (a − p·a), and its query with scale ·
// σ_k · √d times the length of that: drawn for many queries, sorted, and summed.

const DRAWN_QUERIES = 160;
const KEYS_A_QUERY = 512;

function passedBack(weights, pulls) {
  let mean = 0, square = 0;
  weights.forEach((p, j) => { mean += p * pulls[j]; });
  weights.forEach((p, j) => { square += (p * (pulls[j] - mean)) ** 2; });
  return Math.sqrt(square);
}

function queryGradients(rule, settings) {
  const { d, k, n, seed } = settings, keys = Math.min(n, KEYS_A_QUERY), spread = spreadOf(rule, settings);
  const z = drawnOnce(`queries ${seed}`, () => normals(40000 + seed, DRAWN_QUERIES * KEYS_A_QUERY));
  const pulls = drawnOnce(`pulls ${seed}`, () => normals(60000 + seed, DRAWN_QUERIES * KEYS_A_QUERY));
  const squares = drawnOnce(`lengths ${seed} ${d}`, () => chiSquares(50000 + seed, d, DRAWN_QUERIES));
  const size = totalScale(rule, settings) * k * Math.sqrt(d);
  return Float64Array.from(squares, (square, i) => {
    const own = Math.sqrt(square / d) * spread, scores = new Float64Array(keys);
    for (let j = 0; j < keys; j++) scores[j] = own * z[i * KEYS_A_QUERY + j];
    return size * passedBack(softmax(scores), pulls.subarray(i * KEYS_A_QUERY, i * KEYS_A_QUERY + keys));
  }).sort();
}

function shared(sizes) {
  const total = sizes.reduce((a, b) => a + b, 0), curve = [0];
  for (const size of sizes) curve.push(curve.at(-1) + (total ? size / total : 0));
  const at = (share) => curve[Math.round(share * sizes.length)];
  return {
    curve, half: at(0.5), tenth: 1 - at(0.9), median: sizes[sizes.length >> 1],
    rms: Math.sqrt(sizes.reduce((a, b) => a + b * b, 0) / sizes.length),
  };
}

const besideRule = (data, rule) => ruleNamed(data, rule.name === "unscaled" ? "inverse_sqrt" : "unscaled");

function drawReceived({ data, settings, rule }) {
  const other = besideRule(data, rule), own = shared(queryGradients(rule, settings));
  const beside = other && shared(queryGradients(other, settings));
  const share = (value) => `${plain(100 * value)}%`;
  const { svg, px, py } = plot(byId("received-plot"), {
    label: `Shares of the gradient over queries under ${rule.name}`, height: 280, left: 48,
    x: { domain: [0, 1], ticks: [0, 0.25, 0.5, 0.75, 1], format: share, label: "of the queries, quietest first" },
    y: { domain: [0, 1], ticks: [0, 0.25, 0.5, 0.75, 1], format: share },
  });
  const line = (curve) => path(curve.map((value, i) => [px(i / (curve.length - 1)), py(value)]));
  svg.append(element("line", { class: "limit", x1: px(0), y1: py(0), x2: px(1), y2: py(1) }));
  if (beside) svg.append(element("path", { class: "line second", d: line(beside.curve) }));
  svg.append(element("path", { class: "line first", d: line(own.curve) }));
  show("received-half", own.half, percent(own.half));
  show("received-tenth", own.tenth, percent(own.tenth));
  byId("received-rule").textContent = rule.name;
  byId("received-beside").hidden = !beside;
  if (!beside) return;
  byId("received-other").textContent = other.name;
  show("received-other-half", beside.half, percent(beside.half));
  show("received-other-tenth", beside.tenth, percent(beside.tenth));
  show("received-times", beside.rms / own.rms);
  show("received-evenness", own.median / own.rms);
  show("received-other-evenness", beside.median / beside.rms);
}
