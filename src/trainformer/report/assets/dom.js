// Elements, number formats, and colours. Everything from a run is inserted as text, never as HTML.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") Object.entries(value).forEach(([key, text]) => node.style.setProperty(key, text));
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

const el = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

function table(head, rows, attributes) {
  const cells = (row) => row.map((cell) => (cell?.nodeName === "TD" ? cell : el("td", {}, cell)));
  const heads = head.map((name) => (name instanceof Node ? name : el("th", { scope: "col" }, name)));
  return el("div", { class: "scroll" },
    el("table", attributes,
      el("thead", {}, el("tr", {}, heads)),
      el("tbody", {}, rows.map((row) => (row instanceof Node ? row : el("tr", {}, cells(row)))))));
}

const right = (...children) => el("td", { class: "number" }, ...children);
const muted = (...children) => el("span", { class: "muted" }, ...children);
const numberHead = (name) => el("th", { scope: "col", class: "number" }, name);

// Status words with a colour. Others come from users, and must not collide with a CSS class of the page.
const TONES = new Set(["user", "data", "derived", "best", "last", "protected", "running", "finished", "completed",
  "failed", "killed", "interrupted", "aborted", "stopped", "pruned", "resumed", "skipped", "split", "saved",
  "evaluated"]);
const toneOf = (word) => (TONES.has(word) ? word : "");
const badge = (text, title) => el("span", { class: `badge ${toneOf(text)}`, title }, text);

function section(id, title, ...content) {
  const filled = content.flat(Infinity).filter(Boolean);
  return filled.length ? el("section", { id, "aria-label": title }, el("h2", {}, title), filled) : null;
}

// -- numbers ------------------------------------------------------------------------------------------------

function number(value, digits = 5) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  if (!Number.isFinite(value)) return Number.isNaN(value) ? "NaN" : value > 0 ? "Infinity" : "-Infinity";
  if (Number.isInteger(value) && Math.abs(value) < 1e15) return value.toLocaleString("en-US");
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-3) return value.toExponential(digits - 2).replace(/\.?0+e/, "e");
  if (size >= 1000) return value.toLocaleString("en-US", { maximumFractionDigits: 1 });
  return String(+value.toPrecision(digits));
}

function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 1) return `${(seconds * 1000).toFixed(0)} ms`;
  if (seconds < 90) return `${+seconds.toPrecision(3)} s`;
  const minutes = Math.round(seconds / 60);
  if (minutes < 60) return `${minutes} min`;
  if (minutes < 48 * 60) return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
  return `${Math.floor(minutes / 1440)} d ${Math.round((minutes % 1440) / 60)} h`;
}

function bytes(size) {
  const unit = size >= 1e9 ? 1e9 : size >= 1e6 ? 1e6 : size >= 1e3 ? 1e3 : 1;
  return `${unit > 1 ? (size / unit).toFixed(1) : size} ${{ 1e9: "GB", 1e6: "MB", 1e3: "kB", 1: "B" }[unit]}`;
}

function moment(seconds) {
  if (typeof seconds !== "number") return "–";
  const date = new Date(seconds * 1000);
  const two = (part) => String(part).padStart(2, "0");
  return `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())} ` +
    `${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
}

function valueText(value) {
  if (typeof value === "string") return value;
  if (typeof value === "number") return String(Number.isInteger(value) ? value : +value.toPrecision(7));
  return JSON.stringify(value);
}

const isNumber = (value) => typeof value === "number";
const pairs = (values) => Object.entries(values).map(([name, value]) => `${name} ${number(value, 4)}`).join(", ");
const plural = (count, one, many) => `${count.toLocaleString("en-US")} ${count === 1 ? one : many || `${one}s`}`;

// -- colours ------------------------------------------------------------------------------------------------

// The colour-blind safe palette of Okabe and Ito; lighter variants in dark mode.
const LIGHT = ["#0072b2", "#d55e00", "#009e73", "#b5529a", "#b8860b", "#3f9bdc", "#6b6b6b"];
const DARK = ["#5cb2f0", "#ff8f4d", "#33cfa0", "#ea9fd0", "#f2c14e", "#a6dcff", "#bdbdbd"];

const isDark = () => document.documentElement.dataset.theme === "dark";
const ink = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function colour(index) {
  const palette = isDark() ? DARK : LIGHT;
  const round = Math.floor(index / palette.length);
  return round ? mix(palette[index % palette.length], isDark() ? "#404040" : "#ffffff", 0.3 * (1 + ((round - 1) % 2))) :
    palette[index];
}

function channels(hex) {
  return [1, 3, 5].map((place) => parseInt(hex.slice(place, place + 2), 16));
}

function mix(first, second, share) {
  const other = channels(second);
  const mixed = channels(first).map((value, n) => Math.round(value * (1 - share) + other[n] * share));
  return `#${mixed.map((value) => value.toString(16).padStart(2, "0")).join("")}`;
}

const faint = (hex, alpha) => `rgba(${channels(hex).join(",")},${alpha})`;

// From dark blue over grey to yellow, like cividis: brightness increases monotonically.
const RAMP = ["#00336f", "#4a5570", "#7c7b78", "#b0a26f", "#ebc84f"];
function ramp(share) {
  const place = Math.min(0.9999, Math.max(0, share)) * (RAMP.length - 1);
  const shade = mix(RAMP[Math.floor(place)], RAMP[Math.floor(place) + 1], place % 1);
  return isDark() ? mix(shade, "#ffffff", 0.25 * (1 - share)) : mix(shade, "#000000", 0.15 * share);
}
