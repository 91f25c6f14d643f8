// The page shows one object of settings. The address stores it, and values from the address are validated.

const TYPED = { scores: "14, 10, 12", query: "1, 0, 1, 0", key: "0, 1, 1, 1", sentence: "The value of a name is the value of the object." };
const MANY_SCORES = 48;

// The scale of each rule, as a function of the settings. Tests compare these with attnscale.rules.
const RULES = {
  unscaled: () => 1,
  inverse_sqrt: ({ d }) => 1 / Math.sqrt(d),
  inverse_dim: ({ d }) => 1 / d,
  mup: ({ d }) => Math.sqrt(64) / d,
  log_length: ({ d, n }) => 0.43 * Math.log(n) / Math.sqrt(d),
  yarn: ({ d }) => (0.1 * Math.log(4) + 1) ** 2 / Math.sqrt(d),
  temperature: ({ temperature }) => 1 / temperature,
  calibrated: ({ d, q, k }) => 1 / (Math.sqrt(d) * q * k),
};
const FIXED = ["unscaled", "inverse_sqrt"]; // rules of the first two columns; the reader chooses the third

const numbersOf = (data) => [...data.controls, ...data.others];
const rounded = (value, control) => (control.integer ? Math.round(value) : Number(value.toPrecision(6)));

// The values of a slider: equal ratios, rounded to few digits, without duplicates.
function ladder(control) {
  const rungs = new Set([control.low, control.start, control.high]);
  const perRatio = control.integer ? 10 / Math.LN2 : 40 / Math.LN10, span = Math.log(control.high / control.low);
  const count = Math.round(span * perRatio);
  for (let i = 0; i <= count; i++) {
    const value = control.low * Math.exp(span * i / count);
    rungs.add(clamped(control.integer ? Math.round(value) : Number(value.toPrecision(2)), control.low, control.high));
  }
  return [...rungs].sort((a, b) => a - b);
}

const nearest = (rungs, value) =>
  rungs.reduce((best, rung, i) => (Math.abs(Math.log(rung / value)) < Math.abs(Math.log(rungs[best] / value)) ? i : best), 0);

const startSettings = (data) => ({ rule: "inverse_dim", ...TYPED, ...Object.fromEntries(numbersOf(data).map(({ name, start }) => [name, start])) });

function toAddress(data, settings) {
  const start = startSettings(data), changed = Object.entries(settings).filter(([name, value]) => value !== start[name]);
  return `#${changed.map(([name, value]) => `${name}=${encodeURIComponent(value)}`).join("&")}`;
}

// Settings from an address, with a note for each part that was ignored or changed.
function fromAddress(data, hash) {
  const settings = startSettings(data), notes = [];
  for (const part of hash.replace(/^#/, "").split("&").filter(Boolean)) {
    const [name, ...rest] = part.split("=").map(decoded), text = rest.join("="), control = numbersOf(data).find((each) => each.name === name);
    if (control) {
      const { value, note } = taken(control, text);
      settings[name] = value;
      if (note) notes.push(note);
    } else if (Object.hasOwn(TYPED, name)) settings[name] = text.slice(0, 600);
    else if (name !== "rule") notes.push(`This page has no setting “${short(name)}”.`);
    else if (Object.hasOwn(RULES, text) && !FIXED.includes(text)) Object.assign(settings, { rule: text, third: 1 });
    else notes.push(`There is no rule “${short(text)}” for the third column; showing ${settings.rule}.`);
  }
  return { settings, notes };
}

// A typed number, limited to the control's range, with a note if it was changed.
function taken(control, text) {
  const number = text.trim() === "" ? NaN : Number(text);
  if (!Number.isFinite(number)) {
    return { value: control.start, note: `“${short(text)}” is not a number for ${control.name}; showing ${control.start}.` };
  }
  const value = clamped(rounded(number, control), control.low, control.high);
  const near = Math.abs(value - number) <= 1e-5 * Math.abs(number);
  return { value, note: near ? "" : `${control.name} = ${short(text)} became ${value}: the range is ${control.low} to ${control.high}.` };
}

// Numbers in a typed list of scores, and the words that are not numbers.
function parseScores(text) {
  const words = text.split(/[\s,;[\]()]+/).filter(Boolean), scores = [], unread = [];
  for (const word of words) {
    const score = Number(word.replace("−", "-"));
    if (Number.isFinite(score) && Math.abs(score) <= 1e6) scores.push(score);
    else unread.push(short(word));
  }
  return { scores: scores.slice(0, MANY_SCORES), unread, left: Math.max(0, scores.length - MANY_SCORES) };
}

const short = (text) => (text.length > 40 ? `${text.slice(0, 39)}…` : text);

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

// Everything that is shown, computed from the settings.

const DRAWN_KEYS = 16384; // most keys of a drawn row; expectations use all keys
const SHOWN_WEIGHTS = 32;
const TONES = { unscaled: 1, inverse_sqrt: 0, third: 2 };

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
    slot, rule, spreadAt, spread, tone: TONES[slot],
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
