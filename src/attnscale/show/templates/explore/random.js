// Draws that a seed fixes, so that a view that is sent shows the same sample.

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

// ‖q‖² of d standard normal components, without drawing them one by one (Marsaglia and Tsang's gamma).
function chiSquares(seed, d, count) {
  const uniform = uniforms(seed), boosted = d < 2, shape = d / 2 + (boosted ? 1 : 0);
  const offset = shape - 1 / 3, width = 1 / Math.sqrt(9 * offset);
  const normal = () => Math.sqrt(-2 * Math.log(uniform())) * Math.cos(2 * Math.PI * uniform());
  return Float64Array.from({ length: count }, () => {
    for (;;) {
      const x = normal(), cube = (1 + width * x) ** 3;
      if (cube > 0 && Math.log(uniform()) < x * x / 2 + offset * (1 - cube + Math.log(cube))) {
        return 2 * offset * cube * (boosted ? uniform() ** (2 / d) : 1);
      }
    }
  });
}
