// What a rule multiplies q·k by. The page knows no rule: it has each as a product of factors of one setting each,
// tabulated by the library, and reads between the lines of the table in logarithms.

function scaleOf(rule, settings) {
  const known = { d: settings.d, n: settings.n, number: settings.number, spread: settings.q * settings.k };
  let log = rule.log_scale;
  for (const factor of rule.factors) log += between(factor.at, factor.log, Math.log(known[factor.of]));
  return Math.exp(log);
}

// A cubic through the four nearest lines; a line where the table has two.
function between(at, values, x) {
  let low = 0, high = at.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (at[middle] <= x) low = middle;
    else high = middle;
  }
  const width = Math.min(4, at.length), from = clamped(low - (width >> 1) + 1, 0, at.length - width);
  let sum = 0;
  for (let i = from; i < from + width; i++) {
    let weight = values[i];
    for (let j = from; j < from + width; j++) if (j !== i) weight *= (x - at[j]) / (at[i] - at[j]);
    sum += weight;
  }
  return sum;
}
