// Softmax and its expectations over Gaussian scores: attnscale.reference and attnscale.theory, ported to the browser.

const EULER = 0.5772156649015329;
const QUIET = 26; // terms below e^−26 of a row do not change twelve digits
// Every integrand below is analytic with decay at both ends, where a sum over equal steps converges exponentially.
const EXACT = { score: 0.2, gaussian: 0.3, transform: 0.4, extreme: 0.33 };
const DRAWN = { score: 0.32, gaussian: 0.5, transform: 0.6, extreme: 0.6 }; // for curves: error 1e-4, in a third of the time

function softmax(scores) {
  const highest = scores.reduce((a, b) => Math.max(a, b), -Infinity);
  const weights = Float64Array.from(scores, (score) => Math.exp(score - highest));
  const total = weights.reduce((a, b) => a + b, 0);
  return weights.map((weight) => weight / total);
}

// ∂p_i/∂s_j = p_i (δ_ij − p_j)
const softmaxJacobian = (p) => Array.from(p, (a, i) => Array.from(p, (b, j) => a * ((i === j ? 1 : 0) - b)));

function rowStatistics(weights) {
  let entropy = 0, square = 0, top1 = 0;
  for (const p of weights) {
    if (p > 0) entropy -= p * Math.log(p);
    square += p * p;
    if (p > top1) top1 = p;
  }
  const ratio = weights.length > 1 ? entropy / Math.log(weights.length) : NaN;
  return { entropy, entropy_ratio: ratio, top1, jacobian_trace: 1 - square, effective_keys: 1 / square };
}

const scoreVariance = (d, q, k) => d * q * q * k * k;
const criticalSpread = (keys) => Math.sqrt(2 * Math.log(keys));

function regime(spread, keys, limits) {
  if (spread < limits.diluted) return "diluted";
  return spread < limits.margin * criticalSpread(keys) ? "healthy" : "sharp";
}

// Expected entropy, largest weight and 1 − Σp² of softmax over independent N(0, spread²) scores.
// With Z = Σ eˢ and L(t) = E[exp(−t eˢ)], over τ = ln t:
//   E[ln Z]  = −γ − ∫ (L(t)ⁿ − [τ < 0]) dτ        E[Σ p²] = n ∫ t² L″(t) L(t)ⁿ⁻¹ dτ        E[Σ p s] = σ² (1 − E[Σ p²])
//   E[max p] = ∫∫ t eˣ (L(t)ⁿ − B(x, t)ⁿ) dx dτ   where B leaves out of L the scores above x
function expectedSoftmax(spread, keys, limits, steps = EXACT) {
  const logKeys = Math.log(keys);
  if (spread < limits.uniform) return expectation(logKeys, 1 / keys, 1 - 1 / keys, logKeys);
  if (spread > limits.frozen) {
    const frozen = expectedSoftmax(limits.frozen, keys, limits, steps), shrink = limits.frozen / spread;
    const top1 = 1 - (1 - frozen.top1) * shrink;
    return expectation(frozen.entropy * shrink, top1, frozen.jacobian_trace * shrink, logKeys);
  }
  const sharpness = Math.sqrt(2 * logKeys + 1); // the largest of n scores varies by spread / sharpness
  const step = Math.min(steps.score, steps.gaussian * spread / sharpness);
  const gaussian = gaussianGrid(spread, step, Math.sqrt(2 * logKeys + 2 * QUIET + 10));
  const stride = Math.max(1, Math.round(Math.max(steps.transform, steps.extreme * spread / sharpness) / step));
  const outer = stride * step;
  const first = Math.floor(-(gaussian.half * step + logKeys + QUIET) / outer); // here and before, L(t)ⁿ is one
  let survived = 0.5, participation = 0, top = 0;
  for (let index = first + 1; ; index++) {
    const at = laplace(gaussian, index * outer, logKeys);
    if (keys * at.log < -45) break; // here and after, it is zero
    const survives = Math.exp(keys * at.log);
    survived += survives;
    participation += at.second * Math.exp((keys - 1) * at.log);
    top += survives * largest(gaussian, at, keys);
  }
  const logNormaliser = -EULER - outer * (first + survived);
  const trace = 1 - outer * keys * participation;
  const entropy = Math.max(0, logNormaliser - spread * spread * trace);
  return expectation(entropy, Math.min(1, outer * step * top), trace, logKeys);
}

function expectation(entropy, top1, jacobian_trace, logKeys) {
  return { entropy, entropy_ratio: entropy / logKeys, top1, jacobian_trace };
}

function gaussianGrid(spread, step, reach) {
  const half = Math.ceil(reach * spread / step), size = 2 * half + 1;
  const density = new Float64Array(size), above = new Float64Array(size + 1);
  let total = 0;
  for (let i = 0; i < size; i++) total += density[i] = Math.exp(-(((i - half) * step / spread) ** 2) / 2);
  for (let i = size - 1; i >= 0; i--) above[i] = above[i + 1] + (density[i] /= total);
  return { spread, step, half, density, above, term: new Float64Array(size), kept: new Float64Array(size) };
}

// ln L(t) and t² L″(t) at ln t = tau; leaves t eˢ and exp(−t eˢ) of the scores that matter in `term` and `kept`.
function laplace(gaussian, tau, logKeys) {
  const { step, half, density, above, term, kept } = gaussian;
  const last = Math.min(2 * half, Math.floor((3.6 - tau) / step) + half); // scores above make exp(−t eˢ) vanish,
  const from = Math.max(0, Math.ceil((-QUIET - 14 - logKeys - tau) / step) + half); // scores below leave it at one
  let deficit = above[Math.max(0, last + 1)], second = 0;
  for (let i = from; i <= last; i++) {
    const y = term[i] = Math.exp(tau + (i - half) * step), keeps = kept[i] = Math.exp(-y);
    deficit += density[i] * (y < 0.02 ? y * (1 - y / 2 * (1 - y / 3 * (1 - y / 4 * (1 - y / 5)))) : 1 - keeps);
    second += density[i] * y * y * keeps;
  }
  return { tau, from, last, log: Math.log1p(-Math.min(deficit, 1 - 1e-16)), second };
}

// Σ over x of t eˣ (1 − (B/L)ⁿ). B lacks the part of L above x: a sum whose end Euler and Maclaurin correct.
function largest(gaussian, { tau, from, last, log }, keys) {
  const { spread, step, half, density, term, kept } = gaussian;
  const curvature = 1 / spread ** 2, whole = Math.exp(log);
  let above = 0, sum = 0, i = last;
  for (; i >= from; i--) {
    const y = term[i], f = density[i] * kept[i];
    const slope = -(i - half) * step * curvature - y, bend = -curvature - y; // of ln f
    const end = 0.5 + step / 12 * slope - step ** 3 / 720 * (slope ** 3 + 3 * slope * bend - y);
    const lost = keys * Math.log1p(-Math.min(1 - 1e-16, Math.max(0, (above + f * end) / whole)));
    if (lost < -40) break; // below this x, all of it: a geometric series
    above += f;
    sum -= y * Math.expm1(lost);
  }
  return sum + Math.exp(tau + (i + 1 - half) * step) / Math.expm1(step);
}

// Seeded draws, so that a shared address shows the same sample.

function uniforms(seed) {
  let state = (seed * 0x9e3779b9) >>> 0;
  return () => { // a Weyl sequence, its bits mixed
    state = (state + 0x9e3779b9) >>> 0;
    let bits = Math.imul(state ^ (state >>> 16), 0x21f0aaad);
    bits = Math.imul(bits ^ (bits >>> 15), 0x735a2d97);
    return (((bits ^ (bits >>> 15)) >>> 0) + 0.5) / 4294967296;
  };
}

function normals(seed, count) {
  const uniform = uniforms(seed), drawn = new Float64Array(count + 1);
  for (let i = 0; i < count; i += 2) {
    const radius = Math.sqrt(-2 * Math.log(uniform())), angle = 2 * Math.PI * uniform();
    drawn[i] = radius * Math.cos(angle);
    drawn[i + 1] = radius * Math.sin(angle);
  }
  return drawn.subarray(0, count);
}
