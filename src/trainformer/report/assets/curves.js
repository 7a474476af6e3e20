// The curves: one uPlot per metric, over all runs that are switched on, with one cursor and one zoom for all.

const HEIGHT = 230;
const SMOOTHED_OVER = 200; // with so many points, each is smoothed with its neighbour
const view = { x: "step", log: false, smoothing: 0, zoom: null, off: new Set() };
const charts = [];

const PARTS = ["train", "val", "test", "eval"];
const splitOf = (name) => (PARTS.includes(name.split("/")[0]) && name.includes("/") ? name.split("/")[0] : "");

// The split of a metric, with the name of the validation set if there are several: "train", "val", "val clean".
function partOf(name) {
  const [split, set, metric] = name.split("/");
  const isOfSet = metric && splitOf(name) && (report.val_sets || []).includes(set);
  return isOfSet ? `${split} ${set}` : splitOf(name);
}

// -- what is drawn ------------------------------------------------------------------------------------------

function lookUp(clock, column, step) {
  const { steps } = clock, values = clock[column];
  let low = 0, high = steps.length - 1;
  if (high < 0) return null;
  if (step <= steps[0]) {
    if (values[0] === null) return null;
    return steps[0] > 0 && column === "epochs" ? (values[0] * step) / steps[0] : values[0];
  }
  if (step >= steps[high]) return values[high];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (steps[middle] <= step) low = middle; else high = middle;
  }
  if (values[low] === null || values[high] === null) return values[low];
  return values[low] + ((values[high] - values[low]) * (step - steps[low])) / (steps[high] - steps[low]);
}

function position(run, step) {
  if (view.x === "step") return step;
  return lookUp(run.clock, view.x === "epoch" ? "epochs" : "seconds", step);
}

// An exponential moving average with bias correction (as in Adam). The decay depends on the distance on the axis, not on
// the number of points: dense and sparse curves look equally smooth.
function smoothed(xs, values, amount) {
  const unit = (xs[xs.length - 1] - xs[0]) / SMOOTHED_OVER || 1;
  let average = 0, weight = 0, before = xs[0] - unit;
  return values.map((value, n) => {
    if (value === null) return null;
    const kept = amount ** ((xs[n] - before) / unit);
    before = xs[n];
    average = kept * average + (1 - kept) * value;
    weight = kept * weight + (1 - kept);
    return average / weight;
  });
}

function curvesOf(plot) {
  const curves = [];
  report.runs.forEach((run, place) => {
    plot.names.forEach((name) => {
      const series = run.series[name];
      if (!series || view.off.has(place)) return;
      const part = partOf(name), [steps, values] = series;
      const xs = [], ys = [], odd = [];
      let hidden = 0, before = -Infinity;
      steps.forEach((step, n) => {
        const x = position(run, step), y = values[n];
        if (x === null || x <= before) return;
        before = x;
        xs.push(x);
        if (typeof y === "string") odd.push([x, y]);
        else if (view.log && y <= 0) hidden += 1;
        ys.push(typeof y === "string" || (view.log && y <= 0) ? null : y);
      });
      if (!xs.length) return;
      const tone = report.runs.length === 1 ? plot.names.indexOf(name) : place;
      curves.push({ run, place, name, part, tone, xs, ys, odd, hidden });
    });
  });
  return curves;
}

// All plots show the same range, even if a metric starts later.
function extent() {
  const ends = report.runs.filter((run, place) => run.clock.steps.length && !view.off.has(place))
    .flatMap((run) => [run.clock.steps[0], run.clock.steps.at(-1)].map((step) => position(run, step)))
    .filter((x) => x !== null);
  if (!ends.length) return [0, 1];
  const [low, high] = [Math.min(...ends), Math.max(...ends)];
  return low === high ? [low - 1, high + 1] : [low, high];
}

function aligned(curves) {
  const tables = curves.map((curve) => [
    curve.xs, curve.ys, view.smoothing ? smoothed(curve.xs, curve.ys, view.smoothing) : curve.ys.map(() => null),
  ]);
  return tables.length ? uPlot.join(tables) : [[]];
}

// -- one plot -----------------------------------------------------------------------------------------------

function axisNumber(value) {
  if (value === null) return "";
  const size = Math.abs(value);
  if (size >= 1e9) return `${+(value / 1e9).toPrecision(3)}G`;
  if (size >= 1e6) return `${+(value / 1e6).toPrecision(3)}M`;
  if (size >= 1e4) return `${+(value / 1e3).toPrecision(4)}k`;
  return size && size < 1e-3 ? value.toExponential().replace("e-", "e−") : String(+value.toPrecision(6));
}

function axisTime(value) {
  if (value < 120) return `${+value.toPrecision(3)}s`;
  return value < 7200 ? `${+(value / 60).toPrecision(3)}m` : `${+(value / 3600).toPrecision(3)}h`;
}

const axis = (more) => ({
  stroke: () => ink("--muted"), font: "11px system-ui, sans-serif",
  grid: { stroke: () => ink("--grid"), width: 1 }, ticks: { stroke: () => ink("--grid"), width: 1, size: 4 }, ...more,
});

// The value of a curve nearest to the cursor: runs log at different steps.
function nearest(u, series, index, x) {
  if (series === 0) return index;
  const values = u.data[series], xs = u.data[0];
  const has = (place) => values[place] !== null && values[place] !== undefined;
  if (index === null || index === undefined || has(index)) return index;
  let low = index, high = index;
  while (low >= 0 && !has(low)) low -= 1;
  while (high < xs.length && !has(high)) high += 1;
  if (low < 0 && high >= xs.length) return null;
  const best = low < 0 ? high : high >= xs.length ? low : x - xs[low] <= xs[high] - x ? low : high;
  // No value beyond either end of a curve.
  const reach = (u.scales.x.max - u.scales.x.min) * 0.02;
  return (low < 0 || high >= xs.length) && Math.abs(xs[best] - x) > reach ? null : best;
}

function lines(curves) {
  const line = (curve, more) => ({
    label: `${curve.run.name} ${curve.name}`, width: 1.6,
    dash: report.runs.length > 1 && curve.part && curve.part !== "train" ? [7, 3] : undefined, ...more,
  });
  return curves.flatMap((curve) => [
    line(curve, {
      stroke: () => (view.smoothing ? faint(colour(curve.tone), 0.25) : colour(curve.tone)),
      points: { show: curve.xs.length < 60, size: 4, width: 1, fill: () => colour(curve.tone) },
    }),
    line(curve, { stroke: () => colour(curve.tone), points: { show: false }, width: 2, auto: false }),
  ]);
}

function drawMarks(u, curves) {
  const { ctx, bbox } = u, ratio = devicePixelRatio;
  ctx.save();
  ctx.beginPath();
  ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
  ctx.clip();
  ctx.lineWidth = ratio;
  for (const { run, tone } of new Map(curves.map((curve) => [curve.place, curve])).values()) {
    for (const mark of run.marks) {
      const x = position(run, mark.step);
      if (x === null) continue;
      const left = Math.round(u.valToPos(x, "x", true)) + 0.5, whole = mark.kind === "resumed";
      ctx.strokeStyle = report.runs.length === 1 ? (isDark() ? "#bbbbbb" : "#555555") : colour(tone);
      ctx.setLineDash(whole ? [4 * ratio, 4 * ratio] : []);
      ctx.beginPath();
      ctx.moveTo(left, whole ? bbox.top : bbox.top + bbox.height - 8 * ratio);
      ctx.lineTo(left, bbox.top + bbox.height);
      ctx.stroke();
    }
  }
  ctx.setLineDash([]);
  ctx.font = `bold ${13 * ratio}px system-ui, sans-serif`;
  ctx.textAlign = "center";
  for (const curve of curves) {
    ctx.fillStyle = colour(curve.tone);
    for (const [x, value] of curve.odd) {
      const sign = { NaN: "×", Infinity: "▲", "-Infinity": "▼" }[value];
      const top = value === "Infinity" ? bbox.top + 13 * ratio : bbox.top + bbox.height - 4 * ratio;
      ctx.fillText(sign, u.valToPos(x, "x", true), top);
    }
  }
  ctx.restore();
}

function tooltipOf(chart, u) {
  const { left, idxs } = u.cursor, tip = chart.tip;
  const rows = [];
  chart.curves.forEach((curve, n) => {
    const place = idxs && idxs[1 + 2 * n];
    if (place === null || place === undefined) return;
    const raw = u.data[1 + 2 * n][place], x = u.data[0][place];
    const smooth = u.data[2 + 2 * n][place];
    if (raw === null || raw === undefined) return;
    rows.push([view.smoothing ? smooth : raw, curve, raw, x]);
  });
  const x = u.posToVal(left, "x"), reach = u.posToVal(6, "x") - u.posToVal(0, "x");
  for (const curve of chart.curves) {
    const found = curve.odd.find(([place]) => Math.abs(place - x) < reach);
    if (found) rows.push([found[1], curve, found[1], found[0]]);
  }
  tip.hidden = !rows.length || left < 0;
  if (tip.hidden) return;
  const at = rows[0][3], split = new Set(chart.curves.map((curve) => curve.part)).size > 1;
  const many = report.runs.length > 1;
  const events = chart.curves.flatMap((curve) => curve.run.marks
    .filter((mark) => Math.abs(position(curve.run, mark.step) - x) < reach)
    .map((mark) => `${mark.kind} at step ${number(mark.step)}${many ? ` (${curve.run.name})` : ""}`));
  tip.replaceChildren(
    el("div", { class: "at" }, view.x === "time" ? duration(at) : `${view.x} ${number(at)}`),
    el("table", {}, rows.slice(0, 20).map(([value, curve, raw, place]) => el("tr", {},
      el("td", {}, el("i", { class: "swatch", style: { background: colour(curve.tone) } })),
      el("td", {}, [many && curve.run.name, (split || !many) && (curve.part || curve.name)].filter(Boolean)
        .join(" · ")),
      el("td", { class: "value", "data-name": curve.name, "data-run": curve.run.name }, number(value, 6)),
      el("td", { class: "raw" }, view.smoothing && typeof raw === "number" ? `raw ${number(raw, 6)}` : ""),
      el("td", { class: "raw" }, place !== at && view.x !== "time" ? `at ${number(place, 4)}` : "")))),
    ...[...new Set(events)].map((text) => el("div", { class: "event" }, text)));
  place(chart, u.over.getBoundingClientRect(), left);
}

// Below or above the plot, so that the curves stay visible; beside the cursor if there is no space.
function place(chart, over, left) {
  const { tip, box } = chart, outer = box.getBoundingClientRect(), high = tip.offsetHeight, wide = tip.offsetWidth;
  const room = document.documentElement, x = over.left + left;
  const under = over.bottom + 26, above = over.top - high - 8;
  const top = under + high < room.clientHeight ? under : above > 0 ? above : Math.max(4, room.clientHeight - high - 4);
  const beside = top !== under && top !== above;
  const wanted = beside ? (left > over.width / 2 ? x - wide - 14 : x + 14) : x - wide / 2;
  tip.style.left = `${Math.max(4, Math.min(wanted, room.clientWidth - wide - 4)) - outer.left}px`;
  tip.style.top = `${top - outer.top}px`;
}

// Rounded to 1, 2, 3 ... times a power of ten, not to powers: most losses span less than one.
const nextDigit = (digit) => Math.floor(digit) + 1;
const aroundLog = (u, low, high) => [oneDigit(low || 1, Math.floor), oneDigit(high || 10, nextDigit)];

function oneDigit(value, round) {
  const power = 10 ** Math.floor(Math.log10(value));
  return +(Math.max(1, round(value / power)) * power).toPrecision(2);
}

function notesOf(chart) {
  const notes = [], count = (pick) => chart.curves.reduce((sum, curve) => sum + pick(curve), 0);
  const odd = count((curve) => curve.odd.length), hidden = count((curve) => curve.hidden);
  if (odd) notes.push(`${plural(odd, "value")} not finite (× ▲ ▼)`);
  if (hidden) notes.push(`${plural(hidden, "value")} ≤ 0 not on the log scale`);
  const series = chart.curves.map((curve) => curve.run.series[curve.name]);
  const most = Math.max(0, ...series.filter(([steps, , total]) => total > steps.length).map(([, , total]) => total));
  if (most) notes.push(`of ${number(most)} values, the lowest and highest of each stretch are drawn`);
  chart.note.textContent = notes.join("; ");
}

function draw(chart) {
  const hadFocus = chart.plot && chart.plot.root.contains(document.activeElement);
  chart.plot?.destroy();
  chart.curves = curvesOf(chart.content);
  chart.box.classList.toggle("empty", !chart.curves.length);
  notesOf(chart);
  const positive = chart.curves.some((curve) => curve.ys.some((y) => y > 0));
  const whole = extent();
  chart.plot = new uPlot({
    width: chart.canvas.clientWidth || 400, height: chart.box.classList.contains("wide") ? 2 * HEIGHT : HEIGHT,
    legend: { show: false }, padding: [8, 12, 0, 0],
    scales: {
      x: { time: false, range: () => view.zoom || whole },
      y: view.log && positive ? { distr: 3, range: aroundLog } : {},
    },
    axes: [
      axis({ size: 30, values: (u, ticks) => ticks.map(view.x === "time" ? axisTime : axisNumber) }),
      axis({ size: 56, values: (u, ticks) => ticks.map(axisNumber) }),
    ],
    series: [{}, ...lines(chart.curves)],
    cursor: {
      sync: { key: "curves", scales: ["x", null] }, dataIdx: nearest, y: false, focus: { prox: 24 },
      drag: { x: true, y: false, setScale: false },
      points: { size: 6, show: true },
      bind: { dblclick: () => () => zoomTo(null) },
    },
    focus: { alpha: 0.35 },
    hooks: {
      draw: [(u) => drawMarks(u, chart.curves)],
      setCursor: [(u) => { if (chart.active) tooltipOf(chart, u); else chart.tip.hidden = true; }],
      setSelect: [(u) => {
        if (u.select.width < 4) return;
        zoomTo([u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x")]);
        u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
      }],
    },
  }, aligned(chart.curves), chart.canvas);
  chart.canvas.uplot = chart.plot;
  chart.plot.over.addEventListener("mouseenter", () => { chart.active = true; });
  chart.plot.over.addEventListener("mouseleave", () => { chart.active = false; chart.tip.hidden = true; });
  if (hadFocus) chart.canvas.focus();
}

function zoomTo(range) {
  view.zoom = range;
  document.querySelector("#unzoom").hidden = !range;
  drawn((chart) => chart.plot.setScale("x", { min: 0, max: 1 })); // the actual range is in `view`
}

const drawn = (action) => charts.filter((chart) => chart.plot).forEach(action);
const redraw = () => drawn(draw);

function smooth(amount) {
  view.smoothing = amount;
  drawn((chart) => { chart.plot.setData(aligned(chart.curves), false); chart.plot.redraw(true, false); });
  zoomTo(view.zoom);
}

// The arrow keys move the cursor, like the mouse.
function keys(chart, event) {
  const u = chart.plot, step = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10 }[event.key];
  if (event.key === "Escape") { chart.tip.hidden = true; return; }
  if (!u || !step || !u.data[0].length) return;
  event.preventDefault();
  const [first, last] = [u.valToIdx(u.scales.x.min), u.valToIdx(u.scales.x.max)];
  const from = u.cursor.idx ?? (step > 0 ? first - 1 : last + 1);
  const index = Math.max(first, Math.min(last, from + step));
  chart.active = true;
  u.setCursor({ left: u.valToPos(u.data[0][index], "x"), top: 20 }, true);
}

// -- all plots ----------------------------------------------------------------------------------------------

function makeChart(content) {
  const chart = { content, active: false, plot: null, curves: [] };
  chart.tip = el("div", { class: "tip", hidden: true, role: "status" });
  chart.note = el("p", { class: "note" });
  chart.canvas = el("div", {
    class: "canvas", tabindex: "0", role: "img",
    "aria-label": `${content.title}: ${content.names.join(" and ")}. The arrow keys show values.`,
    onkeydown: (event) => keys(chart, event),
    onblur: () => { chart.active = false; chart.tip.hidden = true; },
  });
  const wider = el("button", {
    class: "quiet", title: "larger or smaller", "aria-label": `larger: ${content.title}`,
    onclick: () => { chart.box.classList.toggle("wide"); draw(chart); },
  }, "⤢");
  const legend = report.runs.length === 1 && content.names.length > 1
    ? content.names.map((name, n) => el("span", { class: "key" },
      el("i", { class: "swatch", "data-tone": n }), partOf(name) || name))
    : content.names.map((name) => el("span", { class: "key" }, content.names.length > 1 ? el("i", {
      class: `dash ${splitOf(name)}` }) : null, partOf(name) || ""));
  chart.box = el("figure", { class: "chart", "data-title": content.title },
    el("figcaption", {},
      el("span", { class: "group" }, content.group), el("strong", {}, content.title), legend, wider),
    chart.canvas, chart.tip, chart.note);
  charts.push(chart);
  return chart;
}

// Plots are drawn when they become visible, so that a page with many opens fast.
const sight = new IntersectionObserver((entries) => entries.forEach((entry) => {
  const chart = charts.find((each) => each.box === entry.target);
  if (entry.isIntersecting && !chart.plot) draw(chart);
}), { rootMargin: "400px" });

const sizes = new ResizeObserver((entries) => entries.forEach((entry) => {
  const plot = entry.target.uplot, width = Math.floor(entry.contentRect.width);
  if (plot && width && plot.width !== width) plot.setSize({ width, height: plot.height });
}));

window.addEventListener("beforeprint", () => charts.filter((chart) => !chart.plot).forEach(draw));

function controls() {
  const epochs = report.runs.some((run) => run.clock.epochs.some((epoch) => epoch !== null));
  const choice = (value) => el("label", {}, el("input", {
    type: "radio", name: "x", value, checked: value === "step",
    onchange: () => { view.x = value; view.zoom = null; zoomTo(null); redraw(); },
  }), value);
  const shown = el("output", { for: "smoothing" }, "0");
  const slider = el("input", {
    id: "smoothing", type: "range", min: "0", max: "0.99", step: "0.01", value: "0",
    oninput: (event) => { shown.textContent = event.target.value; smooth(+event.target.value); },
  });
  return el("div", { class: "controls" },
    el("label", { for: "smoothing" }, "smoothing"), slider, shown,
    el("label", {}, el("input", {
      id: "log-scale", type: "checkbox", onchange: (event) => { view.log = event.target.checked; redraw(); },
    }), "log scale"),
    el("span", { class: "radios", role: "radiogroup", "aria-label": "horizontal axis" },
      choice("step"), epochs && choice("epoch"), choice("time")),
    el("button", { id: "unzoom", hidden: true, onclick: () => zoomTo(null) }, "reset zoom"));
}

function curves() {
  return el("div", { class: "grid" }, report.plots.map((plot) => {
    const chart = makeChart(plot);
    sight.observe(chart.box);
    sizes.observe(chart.canvas);
    return chart.box;
  }));
}
