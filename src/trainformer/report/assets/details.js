// Details of one run: confusion matrices, images, texts, learning rate test, checkpoints, events, log.

// One block per run that has content.
function perRun(make, layout) {
  const blocks = report.runs.map((run, place) => {
    const content = [make(run)].flat(Infinity).filter(Boolean);
    if (!content.length) return null;
    const title = several() ? el("h3", {}, swatch(place), run.name) : null;
    return ofRun(place, el("div", { class: "block" }, title, content));
  });
  return blocks.some(Boolean) ? el("div", { class: layout }, blocks) : null;
}

// Content that exists at several steps: shows the newest, with a slider for the others.
function bySteps(steps, name, make) {
  const last = steps.length - 1, place = el("div", {}, make(steps[last]));
  if (last === 0) return [el("p", { class: "muted" }, `${name}, step ${number(steps[0].step)}`), place];
  const shown = el("output", {}, `step ${number(steps[last].step)}`);
  const slider = el("input", {
    type: "range", min: "0", max: String(last), value: String(last), "aria-label": `step of ${name}`,
    oninput: (event) => {
      const chosen = steps[+event.target.value];
      shown.textContent = `step ${number(chosen.step)}`;
      place.replaceChildren(make(chosen));
    },
  });
  return [el("div", { class: "controls" }, muted(name), slider, shown), place];
}

// -- confusion matrix ---------------------------------------------------------------------------------------

function confusion(run) {
  return run.confusion.map((group) => {
    let share = true;
    const make = (step) => matrix(step, share);
    const [slider, box] = bySteps(group.steps, group.key || "validation", make);
    const chosen = () => group.steps[+(slider.querySelector("input")?.value || 0)];
    const toggle = el("label", {}, el("input", {
      type: "checkbox", checked: true, class: "normalise",
      onchange: (event) => { share = event.target.checked; box.replaceChildren(make(chosen())); },
    }), "share of each true class");
    return el("div", { class: "confusion" }, el("div", { class: "controls" }, slider, toggle), box);
  });
}

const percent = (part, whole) => (whole ? `${((100 * part) / whole).toFixed(part === whole ? 0 : 1)} %` : "–");

function matrix(step, share) {
  const { labels, matrix: counts, totals, predicted } = step;
  const shown = (count, row) => (!count ? "" : share ? ((100 * count) / totals[row]).toFixed(0) : number(count));
  const head = (label) => el("th", { scope: "col", title: label }, el("span", {}, label));
  const cell = (count, r, c) => {
    const part = totals[r] ? count / totals[r] : 0;
    return el("td", {
      class: r === c ? "hit" : "miss",
      title: `true ${labels[r]}, predicted ${labels[c]}: ${number(count)} of ${number(totals[r])}`,
      style: { "--share": part.toFixed(3), color: part > 0.55 ? "var(--on-heat)" : "" },
    }, shown(count, r));
  };
  const rows = counts.map((row, r) => el("tr", {},
    el("th", { scope: "row", title: labels[r] }, labels[r]), row.map((count, c) => cell(count, r, c)),
    el("td", { class: "recall" }, percent(row[r], totals[r]))));
  const precision = (c) => (predicted[c] ? ((100 * counts[c][c]) / predicted[c]).toFixed(0) : "–");
  const foot = el("tr", {}, el("th", { scope: "row" }, "precision"),
    labels.map((label, c) => el("td", { class: "recall" }, precision(c))),
    el("td", { class: "recall", title: "accuracy" }, step.accuracy === null ? "–" : percent(step.accuracy, 1)));
  const corner = el("th", { class: "corner" }, "true ↓  predicted →");
  return el("div", {},
    el("div", { class: "scroll" }, el("table", { class: `matrix${labels.length > 25 ? " dense" : ""}` },
      el("thead", {}, el("tr", {}, corner, labels.map(head), head("recall"))),
      el("tbody", {}, rows), el("tfoot", {}, foot))),
    step.classes > labels.length && el("p", { class: "note" },
      `${number(step.classes)} classes; shown are the ${labels.length} with the most mistakes.`));
}

// -- images, texts, learning rate ---------------------------------------------------------------------------

function images(run) {
  const figure = (image) => el("figure", {},
    el("img", { src: `data:image/png;base64,${image.png}`, alt: image.caption || "sample" }),
    image.caption && el("figcaption", {}, image.caption));
  return run.images.map((group) => bySteps(group.steps, group.key || "images",
    (step) => el("div", { class: "images" }, step.images.map(figure))));
}

function texts(run) {
  const paragraph = (sample) => el("p", {},
    sample.prompt && el("span", { class: "prompt" }, sample.prompt, " "), sample.text);
  return run.texts.map((group) => bySteps(group.steps, group.key || "texts",
    (step) => el("div", { class: "texts" }, step.samples.map(paragraph))));
}

const isDecade = (value) => Math.abs(Math.log10(value) - Math.round(Math.log10(value))) < 1e-6;
const decades = (u, ticks) => ticks.map((tick) => (isDecade(tick) ? tick : null));
const powers = (u, ticks) => ticks.map((tick) => (tick === null ? "" : tick.toExponential(0).replace("+", "")));

function rateTest(run) {
  return run.lr_finder.map((test) => {
    const rest = test.suggestion === null ? "no suggestion" : `suggestion: ${number(test.suggestion)}`;
    const readout = el("p", { class: "readout muted" }, rest);
    const box = el("div", {
      class: "canvas lr-finder", tabindex: "0", role: "img", "aria-label": `loss by learning rate; ${rest}`,
    });
    const tell = (n) => {
      const known = n !== null && n !== undefined;
      readout.textContent = known ? `lr ${number(test.lrs[n])}, loss ${number(test.losses[n])}; ${rest}` : rest;
    };
    requestAnimationFrame(() => plotRates(test, box, tell)); // the width is known once it is on the page
    return [box, readout];
  });
}

function plotRates(test, box, tell) {
  const grid = { stroke: () => ink("--grid"), width: 1, filter: decades };
  const plot = new uPlot({
    width: box.clientWidth || 400, height: HEIGHT, legend: { show: false }, padding: [8, 12, 0, 0],
    scales: { x: { time: false, distr: 3 } },
    axes: [axis({ size: 30, filter: decades, grid, values: powers }),
      axis({ size: 56, values: (u, ticks) => ticks.map(axisNumber) })],
    series: [{}, { stroke: () => colour(0), width: 2, points: { show: false } }],
    cursor: { y: false },
    hooks: { setCursor: [(u) => tell(u.cursor.idx)], draw: [(u) => drawSuggestion(u, test.suggestion)] },
  }, [test.lrs, test.losses.map((loss) => (isNumber(loss) ? loss : null))], box);
  box.uplot = plot;
  sizes.observe(box);
  themed.push(() => plot.redraw());
}

function drawSuggestion(u, suggestion) {
  if (suggestion === null) return;
  const { ctx, bbox } = u, x = u.valToPos(suggestion, "x", true), ratio = devicePixelRatio;
  ctx.save();
  ctx.strokeStyle = colour(1);
  ctx.lineWidth = 2 * ratio;
  ctx.setLineDash([5 * ratio, 4 * ratio]);
  ctx.beginPath();
  ctx.moveTo(x, bbox.top);
  ctx.lineTo(x, bbox.top + bbox.height);
  ctx.stroke();
  ctx.restore();
}

// -- checkpoints, events, log -------------------------------------------------------------------------------

function checkpoints(run) {
  if (!run.checkpoints.length) return null;
  const marks = { is_best: "best", is_last: "last", is_protected: "protected" };
  return table(["checkpoint", "", ...["step", "epoch", "size", "saved"].map(numberHead), "metrics"],
    run.checkpoints.map((each) => [
      el("td", {}, el("code", {}, each.name)),
      el("td", {}, Object.keys(marks).filter((key) => each[key]).map((key) => [badge(marks[key]), " "])),
      right(number(each.step)), right(number(each.epoch)), right(bytes(each.bytes)),
      el("td", { class: "number" }, moment(each.time)), el("td", { class: "free" }, pairs(each.metrics) || "–"),
    ]), { class: "checkpoints" });
}

function describeEvent({ kind, content }) {
  const listed = (separator, ...parts) => parts.filter(Boolean).join(separator);
  const { reason } = content;
  if (kind === "resumed") return `from ${content.from || "a checkpoint"}`;
  if (kind === "split") return `out of memory: batches in ${content.parts} parts from here`;
  if (kind === "skipped" && isNumber(content.steps)) {
    return listed(": ", `${plural(content.steps, "step")} left out since the last look`, reason);
  }
  if (kind === "evaluated" && content.metrics) return pairs(content.metrics);
  if (kind === "ended") return listed(": ", content.status, content.error && String(content.error).split("\n")[0]);
  if (kind === "stopped") return listed(": ", content.by && `by ${content.by}`, reason);
  if (kind === "saved") {
    return listed(", ", content.checkpoint, isNumber(content.seconds) && duration(content.seconds),
      reason === "best" ? "among the best" : reason);
  }
  if (kind === "began") {
    return listed(", ", content.device, content.precision, content.world_size > 1 && `${content.world_size} processes`,
      isNumber(content.steps_planned) && plural(content.steps_planned, "step"));
  }
  return Object.entries(content).map(([name, value]) => `${name}: ${valueText(value)}`).join(", ");
}

function events(run) {
  if (!run.events.length) return null;
  const kinds = [...new Set(run.events.map((event) => event.kind))];
  const routine = kinds.filter((kind) => kind === "saved" || kind === "evaluated");
  const off = new Set(run.events.length > 60 ? routine : []);
  const start = run.events.find((event) => isNumber(event.time))?.time;
  const since = (time) => (isNumber(time) ? `+${duration(Math.max(0, time - start))}` : "–");
  const rows = run.events.map((event) => {
    const row = el("tr", {}, el("td", { title: moment(event.time) }, since(event.time)), right(number(event.step)),
      el("td", {}, badge(event.kind)), el("td", { class: "free" }, describeEvent(event)));
    row.dataset.kind = event.kind;
    return row;
  });
  const sift = () => rows.forEach((row) => { row.hidden = off.has(row.dataset.kind); });
  const buttons = kinds.map((kind) => el("button", {
    class: "chip small", "aria-pressed": String(!off.has(kind)),
    onclick: (event) => {
      if (!off.delete(kind)) off.add(kind);
      event.currentTarget.setAttribute("aria-pressed", String(!off.has(kind)));
      sift();
    },
  }, `${kind} ${run.events.filter((event) => event.kind === kind).length}`));
  sift();
  const missing = run.event_count - run.events.length;
  const list = [
    el("div", { class: "chips", role: "group", "aria-label": "kinds of events" }, buttons),
    el("div", { class: "tall" }, table(["time", numberHead("step"), "event", ""], rows)),
    missing > 0 && el("p", { class: "note" }, `${plural(missing, "routine event")} not listed.`),
  ];
  const folded = () => el("details", {}, el("summary", {}, plural(run.events.length, "event")), list);
  return [strip(run), several() ? folded() : list];
}

// All events on the step axis, one row per kind.
function strip(run) {
  const placed = run.events.filter((event) => isNumber(event.step));
  const last = Math.max(run.step, ...placed.map((event) => event.step));
  const kinds = [...new Set(placed.map((event) => event.kind))].filter((kind) => kind !== "began" && kind !== "ended");
  if (!last || !kinds.length) return null;
  const height = 16 * kinds.length + 18, across = (step) => (100 + (step / last) * 680).toFixed(1);
  const dots = (kind, y) => placed.filter((event) => event.kind === kind).map((event) =>
    svg("circle", { cx: across(event.step), cy: y, r: 4, class: `event ${toneOf(kind)}` },
      svg("title", {}, `${kind} at step ${number(event.step)}: ${describeEvent(event)}`)));
  const rows = kinds.map((kind, row) => [
    svg("text", { x: 92, y: 16 * row + 14, "text-anchor": "end" }, kind.slice(0, 16)),
    svg("line", { x1: 100, x2: 780, y1: 16 * row + 10, y2: 16 * row + 10, class: "axis" }),
    dots(kind, 16 * row + 10)]);
  const frame = { class: "strip", viewBox: `0 0 800 ${height}`, role: "img", "aria-label": "events by step" };
  return el("div", { class: "scroll" }, svg("svg", frame, rows,
    svg("text", { x: 100, y: height - 4 }, "0"),
    svg("text", { x: 780, y: height - 4, "text-anchor": "end" }, `step ${number(last)}`)));
}

function log(run) {
  if (!run.log.length) return null;
  return el("details", { open: Boolean(run.error) || run.status === "failed" },
    el("summary", {}, `last ${plural(run.log.length, "line")} of log.txt`),
    el("pre", { class: "log" }, run.log.join("\n")));
}
