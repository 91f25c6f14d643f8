// Controls change the settings, settings redraw the page at once, and the address follows when they come to rest.

const data = JSON.parse(byId("explore-data").textContent);
const REST = 250; // milliseconds without a change
const PANELS = {
  phenomenon: [drawColumns], "vectors-panel": [drawVectors], "proof-panel": [drawProof], "own-panel": [drawOwn, drawCritical],
  "gradient-panel": [drawGradient], "along-panel": [drawAlong], "start-panel": [drawKappa], model: [drawModel], runs: [drawRuns],
};
const FREE_NUMBERS = { dim: { name: "dim", low: LIMITS.dim[0], high: LIMITS.dim[1], start: FREE.dim, integer: true } };

let settings, resting;
const ladders = {}, near = new Set(["phenomenon"]); // panels that are or were near the window: what is far is drawn later

const parameterControl = () => {
  const parameter = ruleNamed(data, settings.rule).parameter;
  return parameter && { ...parameter, name: "number" };
};
const controlNamed = (name) =>
  name === "number" ? parameterControl() : FREE_NUMBERS[name] || data.controls.find((control) => control.name === name);

function redraw() {
  const shown = view(data, settings);
  for (const [id, draws] of Object.entries(PANELS)) {
    if (!byId(id).hidden && (near.has(id) || byId(id).classList.contains("reveal"))) for (const draw of draws) draw(shown);
  }
}

// Bring every control to what the settings say.
function showControls() {
  byId("rule").value = settings.rule;
  byId("third-on").checked = settings.third === 1;
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
  const choices = data.rules.filter(({ name }) => !FIXED.includes(name));
  byId("rule").replaceChildren(...choices.map(({ name }) => html("option", { value: name }, name)));
  byId("rule").addEventListener("change", ({ target }) => change({ rule: target.value, third: 1 }));
  byId("third-on").addEventListener("change", ({ target }) => change({ third: Number(target.checked) }));
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
    byId(name).addEventListener("input", ({ target }) => change({ [name]: target.value.slice(0, 600) }));
  }
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
  byId("play").addEventListener("click", play);
  byId("run-step").addEventListener("input", redraw);
  byId("controls").addEventListener("submit", (event) => event.preventDefault());
  addEventListener("popstate", readAddress);
  addEventListener("resize", () => {
    widths.clear();
    redraw();
  });
  const observer = new IntersectionObserver((entries) => {
    for (const { isIntersecting, target } of entries) if (isIntersecting && !near.has(target.id)) { near.add(target.id); redraw(); }
  }, { rootMargin: "300px" });
  for (const id of ["model", "runs"]) observer.observe(byId(id));
}

listenToStory();
listenToModel();
listen();
readAddress();
goToPanelOf(location.hash.slice(1).split("&").map((part) => part.split("=")[0]));

// For a console, and for the tests that hold these numbers to the library's.
window.attnscale = {
  data, softmax, softmaxJacobian, passedBack, rowStatistics, criticalSpread, scoreVariance, fromAddress, toAddress, parseScores,
  runModel, bytesOf,
  expectedSoftmax: (spread, keys) => expectedSoftmax(spread, keys, data.limits),
  at: ({ rule, number, ...changed }) => {
    const own = ruleNamed(data, rule), asked = { ...startSettings(data), ...changed, number: number ?? own.parameter?.start };
    return { variance: scoreVariance(asked.d, asked.q, asked.k), critical: criticalSpread(asked.n), ...columnOf(data, asked, "third", own) };
  },
};
