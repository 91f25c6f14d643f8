// Controls change the settings, settings redraw the page at once, and the address follows when they come to rest.

const data = JSON.parse(byId("explore-data").textContent);
const REST = 250; // milliseconds without a change
const PANELS = [drawSpread, drawWeights, drawJacobian, drawReceived, drawAlong, drawFreezing, drawVectors, drawOwn, drawProof];
const FREE_NUMBERS = { dim: { name: "dim", low: LIMITS.dim[0], high: LIMITS.dim[1], start: FREE.dim, integer: true } };

let settings, resting;
const ladders = {};

const parameterControl = () => {
  const parameter = ruleNamed(data, settings.rule).parameter;
  return parameter && { ...parameter, name: "number" };
};
const controlNamed = (name) =>
  name === "number" ? parameterControl() : FREE_NUMBERS[name] || data.controls.find((control) => control.name === name);

function redraw() {
  const shown = view(data, settings);
  for (const draw of PANELS) draw(shown);
  showNumbers(shown);
  return shown;
}

function showNumbers({ spread, variance, freezing, expected, row, regime: word, settings: { n, d } }) {
  show("spread", spread);
  show("variance", variance);
  show("freezing", freezing);
  show("expected-entropy", expected.entropy);
  for (const name of Object.keys(STATISTICS)) {
    show(`expected-${name}`, expected[name]);
    show(`row-${name}`, row[name]);
  }
  show("row-spread", row.spread);
  byId("verdict").dataset.regime = word;
  byId("verdict-word").textContent = word;
  byId("verdict-text").textContent = `spread ${figure(spread)} over ${whole(n)} keys at dₖ ${whole(d)}; freezing point ${figure(freezing)}`;
  byId("verdict-more").textContent = `entropy ${figure(expected.entropy_ratio)} · top-1 ${figure(expected.top1)} · gain ${figure(expected.jacobian_trace)}`;
}

// Bring every control to what the settings say.
function showControls() {
  byId("rule").value = settings.rule;
  const rule = ruleNamed(data, settings.rule), parameter = parameterControl();
  byId("rule-formula").textContent = rule.formula.replaceAll("d_k", "dₖ");
  byId("rule-use").textContent = rule.use.replaceAll("d_k", "dₖ");
  byId("number-control").hidden = !parameter;
  if (parameter) byId("number-label").textContent = `${rule.parameter.name}, the rule’s number`;
  for (const input of document.querySelectorAll("[data-setting]")) {
    const control = controlNamed(input.dataset.setting);
    if (!control) continue;
    const value = settings[control.name];
    if (input.type === "range" && input.id !== "dim") {
      const rungs = laddersOf(control);
      input.max = rungs.length - 1;
      input.value = nearest(rungs, value);
      input.setAttribute("aria-valuetext", String(value));
    } else {
      Object.assign(input, { min: control.low, max: control.high });
      if (document.activeElement !== input || Number(input.value) !== value) input.value = value;
    }
  }
  for (const name of Object.keys(TYPED)) if (document.activeElement !== byId(name)) byId(name).value = settings[name];
  byId("dim-value").textContent = settings.dim;
}

function laddersOf(control) {
  const key = control.name === "number" ? settings.rule : control.name;
  return (ladders[key] ??= ladder(control));
}

function change(changed, notes = []) {
  settings = { ...settings, ...changed };
  if ("rule" in changed && !("number" in changed)) settings.number = parameterControl()?.start ?? null;
  showControls();
  redraw();
  tellNotes(notes);
  clearTimeout(resting);
  resting = setTimeout(keepAddress, REST);
}

function keepAddress() {
  const address = toAddress(data, settings);
  if (address !== location.hash && !(address === "#" && !location.hash)) history.pushState(null, "", address);
}

function readAddress() {
  clearTimeout(resting);
  const read = fromAddress(data, location.hash);
  settings = read.settings;
  for (const name of Object.keys(TYPED)) byId(name).value = settings[name];
  showControls();
  redraw();
  tellNotes(read.notes);
}

function tellNotes(notes) {
  byId("notes").replaceChildren(...notes.map((note) => html("li", {}, note)));
  byId("notes").hidden = !notes.length;
}

function listen() {
  byId("rule").replaceChildren(...data.rules.map((rule) => html("option", { value: rule.name }, rule.name)));
  byId("rule").addEventListener("change", (event) => change({ rule: event.target.value }));
  for (const input of document.querySelectorAll("[data-setting]")) {
    const name = input.dataset.setting;
    if (input.type === "range") {
      const value = () => (name === "dim" ? Number(input.value) : laddersOf(controlNamed(name))[input.value]);
      input.addEventListener("input", () => change({ [name]: value() }));
    } else {
      input.addEventListener("change", () => {
        const { value, note } = taken(controlNamed(name), input.value);
        input.value = value;
        change({ [name]: value }, note ? [note] : []);
      });
    }
  }
  for (const name of Object.keys(TYPED)) {
    byId(name).addEventListener("input", (event) => change({ [name]: event.target.value.slice(0, 600) }));
  }
  byId("presets").addEventListener("click", ({ target }) => {
    const preset = target.closest("button");
    if (!preset) return;
    byId("scores").value = preset.dataset.scores;
    change({ scores: preset.dataset.scores, d: Number(preset.dataset.d), rule: data.rules[0].name, t: 1 });
  });
  byId("again").addEventListener("click", () => change({ seed: settings.seed % LIMITS.seed[1] + 1 }));
  byId("reset").addEventListener("click", () => {
    change(startSettings(data));
    for (const name of Object.keys(TYPED)) byId(name).value = settings[name];
  });
  const toStep = (step) => change({ step: clamped(step, ...LIMITS.step) });
  byId("proof-back").addEventListener("click", () => toStep(settings.step - 1));
  byId("proof-next").addEventListener("click", () => toStep(settings.step + 1));
  byId("proof-list").addEventListener("click", ({ target }) => {
    if (!target.dataset.step) return;
    toStep(Number(target.dataset.step));
    byId("proof-list").querySelector("[aria-current]").focus();
  });
  byId("controls").addEventListener("submit", (event) => event.preventDefault());
  addEventListener("popstate", readAddress);
  addEventListener("resize", () => {
    widths = new Map();
    redraw();
  });
}

listen();
readAddress();

// For a console, and for the tests that hold these numbers to the library's.
window.attnscale = {
  data, softmax, softmaxJacobian, groupEnds, groupedWeights, passedBack, rowStatistics, freezingPoint, scoreVariance, fromAddress, toAddress, parseScores,
  expectedSoftmax: (spread, keys) => expectedSoftmax(spread, keys, data.limits),
  regime: (spread, keys) => regime(spread, keys, data.limits),
  at: (changed) => {
    const asked = { ...startSettings(data), ...changed };
    asked.number ??= ruleNamed(data, asked.rule).parameter?.start;
    return view(data, asked);
  },
};
