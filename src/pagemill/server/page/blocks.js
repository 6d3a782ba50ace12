// The map of KV blocks: a cell each, in the order of their ids; asked for while the page is visible and the view open.
const $ = (id) => document.getElementById(id);
const PERIOD_MS = 500, MOST_HEIGHT = 320, LEAST_CELL = 3, MOST_CELL = 12;
const NAMES = { f: "free", c: "cached", p: "private", s: "shared" };
const RANK = "fcps"; // where one cell stands for several blocks, the last of these that occurs is shown
let groups = [], shown = [], layout = null;

// The largest cells that show all blocks; below the least size, several blocks share one.
function arrange(counts, width) {
  for (let cell = MOST_CELL; cell >= LEAST_CELL; cell--) {
    const columns = Math.max(1, Math.floor(width / cell));
    const rows = counts.reduce((sum, count) => sum + Math.ceil(count / columns), 0) + (counts.length - 1);
    if (rows * cell <= MOST_HEIGHT) return { cell, columns, rows, each: 1 };
  }
  const columns = Math.max(1, Math.floor(width / LEAST_CELL));
  const room = columns * (Math.floor(MOST_HEIGHT / LEAST_CELL) - 2 * counts.length);
  const each = Math.max(1, Math.ceil(counts.reduce((a, b) => a + b, 0) / Math.max(1, room)));
  const rows = counts.reduce((sum, count) => sum + Math.ceil(Math.ceil(count / each) / columns), 0) + (counts.length - 1);
  return { cell: LEAST_CELL, columns, rows, each };
}

function cellsOf(states, each) {
  if (each === 1) return states;
  let cells = "";
  for (let at = 0; at < states.length; at += each) {
    const here = states.slice(at, at + each);
    cells += [...RANK].findLast((letter) => here.includes(letter));
  }
  return cells;
}

function draw() {
  const canvas = $("blocks"), width = canvas.clientWidth, scale = devicePixelRatio || 1;
  if (!width || !groups.length) return;
  layout = arrange(groups.map((states) => states.length), width);
  const { cell, columns, rows, each } = layout;
  canvas.style.height = `${rows * cell}px`;
  canvas.width = width * scale;
  canvas.height = rows * cell * scale;
  const pen = canvas.getContext("2d"), style = getComputedStyle(canvas);
  const swatch = (name) => getComputedStyle($(`count-${name}`).parentElement, "::before").backgroundColor;
  const colours = Object.fromEntries(Object.entries(NAMES).map(([key, name]) => [key, swatch(name)]));
  pen.scale(scale, scale);
  const size = cell - (cell > 4 ? 1.5 : 0.75);
  let top = 0;
  groups.forEach((states, group) => {
    const cells = cellsOf(states, each), before = shown[group] ?? "";
    for (let index = 0; index < cells.length; index++) {
      const x = (index % columns) * cell, y = top + Math.floor(index / columns) * cell;
      pen.fillStyle = colours[cells[index]];
      pen.fillRect(x, y, size, size);
      if (before.length === cells.length && before[index] !== cells[index]) {
        pen.strokeStyle = style.color; // what has changed since the last look wears a frame
        pen.lineWidth = 1;
        pen.strokeRect(x + 0.5, y + 0.5, size - 1, size - 1);
      }
    }
    shown[group] = cells;
    top += (Math.ceil(cells.length / columns) + 1) * cell;
  });
}

function count() {
  const totals = { f: 0, c: 0, p: 0, s: 0 };
  for (const states of groups) for (const letter of states) totals[letter]++;
  const words = [];
  for (const [letter, name] of Object.entries(NAMES)) {
    $(`count-${name}`).textContent = totals[letter].toLocaleString();
    words.push(`${totals[letter]} ${name}`);
  }
  const all = groups.reduce((sum, states) => sum + states.length, 0);
  $("blocks").setAttribute("aria-label", `${all} KV blocks: ${words.join(", ")}`);
  $("each").textContent = layout && layout.each > 1 ? `one cell is ${layout.each} blocks of ${all.toLocaleString()}` : `${all.toLocaleString()} blocks`;
}

// Which block is under the pointer, and what it is.
function point(event) {
  if (!layout) return;
  const { cell, columns, each } = layout;
  const column = Math.floor(event.offsetX / cell);
  let row = Math.floor(event.offsetY / cell);
  $("blocks").title = "";
  for (const states of groups) {
    const rows = Math.ceil(Math.ceil(states.length / each) / columns);
    const block = (row * columns + column) * each;
    if (row >= 0 && row < rows && column < columns && block < states.length) {
      const here = new Set(states.slice(block, block + each));
      $("blocks").title = `block ${block}${each > 1 ? `–${block + each - 1}` : ""}: ${[...here].map((key) => NAMES[key]).join(", ")}`;
      return;
    }
    row -= rows + 1;
  }
}

async function poll() {
  if (!document.hidden && $("live").open) {
    try {
      const response = await fetch("/kv_blocks");
      if (response.ok) {
        groups = (await response.json()).groups;
        draw();
        count();
      }
    } catch { /* live.js says that there is no connection */ }
  }
  setTimeout(poll, PERIOD_MS);
}

$("blocks").addEventListener("pointermove", point);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
addEventListener("resize", draw);
poll();
