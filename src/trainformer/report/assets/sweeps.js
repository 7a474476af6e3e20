// A sweep: its trials in linked plots and a table.

// The highlighted trial, and the trials that pass the filters; shared by all plots and the table of a sweep.
function makeBoard(box) {
  const nodes = new Map();
  const mark = (name, holds) => nodes.forEach((all, trial) =>
    all.forEach((node) => node.classList.toggle(name, holds(trial))));
  return {
    add(trial, node) { nodes.set(trial, [...(nodes.get(trial) || []), node]); },
    point(trial) {
      box.classList.toggle("pointing", trial !== null);
      mark("pointed", (each) => each === trial);
    },
    keep(kept) { mark("left-out", (each) => !kept.includes(each)); },
  };
}

function sweepView(sweep, place) {
  const box = el("div", { class: "sweep" }), board = makeBoard(box), names = Object.keys(sweep.spaces);
  box.append(...summary(sweep));
  if (sweep.trials.some(isScored)) {
    if (names.length) box.append(el("h3", {}, "Parallel coordinates"), parallel(sweep, board), howToBrush(sweep));
    box.append(
      el("div", { class: "grid thirds" }, bestSoFar(sweep, board), courses(sweep, board), importance(sweep)),
      el("h3", {}, "Each parameter"),
      el("div", { class: "grid thirds" }, names.map((name) => against(sweep, name, board))));
  }
  if (sweep.trials.length) box.append(el("h3", {}, "Trials"), trials(sweep, names, board));
  return section(`sweep-${place}`, `Sweep ${sweep.name}`, box);
}

function summary(sweep) {
  const count = (status) => sweep.trials.filter((trial) => trial.status === status).length;
  const statuses = ["completed", "pruned", "running", "waiting", "failed"].filter(count);
  const counts = statuses.map((status) => `${count(status)} ${status}`).join(", ");
  const seed = sweep.seed === null ? "" : `, seed ${sweep.seed}`;
  const about = `${plural(sweep.trials.length, "trial")}${counts ? ` (${counts})` : ""}`;
  const best = sweep.trials.find((trial) => isScored(trial) && trial.status === "completed");
  const config = best && Object.entries(best.config).map(([name, value]) => `${name}=${valueText(value)}`).join(", ");
  return [
    el("p", {}, `${about}; ${sweep.method}, ${sweep.direction}${seed}`),
    best ? el("p", { class: "winner" }, "best: ", el("strong", {}, number(best.metric)),
      ` in trial ${best.number} with `, el("code", {}, config)) : "",
  ];
}

function howToBrush(sweep) {
  const failed = sweep.trials.some((trial) => trial.status === "failed") ? "; failed ones are grey, and end below" : "";
  return el("p", { class: "note" },
    `Drag along an axis to keep a part of it, click it to take that back. Better trials are brighter${failed}.`);
}

function importance(sweep) {
  const bars = Object.entries(sweep.importances).filter(([, value]) => isNumber(value)).sort((a, b) => b[1] - a[1]);
  if (!bars.length) return null;
  const most = Math.max(...bars.map(([, value]) => value), 1e-12);
  const bar = (value) => el("span", { class: "bar" }, el("i", { style: { width: `${(100 * value) / most}%` } }));
  return el("figure", { class: "chart small importance", "data-title": "importance" },
    el("figcaption", {}, el("strong", {}, "importance"), muted("of each for how the metric varies")),
    el("div", { class: "bars" }, bars.map(([name, value]) => [
      el("span", {}, name), bar(value), el("span", { class: "number" }, `${(100 * value).toFixed(0)} %`)])));
}

// -- the table ----------------------------------------------------------------------------------------------

function setTo(value) {
  if (value === undefined) return right("–");
  if (!isNumber(value)) return right(valueText(value));
  return el("td", { class: "number", title: String(value) }, number(value, 4));
}

function rowOf(trial, names, board) {
  const again = trial.attempt > 1 ? muted(` attempt ${trial.attempt}`) : "";
  const link = isNumber(trial.page) ? el("a", { href: `#run-${trial.page}` }, report.runs[trial.page].name) : "";
  const row = el("tr", { tabindex: "0", class: trial.status },
    right(number(trial.number)), el("td", {}, badge(trial.status), again),
    right(number(trial.metric)), names.map((name) => setTo(trial.config[name])), right(duration(trial.seconds)),
    el("td", {}, link), el("td", { class: "free" }, trial.error || ""));
  row.addEventListener("focus", () => board.point(trial.number));
  row.addEventListener("blur", () => board.point(null));
  return pointer(row, trial, board);
}

function trials(sweep, names, board) {
  const columns = [
    ["trial", (trial) => trial.number], ["status", (trial) => trial.status], ["metric", (trial) => trial.metric],
    ...names.map((name) => [name, (trial) => trial.config[name]]), ["time", (trial) => trial.seconds],
  ];
  const rows = new Map(sweep.trials.map((trial) => [trial, rowOf(trial, names, board)]));
  const order = { by: null, up: true };
  const sort = (n, body) => {
    const of = columns[n][1], known = (trial) => of(trial) !== null && of(trial) !== undefined;
    order.up = order.by === n ? !order.up : true;
    order.by = n;
    const compare = (a, b) => (of(a) < of(b) ? -1 : of(a) > of(b) ? 1 : 0) * (order.up ? 1 : -1);
    const sorted = [...sweep.trials].sort((a, b) => known(b) - known(a) || (known(a) ? compare(a, b) : 0));
    body.append(...sorted.map((trial) => rows.get(trial)));
    const direction = order.up ? "ascending" : "descending";
    heads.forEach((head, place) => head.setAttribute("aria-sort", place === n ? direction : "none"));
  };
  const heads = columns.map(([name], n) => el("th", { scope: "col", class: n === 1 ? "" : "number" }, el("button", {
    class: "quiet", title: `sort by ${name}`, onclick: (event) => sort(n, event.target.closest("table").tBodies[0]),
  }, name)));
  return el("div", { class: "tall" }, table([...heads, "run", "error"], [...rows.values()], { class: "trials" }));
}
