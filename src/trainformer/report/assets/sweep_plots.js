// Plots of a sweep, by hand in SVG: parallel coordinates, best so far, one parameter against the metric.

const isScored = (trial) => isNumber(trial.metric);

// The value of a parameter in a trial. None is a value like any other; only a missing value has no position.
const chosen = (trial, name) => (trial.config[name] === null ? "null" : trial.config[name]);

// -- axes ---------------------------------------------------------------------------------------------------

// The position of values on an axis. Numbers are on a log scale if they were sampled on one.
function scaleOf(values, space, length) {
  const known = values.filter((value) => value !== null && value !== undefined);
  const numeric = known.length > 0 && known.every(isNumber);
  const distinct = [...new Set(known.map((value) => JSON.stringify(value)))];
  if (!numeric || (/^(choice|grid)/.test(space) && distinct.length <= 12)) {
    const order = numeric ? distinct.sort((a, b) => a - b) : distinct.sort();
    const at = (value) => ((order.indexOf(JSON.stringify(value)) + 0.5) / order.length) * length;
    return { at, log: false, named: true, ticks: order.map(JSON.parse).map((value) => [at(value), valueText(value)]) };
  }
  const [low, high] = [Math.min(...known), Math.max(...known)];
  const log = low > 0 && space.startsWith("log_uniform");
  const map = log ? Math.log : (value) => value;
  const [from, to] = low === high ? [map(low) - 1, map(high) + 1] : [map(low), map(high)];
  const at = (value) => ((map(value) - from) / (to - from)) * length;
  const ticks = log ? logTicks(low, high) : evenTicks(low, high);
  return { at, log, named: false, ticks: ticks.map((value) => [at(value), tickText(value)]) };
}

const tickText = (value) => (value && Math.abs(value) < 1e-3 ? value.toExponential(0) : String(+value.toPrecision(4)));

// About four to eight round numbers in a range.
function evenTicks(low, high) {
  if (low === high) return [low];
  const rough = (high - low) / 7, power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 2.5, 5, 10].find((factor) => factor * power >= rough * 0.999);
  const ticks = [];
  for (let n = Math.ceil(low / step); n * step <= high + step * 1e-9; n += 1) ticks.push(+(n * step).toPrecision(12));
  return ticks;
}

function logTicks(low, high) {
  const ticks = [], factors = high / low > 50 ? [1] : [1, 2, 5];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power += 1) {
    ticks.push(...factors.map((factor) => +(factor * 10 ** power).toPrecision(6)));
  }
  const inside = ticks.filter((tick) => tick >= low && tick <= high);
  return inside.length > 1 ? inside : [low, high];
}

// -- trials -------------------------------------------------------------------------------------------------

// Coloured by rank: with a few very bad trials, all others would look alike.
function shadeOf(sweep) {
  const sign = sweep.direction === "minimize" ? -1 : 1;
  const order = sweep.trials.filter(isScored).sort((a, b) => sign * (a.metric - b.metric));
  const share = (trial) => (order.length > 1 ? order.indexOf(trial) / (order.length - 1) : 1);
  return (trial) => (isScored(trial) ? ramp(share(trial)) : "var(--none)");
}

const aboutTrial = (trial) => [`trial ${trial.number}: ${isScored(trial) ? number(trial.metric) : trial.status}`,
  ...Object.entries(trial.config).map(([name, value]) => `${name} = ${valueText(value)}`)].join("\n");

// A mark of a trial; hovering highlights all marks of the same trial.
function pointer(node, trial, board) {
  node.addEventListener("pointerenter", () => board.point(trial.number));
  node.addEventListener("pointerleave", () => board.point(null));
  board.add(trial.number, node);
  return node;
}

const path = (points) => points.map(([x, y], n) => `${n ? "L" : "M"}${x.toFixed(1)},${y.toFixed(1)}`).join("");

function lineOf(trial, points, shade, board) {
  const attributes = { d: path(points), class: `trial ${trial.status}`, "data-trial": trial.number };
  const line = svg("path", attributes, svg("title", {}, aboutTrial(trial)));
  const paint = () => { line.style.stroke = shade(trial); };
  paint();
  themed.push(paint);
  return pointer(line, trial, board);
}

function dotOf(trial, x, y, board) {
  return pointer(svg("circle", { class: `trial ${trial.status}`, cx: x.toFixed(1), cy: y.toFixed(1), r: 4.5 },
    svg("title", {}, aboutTrial(trial))), trial, board);
}

// -- parallel coordinates -----------------------------------------------------------------------------------

const TOP = 34, TALL = 280;

function parallel(sweep, board) {
  const names = Object.keys(sweep.spaces), left = 60, gap = Math.min(280, Math.max(120, 1000 / names.length));
  const axes = [...names.map((name) => ({ name, space: sweep.spaces[name], of: (trial) => chosen(trial, name) })),
    { name: "metric", space: "uniform", of: (trial) => (isScored(trial) ? trial.metric : null) }];
  axes.forEach((each, n) => {
    each.x = left + n * gap;
    each.scale = scaleOf(sweep.trials.map(each.of), each.space, TALL);
    each.range = null;
  });
  const y = (each, trial) => {
    const value = each.of(trial), spread = each.scale.named ? ((trial.number * 7) % 13) - 6 : 0;
    return TOP + TALL + (value === null || value === undefined ? 14 : spread - each.scale.at(value));
  };
  const shade = shadeOf(sweep);
  const lines = [...sweep.trials].reverse().map((trial) => // the best are drawn on top
    lineOf(trial, axes.map((each) => [each.x, y(each, trial)]), shade, board));
  const brushed = () => {
    const outside = (each, height) => each.range && (height < each.range[0] || height > each.range[1]);
    const kept = sweep.trials.filter((trial) => !axes.some((each) => outside(each, y(each, trial))));
    board.keep(kept.map((trial) => trial.number));
  };
  const width = left + names.length * gap + 80;
  return el("div", { class: "scroll" }, svg("svg", {
    class: "parallel", viewBox: `0 0 ${width} ${TOP + TALL + 34}`, role: "img",
    style: { "min-width": `${Math.min(width, 90 * axes.length)}px`, "max-width": `${Math.round(1.25 * width)}px` },
    "aria-label": `${plural(sweep.trials.length, "trial")} in parallel coordinates; the table has the same values`,
  }, lines, axes.map((each) => axisOf(each, brushed))));
}

function axisOf(each, brushed) {
  const name = each.name.length > 22 ? `${each.name.slice(0, 21)}…` : each.name;
  const ticks = each.scale.ticks.map(([place, text]) =>
    svg("text", { x: each.x + 6, y: TOP + TALL - place + 4 }, text.slice(0, 16)));
  return svg("g", {},
    svg("line", { class: "axis", x1: each.x, x2: each.x, y1: TOP, y2: TOP + TALL }),
    svg("text", { class: "name", x: each.x, y: 14, "text-anchor": "middle" }, name,
      svg("title", {}, `${each.name}: ${each.space}`)),
    each.scale.log && svg("text", { class: "kind", x: each.x, y: 26, "text-anchor": "middle" }, "log"),
    ticks, brush(each, brushed));
}

// A drag along an axis filters the trials; a click resets it.
function brush(each, brushed) {
  const high = TALL + 22;
  const band = svg("rect", { class: "brush", x: each.x - 10, width: 20, y: TOP, height: 0 });
  const area = svg("rect", { class: "brushing", x: each.x - 18, y: TOP - 4, width: 36, height: high });
  let start = null;
  const at = (event) => {
    const box = area.getBoundingClientRect();
    return TOP - 4 + ((event.clientY - box.top) / box.height) * high;
  };
  const set = (range) => {
    each.range = range;
    band.setAttribute("y", range ? range[0] : TOP);
    band.setAttribute("height", range ? range[1] - range[0] : 0);
    brushed();
  };
  area.addEventListener("pointerdown", (event) => { start = at(event); area.setPointerCapture(event.pointerId); });
  area.addEventListener("pointermove", (event) => {
    const end = at(event);
    if (start !== null && Math.abs(end - start) > 3) set([Math.min(start, end), Math.max(start, end)]);
  });
  area.addEventListener("pointerup", (event) => {
    if (start !== null && Math.abs(at(event) - start) <= 3) set(null);
    start = null;
  });
  return [band, area];
}

// -- small plots --------------------------------------------------------------------------------------------

// A frame with two axes; `draw(x, y)` returns its content.
function frame(title, xs, ys, draw, caption) {
  const [width, height, left, top] = [320, 200, 50, 10], [w, h] = [width - left - 14, height - top - 34];
  const [across, up] = [xs(w), ys(h)], few = (ticks, most) => Math.ceil(ticks.length / most);
  const some = (ticks, most) => ticks.filter((tick, n) => n % few(ticks, most) === 0);
  const levels = some(up.ticks, 6).map(([place, text]) => [
    svg("line", { class: "grid", x1: left, x2: left + w, y1: top + h - place, y2: top + h - place }),
    svg("text", { x: left - 6, y: top + h - place + 4, "text-anchor": "end" }, text.slice(0, 9))]);
  const below = some(across.ticks, 5).map(([place, text]) =>
    svg("text", { x: left + place, y: height - 14, "text-anchor": "middle" }, text.slice(0, 12)));
  return el("figure", { class: "chart small", "data-title": title },
    el("figcaption", {}, el("strong", {}, title), caption),
    svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": title }, levels, below,
      draw((value) => left + across.at(value), (value) => top + h - up.at(value))));
}

function metricScale(sweep) {
  const values = sweep.trials.filter(isScored).map((trial) => trial.metric);
  return (length) => scaleOf(values, "uniform", length);
}

function bestSoFar(sweep, board) {
  const scored = sweep.trials.filter(isScored).sort((a, b) => a.number - b.number);
  const numbers = sweep.trials.map((trial) => trial.number), sign = sweep.direction === "minimize" ? 1 : -1;
  const xs = (length) => scaleOf([Math.min(...numbers), Math.max(...numbers)], "uniform", length);
  const steps = (x, y) => {
    let best = null, drawn = "";
    scored.filter((trial) => trial.status === "completed").forEach((trial) => {
      const next = best === null || sign * trial.metric < sign * best ? trial.metric : best;
      drawn += best === null ? `M${x(trial.number)},${y(next)}` : `H${x(trial.number)}V${y(next)}`;
      best = next;
    });
    return best === null ? "" : `${drawn}H${x(Math.max(...numbers))}`;
  };
  const statuses = ["completed", "pruned"].filter((status) => scored.some((trial) => trial.status === status));
  const keys = statuses.map((status) => el("span", { class: "key" }, el("i", { class: `swatch ${status}` }), status));
  return frame("best so far", xs, metricScale(sweep), (x, y) => [svg("path", { class: "best", d: steps(x, y) }),
    scored.map((trial) => dotOf(trial, x(trial.number), y(trial.metric), board))], keys);
}

function against(sweep, name, board) {
  const scored = sweep.trials.filter((trial) => isScored(trial) && chosen(trial, name) !== undefined);
  const xs = (length) => scaleOf(sweep.trials.map((trial) => chosen(trial, name)), sweep.spaces[name], length);
  const dots = (x, y) => scored.map((trial) => dotOf(trial, x(chosen(trial, name)), y(trial.metric), board));
  return frame(name, xs, metricScale(sweep), dots, xs(1).log ? muted("log") : null);
}

// The intermediate values of the trials that reported some.
function courses(sweep, board) {
  const course = (trial) => trial.intermediate.filter(([, value]) => isNumber(value));
  const reported = sweep.trials.filter((trial) => course(trial).length > 1), all = reported.flatMap(course);
  if (!reported.length) return null;
  const scale = (column) => (length) => scaleOf(all.map((point) => point[column]), "uniform", length);
  const shade = shadeOf(sweep);
  return frame("intermediate values", scale(0), scale(1), (x, y) => [...reported].reverse().map((trial) =>
    lineOf(trial, course(trial).map(([step, value]) => [x(step), y(value)]), shade, board)), muted("by step"));
}
