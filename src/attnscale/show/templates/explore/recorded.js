// Recorded results: loss against κ, and two training runs that are played back.

const SECONDS = 6; // duration of the playback
let playing = 0;

function drawKappa({ data }) {
  const { curves } = data.recorded.kappa, top = Math.max(...curves.flatMap((curve) => curve.high));
  const { svg, px, py, bottom } = plot(byId("kappa-plot"), {
    label: "Held-out loss against κ", height: 260,
    x: { domain: [0.01, 10000], log: true, ticks: [0.01, 1, 100, 10000], label: "κ" },
    y: { domain: [0, 1.05 * top], ticks: roundTicks(0, top, 4) },
  });
  curves.forEach(({ head_dim, x, y, low, high }, i) => {
    const root = Math.sqrt(head_dim), own = `tone-ink${i ? " dashed" : ""}`;
    x.forEach((at, j) => svg.append(element("line", { class: "chosen", x1: px(at), x2: px(at), y1: py(low[j]), y2: py(high[j]) })));
    svg.append(element("line", { class: "limit", x1: px(root), x2: px(root), y1: 8, y2: bottom }));
    svg.append(element("text", { class: i ? "tick end" : "tick", x: px(root) + (i ? -4 : 4), y: 20 }, `κ = √${head_dim}`));
    svg.append(element("path", { class: `line ${own}`, d: path(x.map((at, j) => [px(at), py(y[j])])) }));
  });
  byId("kappa-legend").replaceChildren(...curves.map(({ head_dim }, i) =>
    html("span", {}, html("span", { class: `key tone-ink${i ? " dashed" : ""}` }), ` dₖ = ${head_dim}`)));
}

function drawRuns({ data }) {
  const { steps, runs, guessing, critical } = data.recorded.demo, step = Number(byId("run-step").value);
  byId("run-step-value").textContent = step;
  for (const [name, limit] of [["loss", guessing], ["spread", critical]]) {
    const most = Math.max(limit, ...Object.values(runs).flatMap((run) => run[name].map(([, value]) => value)));
    const { svg, px, py, left, right } = plot(byId(`run-${name}`), {
      label: `${name} of both runs up to step ${step}`, x: { domain: [0, steps], ticks: roundTicks(0, steps, 4), label: "step" },
      y: { domain: [0, 1.05 * most], ticks: roundTicks(0, most, 4) },
    });
    svg.append(element("line", { class: "limit", x1: left, x2: right, y1: py(limit), y2: py(limit) }));
    for (const [slot, run] of Object.entries(runs)) {
      const points = run[name].filter(([at]) => at <= step), value = points.at(-1)[1];
      svg.append(element("path", { class: `line ${slot}`, d: path(points.map(([at, each]) => [px(at), py(each)])) }));
      show(`run-${slot}-${name}`, value);
    }
  }
}

function play() {
  const slider = byId("run-step"), last = Number(slider.max), from = Number(slider.value) < last ? Number(slider.value) : 0;
  clearInterval(playing);
  playing = playing ? 0 : setInterval(advance, 40, performance.now(), from, last);
  byId("play").textContent = playing ? "Pause" : "Play";
}

function advance(start, from, last) {
  byId("run-step").value = Math.min(last, from + Math.round((performance.now() - start) / 1000 / SECONDS * last));
  drawRuns({ data });
  if (Number(byId("run-step").value) === last) play();
}
