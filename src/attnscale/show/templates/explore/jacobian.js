// How weights would move with the scores: diag(p) − ppᵀ, heaviest keys first, the lighter ones summed in groups that
// grow. A light key among a thousand has too little weight for its gradient to be seen; hundreds of them have not.

const GROUPS = 16;
const STEEPEST = 0.25; // the most p(1 − p) can be
const VISIBLE = 0.05; // of full colour: what is paler is blank to the eye

// Ranks at which groups end: the heaviest keys alone, then ever more together.
function groupEnds(keys, groups = GROUPS) {
  if (keys <= groups) return Array.from({ length: keys }, (_, i) => i + 1);
  const ends = [];
  for (let i = 1; i <= groups; i++) {
    const last = ends.at(-1) ?? 0, left = groups - i;
    ends.push(left ? Math.min(keys - left, Math.max(last + 1, Math.round(keys ** (i / groups)))) : keys);
  }
  return ends;
}

function groupedWeights(weights) {
  let at = 0;
  return Float64Array.from(groupEnds(weights.length), (end) => {
    let sum = 0;
    while (at < end) sum += weights[at++];
    return sum;
  });
}

function drawJacobian({ row }) {
  const groups = groupedWeights(row.weights), matrix = softmaxJacobian(groups);
  const alone = groups.length === row.keys;
  matrixMap(byId("jacobian-plot"), matrix, {
    label: alone ? `Softmax Jacobian of ${row.keys} keys` : `Softmax Jacobian of ${whole(row.keys)} keys in ${GROUPS} groups`,
    largest: STEEPEST, write: groups.length <= 5 ? figure : null,
  });
  const coloured = matrix.flat().filter((value) => Math.sqrt(Math.abs(value) / STEEPEST) > VISIBLE).length;
  show("jacobian-coloured", coloured / matrix.length ** 2, percent(coloured / matrix.length ** 2));
  byId("jacobian-groups").textContent = alone
    ? "Keys, heaviest first."
    : "Keys, heaviest first; those after the first few in groups that grow, of which a group’s own entry is the sum.";
  show("jacobian-trace", row.gradient_gain);
  show("jacobian-largest", Math.max(...matrix.map((line, i) => line[i])));
}
