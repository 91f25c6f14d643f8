// Axes: values to pixels, round ticks, and names thinned to those that there is room for.
function extent(values, usable) {
  let low = Infinity, high = -Infinity;
  for (const value of values) {
    if (!usable(value)) continue;
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return low <= high ? [low, high] : [1, 1];
}

// A scale takes a value to a share of its length, from 0 to 1.
function scaleOf(spec, values, { zero = false, air = 0 } = {}) {
  const raw = spec.log ? Math.log10 : (value) => value;
  const usable = (value) => known(value) && (!spec.log || value > 0);
  let [low, high] = (spec.range ?? extent(values, usable)).map(raw);
  if (spec.ticks) [low, high] = [-0.5, spec.ticks.length - 0.5];
  else if (!spec.range) {
    if (zero && !spec.log) [low, high] = [Math.min(0, low), Math.max(0, high)];
    const more = air * (high - low);
    [low, high] = [zero && low === 0 ? 0 : low - more, zero && high === 0 ? 0 : high + more];
  }
  if (high - low < 1e-12) [low, high] = [low - 0.5, high + 0.5];
  return { share: (value) => (raw(value) - low) / (high - low), usable, low, high, log: spec.log };
}

function ticksOf(scale, most) {
  const marks = [];
  if (scale.log) {
    const digits = scale.high - scale.low > 2 ? [1] : scale.high - scale.low > 1 ? [1, 3] : [1, 2, 5];
    const every = Math.max(1, Math.ceil((scale.high - scale.low) / most));
    for (let power = Math.floor(scale.low); power <= Math.ceil(scale.high); power++) {
      if (power % every === 0) marks.push(...digits.map((digit) => digit * 10 ** power));
    }
  } else {
    const rough = (scale.high - scale.low) / most, unit = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((factor) => factor * unit).find((size) => size >= rough * 0.999);
    for (let index = Math.ceil(scale.low / step - 1e-9); index * step <= scale.high + 1e-9 * step; index++) marks.push(index * step);
  }
  return marks.filter((mark) => scale.share(mark) >= -1e-6 && scale.share(mark) <= 1 + 1e-6).map((at) => ({ at, text: told(at) }));
}

// Names at 0, 1, 2, …, as many as fit into so many pixels.
function namesOf(names, length, each) {
  const every = Math.max(1, Math.ceil((names.length * each) / length));
  return names.map((text, at) => ({ at, text })).filter(({ at }) => at % every === 0);
}

function marksOf(spec, scale, length, width, isAcross) {
  if (!spec.ticks) return ticksOf(scale, Math.max(2, Math.min(7, Math.floor(length / (isAcross ? 70 : 36)))));
  const names = spec.ticks.map((name) => cut(name, width));
  const longest = Math.max(1, ...names.map((name) => name.length));
  return namesOf(names, length, isAcross ? 14 + LETTER * longest : 16);
}

const roomFor = (marks) => 12 + LETTER * Math.max(1, ...marks.map(({ text }) => text.length));
const label = (className, attributes, text) => element("text", { class: className, "font-size": 12, fill: theme().ink, ...attributes }, text);

// Both axes about a box, with their titles; `x` and `y` take values to pixels.
function frame(svg, view, box, x, y, marks, hasGrid) {
  const { line, soft } = theme(), middle = (box.left + box.right) / 2;
  const rule = (ends) => svg.append(element("line", { stroke: line, ...ends }));
  for (const { at, text } of marks.x) {
    if (hasGrid) rule({ x1: x(at), x2: x(at), y1: box.top, y2: box.bottom });
    const half = (LETTER * text.length) / 2, held = Math.min(Math.max(x(at), half), box.width - half);
    svg.append(element("g", { class: "xtick" }, label("", { x: held, y: box.bottom + 16, "text-anchor": "middle" }, text)));
  }
  for (const { at, text } of marks.y) {
    if (hasGrid) rule({ x1: box.left, x2: box.right, y1: y(at), y2: y(at) });
    svg.append(element("g", { class: "ytick" }, label("", { x: box.left - 6, y: y(at) + 4, "text-anchor": "end" }, text)));
  }
  svg.append(label("xtitle", { x: middle, y: box.bottom + 36, "text-anchor": "middle", fill: soft, "font-size": 13 }, view.x.title));
  const along = (box.top + box.bottom) / 2;
  svg.append(label("ytitle", {
    x: 12, y: along, transform: `rotate(-90 12 ${px(along)})`, "text-anchor": "middle", fill: soft, "font-size": 13,
  }, view.y.title));
}
