// --- inside a tensor

const RANGE = 1.5; // of a weight over its block's scale, either way
const KEYS = data.sides.map((side) => side.key);
const FACTS = [
  ["Shape", (r) => shape(r.shape)],
  ["Codec", (r) => r.coding],
  ["K", (r) => String(r.k)],
  ["Bits per weight", (r) => r.bits_per_weight.toFixed(2)],
  ["SQNR", (r) => (r.sqnr_db === null ? (r.max_abs_err === 0 ? "exact" : "-") : `${r.sqnr_db.toFixed(2)} dB`)],
  ["SQNR of normal weights", (r) => (r.expected_db === null ? "-" : `${r.expected_db.toFixed(2)} dB`)],
  ["Difference", (r) => (r.off_db === null ? "-" : `${signed(r.off_db)} dB`)],
  ["Largest error", (r) => scientific(r.max_abs_err)],
  ["Size", (r) => `${whole(r.bytes)} bytes`],
  ["Codebook", (r) => r.codebook],
  ["Scale rule", (r) => r.scale],
];

const rowOf = (key, name) => (Object.hasOwn(data.rows[key], name) ? data.rows[key][name] : null);
const known = (name) => KEYS.some((key) => rowOf(key, name));

// A click opens a tensor: its name is chosen, its numbers and histograms are shown, and the address leads to it.
async function open_(name) {
  element("choice").value = name;
  history.replaceState(null, "", "#" + encodeURIComponent(name));
  await show(name);
  element("inside").scrollIntoView({ behavior: "smooth", block: "start" });
}

async function show(name) {
  fillFacts(name);
  for (const row of document.querySelectorAll("#tensors tbody tr")) row.classList.toggle("open", row.dataset.name === name);
  const found = Object.hasOwn(data.usage, name) ? data.usage[name] : {};
  element("no-histograms").hidden = KEYS.some((key) => found[key]);
  const host = element("histograms");
  host.replaceChildren();
  await Promise.all(KEYS.filter((key) => found[key]).map((key) => histograms(host, key, found[key])));
}

function fillFacts(name) {
  const table = element("tensor-facts");
  table.replaceChildren();
  if (KEYS.length > 1) {
    const line = table.createTHead().insertRow();
    for (const text of ["Term", ...KEYS]) line.appendChild(document.createElement("th")).textContent = text;
  }
  const body = table.appendChild(document.createElement("tbody"));
  for (const [term, text] of FACTS) {
    const line = body.insertRow();
    const head = line.appendChild(document.createElement("th"));
    head.scope = "row";
    head.textContent = term;
    for (const key of KEYS) {
      const row = rowOf(key, name);
      line.insertCell().textContent = row ? text(row) : "kept";
    }
  }
}

function histograms(host, key, found) {
  const place = (id, title, parent) => {
    const box = document.createElement("div");
    if (title) box.appendChild(document.createElement("h3")).textContent = title;
    const target = box.appendChild(document.createElement("div"));
    target.className = "chart";
    target.id = id + key;
    parent.append(box);
    return target;
  };
  const of = KEYS.length > 1 ? ` (${key})` : "";
  const levels = found.levels.map((at, level) => ({ at, level }));
  const used = found.scales.map((count, byte) => ({ byte, count }));
  const first = used.findIndex((u) => u.count), last = used.findLastIndex((u) => u.count);
  const drawn = [];
  if (found.weights) {
    const width = (2 * RANGE) / found.weights.length;
    const bins = found.weights.map((count, i) => ({ at: -RANGE + i * width, to: -RANGE + (i + 1) * width, count }));
    const title = `Weights over their block's scale, and the levels they are rounded to${of}`;
    drawn.push(draw(place("weights", title, host), "weights", { weights: bins, levels }));
  }
  const pair = host.appendChild(document.createElement("div"));
  pair.className = "pair";
  const indices = found.indices.map((count, level) => ({ level, count }));
  drawn.push(draw(place("indices", `Use of the levels${of}`, pair), "indices", { indices }));
  drawn.push(draw(place("scales", `Use of the scale bytes${of}`, pair), "scales", { scales: used.slice(first, last + 1) }));
  return Promise.all(drawn);
}
