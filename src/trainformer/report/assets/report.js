// The page, top to bottom.

const report = JSON.parse(document.getElementById("data").textContent);
// Names of runs and metrics are keys: a metric named "constructor" must not find the property of every object.
const bare = (values) => Object.assign(Object.create(null), values);
report.runs.forEach((run) => { run.series = bare(run.series); run.config = bare(run.config); });
report.sweeps.forEach((sweep) => sweep.trials.forEach((trial) => { trial.config = bare(trial.config); }));
const themed = []; // callbacks for a change between dark and light mode

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  document.querySelectorAll("[data-tone]").forEach((node) => { node.style.background = colour(+node.dataset.tone); });
  drawn((chart) => chart.plot.redraw(true, false));
  themed.forEach((action) => action());
}

function themeSwitch() {
  const remember = (theme) => {
    try { localStorage.setItem("trainformer-theme", theme); } catch { /* not from this place */ }
  };
  return el("button", {
    id: "theme", title: "dark or light", "aria-label": "dark or light",
    onclick: () => { setTheme(isDark() ? "light" : "dark"); remember(document.documentElement.dataset.theme); },
  }, "◐");
}

// Printed pages are always light.
function printLight() {
  let before = null;
  window.addEventListener("beforeprint", () => { before = document.documentElement.dataset.theme; setTheme("light"); });
  window.addEventListener("afterprint", () => { if (before) setTheme(before); before = null; });
}

function firstTheme() {
  let chosen = null;
  try { chosen = localStorage.getItem("trainformer-theme"); } catch { /* not from this place */ }
  const system = matchMedia("(prefers-color-scheme: dark)");
  system.addEventListener("change", (event) => setTheme(event.matches ? "dark" : "light"));
  return chosen === "dark" || chosen === "light" ? chosen : system.matches ? "dark" : "light";
}

function build() {
  document.documentElement.dataset.theme = firstTheme();
  const shown = [
    section("confusion", "Confusion matrix", perRun(confusion, "beside")),
    section("images", "Images", perRun(images)),
    section("texts", "Texts", perRun(texts)),
    section("lr-finder", "Learning rate test", perRun(rateTest, "beside even")),
  ].filter(Boolean);
  const first = [
    ...report.sweeps.map(sweepView),
    report.runs.length ? section("runs", several() ? "Runs" : "Run", overview()) : null,
    report.plots.length ? section("curves", "Curves", curves()) : null,
  ].filter(Boolean);
  const last = [
    section("settings", "Configuration", settings()),
    section("checkpoints", "Checkpoints", perRun(checkpoints)),
    section("events", "Events", perRun(events)),
    section("log", "Log", perRun(log)),
  ].filter(Boolean);
  const links = [...first, ...shown, ...last].map((each) =>
    el("a", { href: `#${each.id}` }, each.getAttribute("aria-label")));
  document.getElementById("page").append(
    el("header", {},
      el("h1", {}, report.title), el("nav", { "aria-label": "parts of the page" }, links), themeSwitch()),
    report.plots.length ? el("div", { class: "bar-top" }, legend(), controls()) : "",
    el("main", {}, first, several() ? shown : el("div", { class: "columns" }, shown), last),
    el("footer", {}, `written ${moment(report.written)} by trainformer ${report.version}`));
  setTheme(document.documentElement.dataset.theme);
  printLight();
}

build();
