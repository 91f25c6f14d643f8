// The bundled trained model, run in the page: attnscale.models.CausalTransformer ported to JavaScript.

const ROTARY_BASE = 10000;
const NORM_EPSILON = 2 ** -23; // default of nn.RMSNorm in float32

const loadedOnce = remembered(), ranOnce = remembered(32);
const model = () => loadedOnce("model", loadModel);

function loadModel() {
  const { shape, tensors } = data.model, text = atob(byId("model-weights").textContent);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  const halves = new DataView(bytes.buffer), weights = {};
  let at = 0;
  for (const [name, size] of tensors) {
    const values = weights[name] = new Float32Array(size);
    for (let i = 0; i < size; i++, at += 2) values[i] = fromHalf(halves.getUint16(at, true));
  }
  return { ...shape, weights };
}

function fromHalf(bits) {
  const sign = bits & 0x8000 ? -1 : 1, exponent = (bits >> 10) & 31, fraction = bits & 1023;
  return sign * (exponent ? 2 ** (exponent - 15) * (1 + fraction / 1024) : 2 ** -14 * (fraction / 1024));
}

// x (length, in) times the transpose of a matrix (out, in).
function linear(x, matrix, width) {
  const out = matrix.length / width, length = x.length / width, found = new Float64Array(length * out);
  for (let t = 0; t < length; t++) {
    const row = x.subarray(t * width, (t + 1) * width);
    for (let o = 0, at = 0; o < out; o++) {
      let sum = 0;
      for (let i = 0; i < width; i++) sum += row[i] * matrix[at++];
      found[t * out + o] = sum;
    }
  }
  return found;
}

function rmsNorm(x, gain) {
  const width = gain.length, found = new Float64Array(x.length);
  for (let at = 0; at < x.length; at += width) {
    let square = 0;
    for (let i = 0; i < width; i++) square += x[at + i] ** 2;
    const size = 1 / Math.sqrt(square / width + NORM_EPSILON);
    for (let i = 0; i < width; i++) found[at + i] = x[at + i] * size * gain[i];
  }
  return found;
}

// Rotate the pairs (i, i + half) of every head by the angle of its position.
function rotate(x, heads, dim) {
  const half = dim / 2, width = heads * dim;
  for (let at = 0; at < x.length; at += dim) {
    const position = Math.floor(at / width);
    for (let i = 0; i < half; i++) {
      const angle = position * ROTARY_BASE ** (-i / half), cos = Math.cos(angle), sin = Math.sin(angle);
      const [left, right] = [x[at + i], x[at + i + half]];
      x[at + i] = left * cos - right * sin;
      x[at + i + half] = right * cos + left * sin;
    }
  }
  return x;
}

const gelu = (x) => 0.5 * x * (1 + erf(x / Math.SQRT2));

// Abramowitz and Stegun 7.1.26, within 1.5e-7.
function erf(x) {
  const t = 1 / (1 + 0.3275911 * Math.abs(x));
  const tail = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))));
  return Math.sign(x) * (1 - tail * Math.exp(-x * x));
}

const plus = (x, y) => x.map((value, i) => value + y[i]);

// Logits, loss and the weights of every head, with q·k multiplied by relative/√d_k.
function runModel(tokens, relative = 1) {
  const { weights, layers, heads, head_dim: dim, d_model: width, vocabulary } = model(), length = tokens.length;
  const scale = relative / Math.sqrt(dim), maps = [];
  let x = new Float64Array(length * width);
  tokens.forEach((token, t) => x.set(weights["embedding.weight"].subarray(token * width, (token + 1) * width), t * width));
  for (let layer = 0; layer < layers; layer++) {
    const of = (name) => weights[`blocks.${layer}.${name}.weight`], inner = rmsNorm(x, of("attention_norm"));
    const query = rotate(linear(inner, of("attention.query"), width), heads, dim);
    const key = rotate(linear(inner, of("attention.key"), width), heads, dim);
    const value = linear(inner, of("attention.value"), width), mixed = new Float64Array(length * heads * dim);
    const found = Array.from({ length: heads }, (_, h) => Array.from({ length }, (_, t) => {
      const place = (at) => (at * heads + h) * dim, scores = new Float64Array(t + 1);
      for (let s = 0; s <= t; s++) for (let i = 0; i < dim; i++) scores[s] += scale * query[place(t) + i] * key[place(s) + i];
      const row = softmax(scores);
      for (let s = 0; s <= t; s++) for (let i = 0; i < dim; i++) mixed[place(t) + i] += row[s] * value[place(s) + i];
      return row;
    }));
    maps.push(found);
    x = plus(x, linear(mixed, of("attention.output"), heads * dim));
    const hidden = linear(rmsNorm(x, of("feed_forward_norm")), of("feed_forward.hidden"), width).map(gelu);
    x = plus(x, linear(hidden, of("feed_forward.output"), hidden.length / length));
  }
  const logits = linear(rmsNorm(x, weights["norm.weight"]), weights["head.weight"], width);
  const losses = Array.from(tokens.slice(1), (next, t) => -Math.log(softmax(logits.subarray(t * vocabulary, (t + 1) * vocabulary))[next]));
  return { logits, maps, loss: losses.reduce((a, b) => a + b, 0) / losses.length };
}

// Means over rows that see at least two keys.
function meanOfRows(heads, name) {
  const found = heads.flatMap((rows) => rows.slice(1).map((row) => rowStatistics(row)[name]));
  return found.reduce((a, b) => a + b, 0) / found.length;
}

const bytesOf = (text) => [...new TextEncoder().encode(text).slice(0, data.model.most_bytes)];
const letterOf = (byte) => (byte === 32 ? "␣" : byte > 32 && byte < 127 ? String.fromCharCode(byte) : "·");
const selectedHead = [0, 0];

function chosenScale() {
  const name = document.querySelector("[name=model-scale]:checked").value, dim = data.model.shape.head_dim, tau = 10 ** (byId("tau").value / 20);
  const relative = { inverse_sqrt: 1, unscaled: Math.sqrt(dim), inverse_dim: 1 / Math.sqrt(dim), temperature: 1 / tau }[name];
  return { name, relative, tau };
}

function drawModel({ settings }) {
  const tokens = bytesOf(settings.sentence), { name, relative, tau } = chosenScale();
  const all = new TextEncoder().encode(settings.sentence).length;
  byId("bytes-note").textContent = tokens.length < 2 ? "Type at least two letters." : all > tokens.length ? `The first ${tokens.length} bytes of ${all}.` : "";
  byId("tau-value").textContent = figure(tau);
  if (tokens.length < 2) return;
  const run = (times) => ranOnce(`${tokens} ${times}`, () => runModel(tokens, times));
  const kept = run(1), now = run(relative), [layer, head] = selectedHead;
  const measures = {
    loss: ({ loss }) => loss, entropy: ({ maps }) => meanOfRows(maps.flat(), "entropy_ratio"), top1: ({ maps }) => meanOfRows(maps.flat(), "top1"),
  };
  for (const [measure, of] of Object.entries(measures)) {
    const written = measure === "entropy" ? percent : figure;
    show(`model-${measure}`, of(now), written(of(now)));
    show(`model-${measure}-kept`, of(kept), written(of(kept)));
  }
  for (const [id, run] of [["head-entropy", now], ["head-entropy-kept", kept]]) {
    const entropy = meanOfRows([run.maps[layer][head]], "entropy_ratio");
    show(id, entropy, percent(entropy));
  }
  const slot = { inverse_dim: "third" }[name] || name;
  byId("map-swatch").className = `swatch ${slot}`;
  byId("map-title").textContent = { inverse_sqrt: "Now: the same", unscaled: "Now: no scale", inverse_dim: "Now: ÷ dₖ", temperature: `Now: τ = ${figure(tau)} √dₖ` }[name];
  byId("heads").replaceChildren(...now.maps.flatMap((heads, i) => heads.map((rows, j) => {
    const button = html("button", { type: "button", "data-head": `${i} ${j}`, "aria-label": `layer ${i}, head ${j}`, "aria-pressed": i === layer && j === head });
    button.append(weightMap(rows, slot, 60));
    return button;
  })));
  byId("map-kept").replaceChildren(weightMap(kept.maps[layer][head], "inverse_sqrt", 440, tokens));
  byId("map-now").replaceChildren(weightMap(now.maps[layer][head], slot, 440, tokens));
}

// Rows of weights as squares; with tokens, both axes show their letters.
function weightMap(rows, slot, side, tokens = null) {
  const edge = tokens ? 14 : 0, size = (side - edge) / rows.length;
  const svg = element("svg", { viewBox: `0 0 ${side} ${side}`, width: side, height: side, ...(tokens ? { role: "img", "aria-label": "Weights by query and key" } : {}) });
  const half = { x: edge, y: 0, width: side - edge, height: side - edge };
  svg.append(element("rect", { class: "cell", ...half }));
  rows.forEach((row, t) => row.forEach((weight, s) => {
    if (weight < 0.02) return;
    const box = { x: (edge + s * size).toFixed(2), y: (t * size).toFixed(2), width: (size + 0.1).toFixed(2), height: (size + 0.1).toFixed(2) };
    svg.append(element("rect", { class: `solid ${slot}`, "fill-opacity": Math.sqrt(weight).toFixed(2), ...box }));
  }));
  for (const [t, token] of (tokens || []).entries()) {
    const letter = letterOf(token), middle = (t + 0.5) * size, font = { class: "tick middle", style: `font-size:${Math.min(12, 1.15 * size).toFixed(1)}px` };
    svg.append(element("text", { ...font, x: edge / 2, y: (middle + 3).toFixed(1) }, letter));
    svg.append(element("text", { ...font, x: (edge + middle).toFixed(1), y: side - 3 }, letter));
  }
  return svg;
}

// Show the weight under the pointer as text.
function showCell(event) {
  const svg = event.target.closest("svg"), tokens = bytesOf(settings.sentence);
  if (!svg || tokens.length < 2) return;
  const box = svg.getBoundingClientRect(), edge = 14 / 440 * box.width, size = (box.width - edge) / tokens.length;
  const [s, t] = [Math.floor((event.clientX - box.left - edge) / size), Math.floor((event.clientY - box.top) / size)];
  if (s < 0 || t >= tokens.length || s > t) return;
  const relative = svg.parentElement.id === "map-now" ? chosenScale().relative : 1, [layer, head] = selectedHead;
  const weight = ranOnce(`${tokens} ${relative}`, () => runModel(tokens, relative)).maps[layer][head][t][s];
  byId("map-words").textContent = `Layer ${layer}, head ${head}: query “${letterOf(tokens[t])}” (${t + 1}) gives key “${letterOf(tokens[s])}” (${s + 1}) ${percent(weight)}.`;
}

function listenToModel() {
  for (const input of document.querySelectorAll("[name=model-scale]")) input.addEventListener("change", redraw);
  byId("tau").addEventListener("input", () => {
    document.querySelector("input[value=temperature]").checked = true;
    redraw();
  });
  byId("heads").addEventListener("click", ({ target }) => {
    const button = target.closest("button");
    if (!button) return;
    selectedHead.splice(0, 2, ...button.dataset.head.split(" ").map(Number));
    redraw();
    byId("heads").querySelector("[aria-pressed=true]").focus();
  });
  for (const id of ["map-kept", "map-now"]) byId(id).addEventListener("pointermove", showCell);
}
