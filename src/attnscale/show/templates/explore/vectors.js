// One query and one key typed by hand: their products, the sum, and the score after scaling.

function drawVectors({ settings, rule }) {
  const [query, key] = [parseScores(settings.query), parseScores(settings.key)];
  const d = Math.min(query.scores.length, key.scores.length);
  const products = query.scores.slice(0, d).map((value, i) => value * key.scores[i]);
  const dot = products.reduce((a, b) => a + b, 0);
  byId("vectors-table").replaceChildren(...products.map((product, i) => html("tr", {},
    cell(query.scores[i], figureOf(query.scores[i])), cell(key.scores[i], figureOf(key.scores[i])), cell(product, figureOf(product)))));
  const scale = d ? totalScale(rule, { ...settings, d: clamped(d, 1, 1024) }) : NaN;
  show("vectors-d", d, String(d));
  show("vectors-root", Math.sqrt(d));
  show("vectors-dot", dot, figureOf(Number(dot.toPrecision(6))));
  show("vectors-scaled", dot * scale, Number.isFinite(scale) ? figureOf(Number((dot * scale).toPrecision(6))) : "–");
  byId("vectors-rule").textContent = rule.name;
  const unread = [...query.unread, ...key.unread], notes = [];
  if (unread.length) notes.push(`Not read as numbers: ${unread.map((word) => `“${word}”`).join(", ")}.`);
  if (query.left || key.left) notes.push(`Taking the first ${MANY_SCORES}.`);
  if (query.scores.length !== key.scores.length) {
    notes.push(`q has ${query.scores.length} numbers and k ${key.scores.length}: the dot product takes the first ${d} of each.`);
  }
  byId("vectors-notes").textContent = notes.join(" ");
}
