"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const element = (id) => document.getElementById(id);
const views = {};

// --- charts: their colours are the page's, and change with it

function theme() {
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue("--" + name).trim();
  const [ink, muted, line, first, second] = ["ink", "muted", "line", "first", "second"].map(colour);
  const font = getComputedStyle(document.body).fontFamily;
  return {
    params: [["first", first], ["second", second], ["muted", muted]].map(([name, value]) => ({ name, value })),
    config: {
      background: null, font,
      view: { stroke: null },
      axis: { labelColor: ink, titleColor: muted, gridColor: line, domainColor: line, tickColor: line, titleFontWeight: 500 },
      legend: { labelColor: ink, titleColor: muted, titleFontWeight: 500 },
      mark: { color: first },
      range: { category: [first, second, muted], ramp: [colour("cold"), "#c9a227", colour("warm")], heatmap: [colour("cold"), "#b8952a", colour("warm")] },
    },
  };
}

function wide(spec) {
  // A phone has no room for long labels: they are cut, and ticks are fewer.
  const narrow = window.innerWidth < 640;
  return narrow ? { axisY: { labelLimit: 90 }, legend: { columns: 1 } } : {};
}

async function draw(id, datasets) {
  const { params, config } = theme();
  const spec = { ...data.charts[id], params, ...(datasets ? { datasets } : {}) };
  const [own, narrow] = [spec.config || {}, wide(spec)];
  spec.config = { ...config, ...own, ...narrow, axis: { ...config.axis, ...own.axis }, legend: { ...config.legend, ...narrow.legend } };
  if (views[id]) views[id].finalize();
  views[id] = await vegaEmbed("#" + id, spec, { actions: false, renderer: "svg" });
}

async function drawAll() {
  await Promise.all(Object.keys(data.charts).filter((id) => !OF_A_TENSOR.includes(id)).map((id) => draw(id)));
  await show(element("choice").value);
  document.documentElement.dataset.ready = "true";
}

// --- inside a tensor

const RANGE = 1.5;
const OF_A_TENSOR = ["weights", "indices", "scales"];

async function show(name) {
  const found = data.usage[name];
  if (!found) return;
  const bins = (found.weights || []).map((count, i, all) => {
    const width = (2 * RANGE) / all.length;
    return { at: -RANGE + i * width, to: -RANGE + (i + 1) * width, count };
  });
  element("weights-title").hidden = element("weights").hidden = !found.weights;
  const used = found.scales.map((count, byte) => ({ byte, count }));
  const first = used.findIndex((u) => u.count), last = used.findLastIndex((u) => u.count);
  const levels = found.levels.map((at, level) => ({ at, level }));
  await Promise.all([
    found.weights && draw("weights", { weights: bins, levels }),
    draw("indices", { indices: found.indices.map((count, level) => ({ level, count })) }),
    draw("scales", { scales: used.slice(first, last + 1) }),
  ]);
}

// --- the table

const number = (digits) => (v) => (v === null ? "-" : v.toFixed(digits));
const COLUMNS = [
  ["name", "tensor", (v) => v],
  ["layer", "layer", (v) => (v === null ? "-" : v)],
  ["shape", "shape", (v) => v.join(" x ")],
  ["k", "K", (v) => v],
  ["bits_per_weight", "bits", number(2)],
  ["sqnr_db", "SQNR dB", number(2)],
  ["max_abs_err", "max error", (v) => (v === null ? "-" : v.toExponential(1))],
  ["bytes", "bytes", (v) => v.toLocaleString("en")],
  ["codebook", "codebook", (v) => v],
];
const NATURAL = new Intl.Collator("en", { numeric: true });
const LIMIT = 2000; // rows drawn at once; a search finds the others
let sorted = { key: "name", up: true };

const size = (shape) => shape.reduce((a, b) => a * b, 1);

function compare(a, b) {
  const [x, y] = [a[sorted.key], b[sorted.key]];
  if (x === null || y === null) return (x === null) - (y === null); // what was not measured comes last, either way
  const order = Array.isArray(x) ? size(x) - size(y) : typeof x === "number" ? x - y : NATURAL.compare(x, y);
  return sorted.up ? order : -order;
}

function matches(row, words) {
  return words.every((word) => {
    const k = /^k=(\d)$/.exec(word);
    return k ? row.k === Number(k[1]) : row.name.toLowerCase().includes(word) || row.codebook.includes(word);
  });
}

function fill() {
  const words = element("search").value.toLowerCase().split(/\s+/).filter(Boolean);
  const rows = data.tensors.filter((row) => matches(row, words)).sort(compare);
  const body = document.createElement("tbody");
  for (const row of rows.slice(0, LIMIT)) {
    const line = body.insertRow();
    for (const [key, , text] of COLUMNS) line.insertCell().textContent = text(row[key]);
  }
  element("tensors").tBodies[0].replaceWith(body);
  const more = rows.length > LIMIT ? `, the first ${LIMIT} shown` : "";
  element("found").textContent = `${rows.length} of ${data.tensors.length}${more}`;
  for (const cell of element("tensors").tHead.rows[0].cells) {
    const direction = sorted.up ? "ascending" : "descending";
    cell.ariaSort = cell.dataset.key === sorted.key ? direction : "none";
  }
}

function head() {
  const line = element("tensors").tHead.insertRow();
  for (const [key, title] of COLUMNS) {
    const cell = document.createElement("th");
    cell.dataset.key = key;
    cell.scope = "col";
    const button = cell.appendChild(document.createElement("button"));
    button.type = "button";
    button.textContent = title;
    button.addEventListener("click", () => {
      sorted = { key, up: sorted.key === key ? !sorted.up : true };
      fill();
    });
    line.append(cell);
  }
}

// --- start

for (const name of Object.keys(data.usage)) element("choice").add(new Option(name, name));
element("choice").addEventListener("change", (event) => show(event.target.value));
element("search").addEventListener("input", fill);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
let width = window.innerWidth;
window.addEventListener("resize", () => {
  if ((width < 640) !== (window.innerWidth < 640)) drawAll();
  width = window.innerWidth;
});
head();
fill();
drawAll();
