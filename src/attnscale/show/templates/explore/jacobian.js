// How a small change of each score would move each weight: diag(p) − ppᵀ, for the heaviest keys of the row.

const SHOWN_JACOBIAN = 16;
const STEEPEST = 0.25; // the most p(1 − p) can be

function drawJacobian({ row }) {
  const heaviest = row.weights.slice(0, SHOWN_JACOBIAN), matrix = softmaxJacobian(heaviest);
  matrixMap(byId("jacobian-plot"), matrix, {
    label: `Softmax Jacobian of the ${heaviest.length} heaviest keys`, largest: STEEPEST,
    write: heaviest.length <= 5 ? figure : null,
  });
  show("jacobian-trace", row.gradient_gain);
  show("jacobian-largest", Math.max(...matrix.map((line, i) => line[i])));
}
