// Scores typed by hand, through softmax as they are and after scaling.

function drawOwn({ settings, rule }) {
  const { scores, unread, left } = parseScores(settings.scores);
  const scale = totalScale(rule, { ...settings, n: Math.max(2, scores.length) });
  const raw = softmax(scores), scaled = softmax(scores.map((score) => score * scale));
  byId("own-table").replaceChildren(...scores.map((score, i) => html("tr", {},
    cell(score, figureOf(score)), bar(raw[i], "second"), cell(score * scale, figure(score * scale)), bar(scaled[i], "first"))));
  const [before, after] = [rowStatistics(raw), rowStatistics(scaled)];
  show("own-gain-raw", before.gradient_gain);
  show("own-gain-scaled", after.gradient_gain);
  show("own-scale", scale);
  byId("own-rule").textContent = rule.name;
  const notes = [];
  if (unread.length) notes.push(`Not read as numbers: ${unread.map((word) => `“${word}”`).join(", ")}.`);
  if (left) notes.push(`Showing the first ${MANY_SCORES}.`);
  if (!scores.length) notes.push("Type some numbers, such as 14, 10, 12.");
  byId("own-notes").textContent = notes.join(" ");
}

const figureOf = (score) => String(score).replace("-", "−");
const cell = (value, text) => html("td", { class: "number", "data-value": value }, text);

function bar(weight, colour) {
  const made = html("td", { class: "share", "data-value": weight });
  const fill = html("span", { class: `fill ${colour}` });
  fill.style.width = `${100 * weight}%`;
  made.append(html("span", { class: "track" }, fill), html("span", { class: "number" }, weight.toFixed(3)));
  return made;
}
