// The table of runs, and the legend that shows and hides them everywhere.

const swatch = (place) => el("i", { class: "swatch", "data-tone": place });
const several = () => report.runs.length > 1;

// Every element of a run carries its number, so that it can be hidden with the run.
const ofRun = (place, node) => { node.dataset.of = place; return node; };

function overview() {
  const bests = [...new Set(report.runs.map((run) => run.best && run.best.name).filter(Boolean))];
  const bestHead = bests.length === 1 ? `best ${bests[0]}` : "best";
  const leader = leading(bests);
  const rows = report.runs.map((run, place) => ofRun(place, el("tr", { id: `run-${place}`, tabindex: "-1" },
    el("td", {}, swatch(place), el("span", { class: "run-name", title: run.path }, run.name)),
    el("td", {}, badge(run.status, run.host ? `on ${run.host}` : undefined)),
    el("td", {}, run.task || "–"),
    right(number(run.step), run.steps_planned ? muted(` / ${number(run.steps_planned)}`) : null),
    right(duration(run.seconds)),
    right(run.best
      ? [bests.length > 1 ? `${run.best.name} ` : "", run === leader ? el("strong", {}, number(run.best.value)) :
        number(run.best.value), muted(` at ${number(run.best.step)}`)]
      : "–"),
    right(number(run.loss)))));
  const head = ["run", "status", "task", ...["steps", "time", bestHead, "final loss"].map(numberHead)];
  return [table(head, rows, { class: "overview" }), ...report.runs.map((run, place) => problems(run, place))];
}

function leading(bests) {
  if (bests.length !== 1 || !several()) return null;
  const judged = report.runs.filter((run) => run.best && typeof run.best.value === "number");
  if (!judged.length) return null;
  const sign = judged[0].best.mode === "min" ? 1 : -1;
  return judged.reduce((first, run) => (sign * run.best.value < sign * first.best.value ? run : first), judged[0]);
}

function problems(run, place) {
  const title = several() ? `${run.name}: ` : "";
  const parts = [];
  if (run.error) {
    parts.push(el("div", { class: "error", role: "alert" },
      el("strong", {}, `${title}${run.status}`), el("pre", {}, run.error)));
  }
  if (run.notes.length) parts.push(el("p", { class: "note" }, `${title}${run.notes.join(" ")}`));
  return parts.length ? ofRun(place, el("div", {}, parts)) : null;
}

// -- the legend ---------------------------------------------------------------------------------------------

function legend() {
  if (!several()) return null;
  const chips = report.runs.map((run, place) => el("button", {
    class: "chip", "aria-pressed": "true", "data-run": place,
    title: `${run.path}\nclick: on or off; shift-click: only this`,
    onclick: (event) => (event.shiftKey ? only(place) : flip(place)),
  }, swatch(place), el("span", {}, run.name)));
  return el("div", { class: "chips", role: "group", "aria-label": "runs shown" }, chips,
    el("button", { class: "quiet", onclick: () => show(report.runs.map((run, place) => place)) }, "all"),
    el("button", { class: "quiet", onclick: () => show([]) }, "none"));
}

const flip = (place) => show(report.runs.map((run, n) => n).filter((n) => view.off.has(n) === (n === place)));
const only = (place) => show([place]);

function show(places) {
  view.off = new Set(report.runs.map((run, n) => n).filter((n) => !places.includes(n)));
  document.querySelectorAll(".chip[data-run]").forEach((chip) =>
    chip.setAttribute("aria-pressed", String(!view.off.has(+chip.dataset.run))));
  document.querySelectorAll("[data-of]").forEach((node) =>
    node.classList.toggle("off", view.off.has(+node.dataset.of)));
  redraw();
}
