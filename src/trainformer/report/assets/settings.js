// The configuration: every value and its source; for several runs only the differences, unless all are requested.

const SOURCES = {
  user: "set by the user", default: "left at its default", data: "read from the data",
  derived: "computed from other values", env: "the machine's",
};

function settings() {
  const keys = [...new Set(report.runs.flatMap((run) => Object.keys(run.config)))];
  if (!keys.length) return null;
  const shared = (key) => new Set(report.runs.map((run) => JSON.stringify(run.config[key]?.value))).size < 2;
  const rows = keys.map((key) => {
    const values = report.runs.map((run, place) => setting(run, place, key));
    const row = el("tr", {}, el("th", { scope: "row" }, key), values);
    row.dataset.key = key.toLowerCase();
    row.dataset.plain = several() ? shared(key) : report.runs[0].config[key].source === "default";
    row.classList.toggle("differs", several() && !shared(key));
    return row;
  });
  const all = el("input", { type: "checkbox", id: "all-settings", onchange: () => sift() });
  const wanted = el("input", {
    type: "search", placeholder: "filter", "aria-label": "filter settings", oninput: () => sift(),
  });
  const count = muted();
  const sift = () => {
    const word = wanted.value.trim().toLowerCase();
    rows.forEach((row) => {
      row.hidden = !row.dataset.key.includes(word) || (!word && !all.checked && row.dataset.plain === "true");
    });
    count.textContent = `${rows.filter((row) => !row.hidden).length} of ${rows.length}`;
  };
  sift();
  const head = ["setting", ...report.runs.map((run, place) =>
    ofRun(place, el("th", { scope: "col" }, several() ? [swatch(place), run.name] : "value")))];
  return [
    el("div", { class: "controls" }, wanted,
      el("label", {}, all, `also what ${several() ? "is the same in all runs" : "was left at its default"}`), count),
    table(head, rows, { class: "settings" }),
    facts(),
  ];
}

function setting(run, place, key) {
  const entry = run.config[key];
  if (!entry) return ofRun(place, el("td", { class: "muted" }, "–"));
  const origin = SOURCES[entry.source] || entry.source;
  const from = entry.depends_on.length ? `: ${entry.depends_on.join(", ")}` : "";
  return ofRun(place, el("td", {},
    el("code", {}, valueText(entry.value)), " ", badge(entry.source, origin + from)));
}

// The command and the versions; once for all runs that share them.
function facts() {
  const groups = new Map();
  report.runs.forEach((run, place) => {
    const parts = [
      run.command && ["command", run.command.join(" ")], run.git && ["git", run.git],
      run.device && ["device", run.device],
      Object.keys(run.versions).length && ["versions",
        Object.entries(run.versions).map(([name, version]) => `${name} ${valueText(version)}`).join(", ")],
    ].filter(Boolean);
    const key = JSON.stringify(parts);
    groups.set(key, { parts, places: [...(groups.get(key)?.places || []), place] });
  });
  const shown = [...groups.values()].filter((group) => group.parts.length);
  const names = (places) => places.map((place) => [swatch(place), report.runs[place].name, " "]);
  return shown.map(({ parts, places }) => el("div", { class: "facts" },
    places.length < report.runs.length ? el("h4", {}, names(places)) : null,
    el("dl", {}, parts.map(([name, text]) => [el("dt", {}, name), el("dd", {}, text)]))));
}
