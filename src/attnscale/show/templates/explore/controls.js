// Controls change the settings and redraw the page at once; the address is updated after a pause.

const data = JSON.parse(byId("data").textContent);
const REST = 250; // milliseconds without a change
const PANELS = {
  phenomenon: [drawColumns], "vectors-panel": [drawVectors], "proof-panel": [drawProof], "own-panel": [drawOwn, drawCritical],
  "gradient-panel": [drawGradient], "along-panel": [drawAlong], "start-panel": [drawKappa], model: [drawModel], runs: [drawRuns],
};

let settings, resting;
const near = new Set(["phenomenon"]); // panels that were near the window; the others are drawn later
const ladders = Object.fromEntries(data.controls.map((control) => [control.name, ladder(control)]));
const controlNamed = (name) => numbersOf(data).find((control) => control.name === name);

function redraw() {
  const shown = view(data, settings);
  for (const [id, draws] of Object.entries(PANELS)) {
    if (!byId(id).hidden && (near.has(id) || byId(id).classList.contains("reveal"))) for (const draw of draws) draw(shown);
  }
}

// Set every control to its value in the settings.
function showControls() {
  byId("rule").value = settings.rule;
  byId("third-on").checked = settings.third === 1;
  for (const input of document.querySelectorAll("[data-setting]")) {
    const { name, low, high } = controlNamed(input.dataset.setting), value = settings[name];
    if (input.type === "range" && ladders[name]) {
      input.max = ladders[name].length - 1;
      input.value = nearest(ladders[name], value);
      input.setAttribute("aria-valuetext", String(value));
    } else {
      Object.assign(input, { min: low, max: high, value });
    }
  }
  for (const name of Object.keys(TYPED)) byId(name).value = settings[name];
  byId("dim-value").textContent = settings.dim;
}

function apply(next, notes) {
  settings = next;
  showControls();
  redraw();
  byId("notes").replaceChildren(...notes.map((note) => html("li", {}, note)));
  byId("notes").hidden = !notes.length;
  clearTimeout(resting);
}

function change(changed, notes = []) {
  apply({ ...settings, ...changed }, notes);
  resting = setTimeout(keepAddress, REST);
}

function keepAddress() {
  const address = toAddress(data, settings);
  if (address !== location.hash && !(address === "#" && !location.hash)) history.pushState(null, "", address);
}

function readAddress() {
  const read = fromAddress(data, location.hash);
  apply(read.settings, read.notes);
}

function listen() {
  byId("rule").addEventListener("change", ({ target }) => change({ rule: target.value, third: 1 }));
  byId("third-on").addEventListener("change", ({ target }) => change({ third: Number(target.checked) }));
  for (const input of document.querySelectorAll("[data-setting]")) {
    const name = input.dataset.setting;
    if (input.type === "range") {
      input.addEventListener("input", () => change({ [name]: ladders[name] ? ladders[name][input.value] : Number(input.value) }));
    } else {
      input.addEventListener("change", () => {
        const { value, note } = taken(controlNamed(name), input.value);
        change({ [name]: value }, note ? [note] : []);
      });
    }
  }
  for (const name of Object.keys(TYPED)) {
    byId(name).addEventListener("input", ({ target }) => change({ [name]: target.value.slice(0, 600) }));
  }
  byId("again").addEventListener("click", () => change({ seed: settings.seed % 9999 + 1 }));
  byId("reset").addEventListener("click", () => change(startSettings(data)));
  byId("proof-back").addEventListener("click", () => change({ step: Math.max(1, settings.step - 1) }));
  byId("proof-next").addEventListener("click", () => change({ step: Math.min(7, settings.step + 1) }));
  byId("proof-list").addEventListener("click", ({ target }) => {
    if (!target.dataset.step) return;
    change({ step: Number(target.dataset.step) });
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

// Six steps, each of which asks for a prediction before it shows the answer, and links to panels.

const PANEL_OF = { query: "vectors-panel", key: "vectors-panel", dim: "proof-panel", step: "proof-panel", scores: "own-panel", sentence: "model", q: "phenomenon", k: "phenomenon" };

function reveal(panel) {
  if (!panel.classList.contains("reveal") || !panel.hidden) return;
  panel.hidden = false;
  widths.clear();
}

function predict(fieldset, button) {
  const right = fieldset.querySelector(`[data-option="${fieldset.dataset.right}"]`), isRight = button === right;
  for (const each of fieldset.querySelectorAll("button")) each.dataset.answer = each === right ? "right" : each === button ? "wrong" : "";
  fieldset.querySelector(".answer").textContent = isRight ? "That is right. See why:" : `It is: ${right.textContent}. See why:`;
  reveal(fieldset.nextElementSibling);
  redraw();
}

function goTo(id) {
  const target = byId(id);
  near.add(id);
  reveal(target);
  redraw();
  target.scrollIntoView({ behavior: matchMedia("(prefers-reduced-motion: reduce)").matches ? "auto" : "smooth" });
}

// Apply the settings of a link, and scroll to the panel that shows them.
function takeView(text) {
  const names = text.split("&").map((part) => part.split("=")[0]), read = fromAddress(data, text).settings;
  change(Object.fromEntries(names.map((name) => [name, read[name]])));
  goToPanelOf(names);
}

function goToPanelOf(names) {
  const panels = names.filter((name) => Object.hasOwn(PANEL_OF, name)).map((name) => PANEL_OF[name]);
  for (const panel of panels) reveal(byId(panel));
  if (panels.length) goTo(panels[0]);
}

function listenToStory() {
  for (const panel of document.querySelectorAll(".reveal")) panel.hidden = true;
  for (const fieldset of document.querySelectorAll(".predict")) {
    fieldset.addEventListener("click", ({ target }) => target.closest("button") && predict(fieldset, target.closest("button")));
  }
  byId("show-all").addEventListener("click", () => {
    for (const panel of document.querySelectorAll(".reveal")) reveal(panel);
    redraw();
  });
  byId("steps").addEventListener("click", (event) => {
    const link = event.target.closest("a");
    if (!link) return;
    event.preventDefault(); // a link would overwrite the settings in the address
    goTo(link.dataset.go);
  });
  for (const id of ["presets", "start-panel"]) {
    byId(id).addEventListener("click", ({ target }) => target.dataset.view && takeView(target.dataset.view));
  }
  byId("example").addEventListener("change", ({ target }) => {
    if (target.value) takeView(target.value);
    byId("more").open = false;
    target.value = "";
  });
}

listenToStory();
listenToModel();
listen();
readAddress();
goToPanelOf(location.hash.slice(1).split("&").map((part) => part.split("=")[0]));

// For the console, and for tests that compare these numbers with the library's.
window.attnscale = {
  data, RULES, softmax, softmaxJacobian, rowStatistics, criticalSpread, scoreVariance, runModel, bytesOf,
  expectedSoftmax: (spread, keys) => expectedSoftmax(spread, keys, data.limits),
  at: ({ rule, ...changed }) => {
    const asked = { ...startSettings(data), ...changed };
    return { variance: scoreVariance(asked.d, asked.q, asked.k), critical: criticalSpread(asked.n), ...columnOf(data, asked, "third", rule) };
  },
};
