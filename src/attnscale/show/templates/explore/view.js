// From settings to everything that is shown, in the order in which one follows from the other.

const DRAWN_KEYS = 16384; // of a row that is drawn; expectations are for all its keys
const DRAWN_PAIRS = 6000;

const drawnOnce = remembered();

function view(data, settings) {
  const rule = ruleNamed(data, settings.rule);
  const spreadAt = (changed) => spreadOf(rule, { ...settings, ...changed });
  const spread = spreadAt({});
  return {
    data, settings, rule, spread, spreadAt,
    variance: scoreVariance(settings.d, settings.q, settings.k),
    scale: totalScale(rule, settings),
    freezing: freezingPoint(settings.n),
    regime: regime(spread, settings.n, data.limits),
    expected: expectedSoftmax(spread, settings.n, data.limits),
    row: drawRow(settings, spread),
  };
}

// The rule's scale, divided by the temperature on top of it.
const totalScale = (rule, settings) => scaleOf(rule, settings) / settings.t;
const spreadOf = (rule, settings) => totalScale(rule, settings) * Math.sqrt(scoreVariance(settings.d, settings.q, settings.k));

// One row: given q, its scores are independent normals of spread scale · σ_k · ‖q‖, so no key need be drawn in full.
function drawRow(settings, spread) {
  const keys = Math.min(settings.n, DRAWN_KEYS), { d, seed } = settings;
  const falling = drawnOnce(`falling ${seed} ${keys}`, () => normals(2 * seed, DRAWN_KEYS).slice(0, keys).sort().reverse());
  const length = drawnOnce(`length ${seed} ${d}`, () => Math.sqrt(chiSquares(2 * seed + 1, d, 1)[0] / d));
  const weights = softmax(falling.map((z) => z * length * spread));
  return { keys, spread: length * spread, weights, ...rowStatistics(weights) };
}

// Scores of many pairs of q and k, in units of their spread.
function drawPairs(seed, d) {
  return drawnOnce(`pairs ${seed} ${d}`, () => {
    const lengths = chiSquares(5000 + seed, d, DRAWN_PAIRS), directions = normals(15000 + seed, DRAWN_PAIRS);
    return lengths.map((square, i) => Math.sqrt(square / d) * directions[i]);
  });
}

// Keeps what was made last under a few keys, so that moving one control draws nothing anew that did not change.
function remembered(most = 64) {
  const kept = new Map();
  return (key, make) => {
    if (!kept.has(key)) {
      if (kept.size >= most) kept.delete(kept.keys().next().value);
      kept.set(key, make());
    }
    return kept.get(key);
  };
}
