// --- the table

const ONE = [
  ["name", "Tensor", (v) => v],
  ["layer", "Layer", (v) => (v === null ? "-" : v)],
  ["shape", "Shape", shape],
  ["k", "K", (v) => v],
  ["bits_per_weight", "Bits", number(2)],
  ["sqnr_db", "SQNR dB", number(2)],
  ["off_db", "To normal dB", signed],
  ["max_abs_err", "Max error", scientific],
  ["bytes", "Bytes", whole],
  ["codebook", "Codebook", (v) => v],
];
const TWO = [
  ["name", "Tensor", (v) => v],
  ["shape", "Shape", shape],
  ["k", "K", both(String)],
  ["sqnr_db", "SQNR dB", both(number(2))],
  ["more_db", "Gain dB", signed],
  ["bytes", "Bytes", both(whole)],
  ["more_bytes", "More bytes", (v) => (v > 0 ? "+" : "") + whole(v)],
  ["codebook", "Codebook", both(String)],
];
const COLUMNS = data.compared ? TWO : ONE;
const ROWS = data.compared || Object.values(data.rows.A);
const NATURAL = new Intl.Collator("en", { numeric: true });
const LIMIT = 2000; // rows drawn at once; a search finds the others
let sorted = { key: "name", up: true };

const size = (dimensions) => dimensions.reduce((a, b) => a * b, 1);

function sortable(row) {
  const value = row[sorted.key];
  if (sorted.key === "shape") return size(value);
  return Array.isArray(value) ? value[1] : value; // of two checkpoints, by the second
}

function compare(a, b) {
  const [x, y] = [sortable(a), sortable(b)];
  if (x === null || y === null) return (x === null) - (y === null); // what was not measured comes last, either way
  const order = typeof x === "number" ? x - y : NATURAL.compare(x, y);
  return sorted.up ? order : -order;
}

function matches(row, words) {
  return words.every((word) => {
    const k = /^k=(\d)$/.exec(word);
    return k ? [row.k].flat().includes(Number(k[1])) : row.name.toLowerCase().includes(word) || [row.codebook].flat().includes(word);
  });
}

function fill() {
  const words = element("search").value.toLowerCase().split(/\s+/).filter(Boolean);
  const rows = ROWS.filter((row) => matches(row, words)).sort(compare);
  const body = document.createElement("tbody");
  for (const row of rows.slice(0, LIMIT)) {
    const line = body.insertRow();
    line.dataset.name = row.name;
    line.classList.toggle("open", row.name === element("choice").value);
    line.addEventListener("click", () => open_(row.name));
    for (const [key, , text] of COLUMNS) {
      const cell = line.insertCell();
      if (key !== "name") cell.textContent = text(row[key]);
      else {
        const button = cell.appendChild(document.createElement("button")); // so that the keyboard opens it too
        button.type = "button";
        button.textContent = row.name;
      }
    }
  }
  element("tensors").tBodies[0].replaceWith(body);
  const more = rows.length > LIMIT ? `, the first ${LIMIT} shown` : "";
  element("found").textContent = `${rows.length} of ${ROWS.length}${more}`;
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

const off = (name) => rowOf("A", name)?.off_db ?? 0;
const worstFirst = (a, b) => off(a) - off(b);

function asked() {
  // The tensor that the address names, which may be anything.
  try {
    return decodeURIComponent(location.hash.slice(1));
  } catch {
    return "";
  }
}

const names = [...new Set(KEYS.flatMap((key) => Object.keys(data.rows[key])))].sort(worstFirst);
for (const name of names) element("choice").add(new Option(name, name));
if (known(asked())) element("choice").value = asked();
element("choice").addEventListener("change", (event) => open_(event.target.value));
element("search").addEventListener("input", fill);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
let width = window.innerWidth;
window.addEventListener("resize", () => {
  if (width < NARROW !== window.innerWidth < NARROW) drawAll();
  width = window.innerWidth;
});
head();
fill();
drawAll();
