// What the page shows is one object of settings; the address holds it, and no value from there is trusted.

const TYPED = { scores: "14, 10, 12", query: "1, 0, 1, 0", key: "0, 1, 1, 1", sentence: "The value of a name is the value of the object." };
const FREE = { ...TYPED, dim: 3, step: 1, seed: 1, third: 0 };
const LIMITS = { dim: [1, 8], step: [1, 7], seed: [1, 9999], third: [0, 1] };
const FIXED = ["unscaled", "inverse_sqrt"]; // the first two columns; the third has a rule of the reader's choice
const THIRD = "inverse_dim";
const MANY_SCORES = 48;

const rounded = (value, control) => (control.integer ? Math.round(value) : Number(value.toPrecision(6)));
const clamped = (value, low, high) => Math.min(high, Math.max(low, value));

// The values a slider stops at: equal ratios, rounded to what one would type, none twice.
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

const ruleNamed = (data, name) => data.rules.find((rule) => rule.name === name);

function startSettings(data) {
  const start = { rule: THIRD, number: null, ...FREE };
  for (const control of data.controls) start[control.name] = control.start;
  return start;
}

function toAddress(data, settings) {
  const start = startSettings(data), parameter = ruleNamed(data, settings.rule).parameter;
  const parts = [];
  for (const [name, value] of Object.entries(settings)) {
    const usual = name === "number" ? parameter && parameter.start : start[name];
    if (value !== null && value !== usual) parts.push(`${name}=${encodeURIComponent(value)}`);
  }
  return `#${parts.join("&")}`;
}

// Settings from an address, with a sentence for everything in it that could not be taken as it stood.
function fromAddress(data, hash) {
  const settings = startSettings(data), notes = [], asked = Object.create(null); // so that no name means more than a name
  for (const part of hash.replace(/^#/, "").split("&").filter(Boolean)) {
    const [name, ...rest] = part.split("=");
    asked[decoded(name)] = decoded(rest.join("="));
  }
  for (const name of Object.keys(asked)) {
    if (!Object.hasOwn(settings, name)) notes.push(`The address names “${short(name)}”, which this page does not have.`);
  }
  if (Object.hasOwn(asked, "rule")) {
    if (FIXED.includes(asked.rule)) settings.third = 0;
    else if (ruleNamed(data, asked.rule)) Object.assign(settings, { rule: asked.rule, third: 1 });
    else notes.push(`There is no rule “${short(asked.rule)}”; showing ${settings.rule}.`);
  }
  const parameter = ruleNamed(data, settings.rule).parameter;
  const free = Object.entries(LIMITS).map(([name, [low, high]]) => ({ name, low, high, integer: true, start: FREE[name] }));
  const numbers = [...data.controls, ...free, ...(parameter ? [{ ...parameter, name: "number" }] : [])];
  if (parameter) settings.number = parameter.start;
  for (const control of numbers) {
    if (!Object.hasOwn(asked, control.name)) continue;
    const { value, note } = taken(control, asked[control.name]);
    settings[control.name] = value;
    if (note) notes.push(note);
  }
  for (const name of Object.keys(TYPED)) if (Object.hasOwn(asked, name)) settings[name] = asked[name].slice(0, 600);
  return { settings, notes };
}

// A number as typed, brought into a control's range; with a sentence where that was needed.
function taken(control, text) {
  const number = text.trim() === "" ? NaN : Number(text);
  if (!Number.isFinite(number)) {
    return { value: control.start, note: `“${short(text)}” is no number for ${control.name}; showing ${control.start}.` };
  }
  const value = clamped(rounded(number, control), control.low, control.high);
  const near = Math.abs(value - number) <= 1e-5 * Math.abs(number);
  return { value, note: near ? "" : `${control.name} = ${short(text)} became ${value}: it goes from ${control.low} to ${control.high}.` };
}

// Scores typed by hand: what could be read, and what could not.
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
