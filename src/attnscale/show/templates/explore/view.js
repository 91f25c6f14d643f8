// Everything that is shown, computed from the settings.

const DRAWN_KEYS = 16384; // most keys of a drawn row; expectations use all keys
const SHOWN_WEIGHTS = 32;

const drawnOnce = remembered();

function view(data, settings) {
  const rules = { unscaled: "unscaled", inverse_sqrt: "inverse_sqrt", ...(settings.third ? { third: settings.rule } : {}) };
  return {
    data, settings,
    columns: Object.entries(rules).map(([slot, rule]) => columnOf(data, settings, slot, rule)),
    variance: scoreVariance(settings.d, settings.q, settings.k),
    critical: criticalSpread(settings.n),
  };
}

function columnOf(data, settings, slot, rule) {
  const spreadAt = (changed) => spreadOf(rule, { ...settings, ...changed }), spread = spreadAt({});
  return {
    slot, rule, spreadAt, spread,
    scale: RULES[rule](settings),
    regime: regime(spread, settings.n, data.limits),
    expected: expectedSoftmax(spread, settings.n, data.limits),
    row: drawRow(settings, spread),
  };
}

const spreadOf = (rule, settings) => RULES[rule](settings) * Math.sqrt(scoreVariance(settings.d, settings.q, settings.k));

// One row. For a query of typical length the scores are independent normals, so only scores are drawn, not keys.
function drawRow({ n, seed }, spread) {
  const keys = Math.min(n, DRAWN_KEYS), isSorted = n > SHOWN_WEIGHTS;
  const drawn = drawnOnce(`row ${seed} ${keys}`, () => {
    const z = normals(2 * seed, DRAWN_KEYS).slice(0, keys);
    return isSorted ? z.sort().reverse() : z;
  });
  const weights = softmax(drawn.map((z) => z * spread));
  return { keys, weights, ...rowStatistics(weights) };
}

// Cache of the latest `most` values, so that moving one control recomputes only the values that depend on it.
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
