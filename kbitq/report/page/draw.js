"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const element = (id) => document.getElementById(id);
const views = {};
const NARROW = 640; // pixels

// --- charts: their colours are the page's, and change with it

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function coloured(spec) {
  // "var(--name)" anywhere in a specification is the page's colour of that name.
  return JSON.parse(JSON.stringify(spec), (_, value) =>
    typeof value === "string" ? value.replace(/^var\((--[\w-]+)\)$/, (_, name) => colour(name)) : value);
}

function theme() {
  const [ink, muted, line] = ["--ink", "--muted", "--line"].map(colour);
  return {
    background: null,
    font: getComputedStyle(document.body).fontFamily,
    view: { stroke: null },
    axis: { labelColor: ink, titleColor: muted, gridColor: line, domainColor: line, tickColor: line, titleFontWeight: 500 },
    legend: { labelColor: ink, titleColor: muted, titleFontWeight: 500 },
  };
}

function fitted(spec) {
  // A phone has no room for long labels, nor the map for a K in cells that are narrower than the text.
  const narrow = window.innerWidth < NARROW;
  const changed = { ...spec };
  if (spec.usermeta && spec.usermeta.columns) {
    const cell = (Math.min(window.innerWidth, 1150) - (narrow ? 140 : 240)) / spec.usermeta.columns;
    if (cell < 4 + 7 * spec.usermeta.characters) changed.layer = spec.layer.slice(0, 1);
  }
  return [changed, narrow ? { axisY: { labelLimit: 105 } } : {}];
}

async function draw(target, id, datasets) {
  const [spec, narrow] = fitted(coloured(data.charts[id]));
  const [base, own] = [theme(), spec.config || {}];
  spec.config = { ...base, ...own, ...narrow, axis: { ...base.axis, ...own.axis } };
  if (datasets) spec.datasets = datasets;
  if (views[target.id]) views[target.id].finalize();
  const embedded = await vegaEmbed(target, spec, { actions: false, renderer: "svg" });
  views[target.id] = embedded;
  embedded.view.addEventListener("click", (_, item) => {
    const name = item && item.datum && item.datum.name;
    if (name && known(name)) open_(name);
  });
}

async function drawAll() {
  const ids = Object.keys(data.charts).filter((id) => element(id));
  await Promise.all(ids.map((id) => draw(element(id), id)));
  await show(element("choice").value);
  document.documentElement.dataset.ready = "true";
}

// --- numbers as text: what was not measured is a dash

const number = (digits) => (v) => (v === null || v === undefined ? "-" : v.toFixed(digits));
const signed = (v) => (v === null || v === undefined ? "-" : (v > 0 ? "+" : "") + v.toFixed(2));
const scientific = (v) => (v === null || v === undefined ? "-" : v.toExponential(1));
const whole = (v) => v.toLocaleString("en");
const shape = (v) => v.join(" × ");
const both = (text) => (v) => {
  const [a, b] = v.map((one) => (one === null ? "-" : text(one)));
  return a === b ? a : `${a} → ${b}`;
};
