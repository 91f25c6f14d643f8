// What was recorded: loss against κ, and two training runs, played back.

const SECONDS = 6; // to play the runs

function drawKappa({ data }) {
  const { curves } = data.recorded.kappa, every = curves.flatMap((curve) => curve.high), host = byId("kappa-plot");
  const { svg, px, py, top, bottom, left } = plot(host, {
    label: "Held-out loss against κ", height: 260, left: 44,
    x: { domain: [curves[0].x[0], curves[0].x.at(-1)], log: true, ticks: [0.01, 1, 100, 10000], format: (value) => (value > 1000 ? "10k" : plain(value)), label: "κ" },
    y: { domain: [0, 1.05 * Math.max(...every)], ticks: roundTicks(0, Math.max(...every), 4), format: plain },
  });
  curves.forEach((curve, i) => {
    const style = i ? "line dashed ink" : "line ink", root = Math.sqrt(curve.head_dim);
    svg.append(element("line", { class: "chosen", x1: px(root), x2: px(root), y1: top, y2: bottom }));
    svg.append(element("text", { class: i ? "tick end" : "tick", x: px(root) + (i ? -4 : 4), y: top + 12 }, `κ = √${curve.head_dim}`));
    curve.x.forEach((x, j) => svg.append(element("line", { class: "error", x1: px(x), x2: px(x), y1: py(curve.low[j]), y2: py(curve.high[j]) })));
    svg.append(element("path", { class: style, d: path(curve.x.map((x, j) => [px(x), py(curve.y[j])])) }));
    const isUpper = curve.y[0] === Math.max(...curves.map((each) => each.y[0]));
    svg.append(element("text", { class: "tick", x: left + 8, y: py(curve.y[0]) + (isUpper ? -8 : 18) }, `dₖ = ${curve.head_dim}`));
  });
}

function drawRuns({ data }) {
  const { demo } = data.recorded, step = Number(byId("run-step").value);
  byId("run-step-value").textContent = step;
  const x = { domain: [0, demo.steps], ticks: roundTicks(0, demo.steps, 4), format: plain, label: "step" };
  const charts = [["loss", demo.guessing], ["spread", demo.critical]];
  for (const [name, limit] of charts) {
    const most = Math.max(limit, ...Object.values(demo.runs).flatMap((run) => run[name].map(([, value]) => value)));
    const { svg, px, py, left, right } = plot(byId(`run-${name}`), {
      label: `${name} of both runs up to step ${step}`, height: 220, x, y: { domain: [0, 1.05 * most], ticks: roundTicks(0, most, 4), format: plain },
    });
    svg.append(element("line", { class: "limit", x1: left, x2: right, y1: py(limit), y2: py(limit) }));
    for (const [slot, run] of Object.entries(demo.runs)) {
      const points = run[name].filter(([at]) => at <= step);
      svg.append(element("path", { class: `line ${slot}`, d: path(points.map(([at, value]) => [px(at), py(value)])) }));
      const [at, value] = points.at(-1);
      svg.append(element("circle", { class: `dot ${slot}`, cx: px(at), cy: py(value), r: 4 }));
      show(`run-${slot}-${name}`, value);
    }
  }
}

let playing = 0;

function play() {
  const slider = byId("run-step"), last = Number(slider.max);
  const stop = () => {
    cancelAnimationFrame(playing);
    playing = 0;
    byId("play").textContent = "Play";
  };
  if (playing) return stop();
  const from = Number(slider.value) < last ? Number(slider.value) : 0, start = performance.now();
  const frame = (now) => {
    slider.value = Math.min(last, from + Math.round((now - start) / 1000 / SECONDS * last));
    drawRuns({ data });
    if (Number(slider.value) === last) stop();
    else playing = requestAnimationFrame(frame);
  };
  byId("play").textContent = "Pause";
  playing = requestAnimationFrame(frame);
}
