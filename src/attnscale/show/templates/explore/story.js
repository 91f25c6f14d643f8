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
  for (const name of names) if (TYPED[name]) byId(name).value = settings[name];
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
