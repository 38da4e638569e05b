// The map: all nodes of a run on one canvas, in the largest cells with which all are in sight at once.
const OUTSIDE = "not in the round";
const CARDS_MOST = 60; // nodes that have a card each, with name, rank and step
const ALONE = 16; // pixels that a node outside the round takes at least: it is what one looks for
let layout = null, selected = -1, tones = null;

function themed() {
  const names = ["bg", "card", "ink", "soft", "line", "ok", "warn", "bad", "wait", "over", "drain"];
  tones = Object.fromEntries(names.map((name) => [name, css("--" + name)]));
  if (layout) layout.key = "";
}

function groupsOf(found, by) {
  const groups = [], rest = new Map(), inside = (i) => String(found.nodes[i].attributes?.[by] ?? "without");
  if (found.outside) groups.push([OUTSIDE, Array.from({ length: found.outside }, (_, i) => i)]);
  for (let i = found.outside; i < found.nodes.length; i++) {
    const value = by ? inside(i) : groups.length ? "in the round, by rank" : "";
    rest.has(value) ? rest.get(value).push(i) : rest.set(value, [i]);
  }
  return [...groups, ...[...rest].sort(([a], [b]) => a.localeCompare(b, "en", { numeric: true }))];
}

// So many columns that the last row is full, if that makes no odd shape.
function even(count) {
  const most = Math.ceil(Math.sqrt(count * 1.8));
  for (let own = most; own >= most * 0.55; own--) if (count % own === 0) return own;
  return most;
}

function place(groups, count, width, high) {
  const x = new Float32Array(count), y = new Float32Array(count), cards = count <= CARDS_MOST;
  for (let size = cards ? 1 : 36; ; size -= size > 12 ? 2 : 1) {
    const placed = placeAt(size, groups, cards, count, width, x, y);
    if (cards || size <= 5 || placed.height <= high) return placed;
  }
}

function placeAt(size, groups, cards, count, width, x, y) {
  const across = Math.min(count, count > 8 ? 6 : 4);
  const usual = cards ? Math.min(Math.max(150, width / across - 8), 340, width) : size;
  const tall = cards ? (count <= 8 ? 104 : 56) : size, gap = cards ? 8 : size > 12 ? 3 : size > 7 ? 2 : 1;
  const pad = groups.length > 1 ? (size > 12 || cards ? 14 : 7) : 0;
  const label = groups.length > 1 || groups[0]?.[0] ? (size > 8 || cards ? 17 : 13) : 0, labels = [];
  let left = 0, top = 0, line = 0;
  for (const [name, cells] of groups) {
    const big = name === OUTSIDE && !cards ? Math.max(size, ALONE) : 0, w = big || usual, h = big || tall;
    const all = Math.max(1, Math.floor((width + gap) / (w + gap)));
    const least = label ? Math.ceil(Math.min(110, 7 * name.length) / (w + gap)) : 1;
    const own = cards || groups.length === 1 ? all : Math.min(all, Math.max(least, even(cells.length)));
    const filled = Math.min(own, cells.length);
    if (left && left + filled * (w + gap) > width + gap) { left = 0; top += line + pad; line = 0; }
    if (label) labels.push({ name, cells, x: left, y: top + label - 4, wide: (cards ? filled : own) * (w + gap) - gap, shown: null });
    cells.forEach((cell, number) => {
      x[cell] = left + (number % own) * (w + gap);
      y[cell] = top + label + Math.floor(number / own) * (h + gap);
    });
    line = Math.max(line, label + Math.ceil(cells.length / own) * (h + gap));
    left += (cards ? filled : own) * (w + gap) + pad;
  }
  return { x, y, w: usual, h: tall, big: cards ? 0 : Math.max(size, ALONE), cards, labels, height: top + line, order: groups.flatMap((one) => one[1]) };
}

const sized = (i) => (i < layout.outside && layout.big ? [layout.big, layout.big] : [layout.w, layout.h]);

function card(pen, node, run, x, y, w, h) {
  const few = h > 60, left = x + (few ? 50 : 36), state = NAMES[node.kind];
  const more = node.says ?? (node.gone ? goneOf(node.gone) : node.member ? stepOf(node.member) : run.since[node.name] ? `since ${hour(run.since[node.name])}` : "");
  pen.clearRect(x - 2, y - 2, w + 4, h + 4);
  pen.fillStyle = tones.card; pen.fillRect(x, y, w, h);
  pen.fillStyle = tones[TONES[node.kind]]; pen.fillRect(x, y, 6, h);
  pen.save();
  pen.beginPath(); pen.rect(x, y, w - 4, h); pen.clip();
  pen.textBaseline = "alphabetic";
  const line = (text, size, bold, down, from = left) => {
    pen.font = `${bold ? 600 : 400} ${size}px system-ui, sans-serif`;
    pen.fillStyle = bold ? tones.ink : tones.soft;
    pen.fillText(`\u2066${text}\u2069`, from, y + down);
  };
  line(clean(node.name || "not named", Math.max(12, Math.floor((w - 42) / (few ? 11.5 : 8.6)))), few ? 20 : 15, true, few ? 32 : 22);
  line((node.rank === null ? "" : `rank ${node.rank}, `) + state, few ? 16 : 13, false, few ? 58 : 41);
  if (few && more !== state) line(clean(more, 60), 15, false, 86, x + 18);
  pen.restore();
  pen.save();
  pen.translate(x + (few ? 18 : 12), y + (few ? 14 : 9));
  shape(pen, node.kind, 0, 0, few ? 22 : 16, few ? 22 : 16, tones);
  pen.restore();
}

// Draw the map; after the first time, only the cells whose state has changed.
function drawMap(run, found) {
  const canvas = at("map"), width = canvas.clientWidth, by = at("by").value, ratio = Math.min(devicePixelRatio || 1, 2);
  const above = canvas.getBoundingClientRect().top + scrollY, high = Math.max(260, 60 * Math.floor((innerHeight - 50 - above) / 60));
  const outside = found.nodes.slice(0, found.outside).map((one) => one.name);
  const key = JSON.stringify([run.run_id, run.round, found.nodes.length, by, width, high, ratio, outside]);
  const pen = canvas.getContext("2d"), fresh = !layout || layout.key !== key;
  if (fresh) {
    if (layout && layout.run !== run.run_id) selected = -1;
    const placed = place(groupsOf(found, by), found.nodes.length, width, high);
    layout = { key, run: run.run_id, outside: found.outside, kinds: new Uint8Array(found.nodes.length).fill(255), ...placed };
    canvas.width = width * ratio;
    canvas.height = (layout.height + 2) * ratio;
    canvas.style.height = layout.height + 2 + "px";
    selected = Math.min(selected, found.nodes.length - 1);
  }
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.textBaseline = "alphabetic";
  for (const label of layout.labels) drawLabel(pen, label, found);
  for (let i = 0; i < found.nodes.length; i++) {
    const node = found.nodes[i];
    if (layout.cards) card(pen, node, run, layout.x[i], layout.y[i], layout.w, layout.h);
    else if (layout.kinds[i] !== node.kind) shape(pen, node.kind, layout.x[i], layout.y[i], ...sized(i), tones);
    layout.kinds[i] = node.kind;
  }
  drawCursor();
  drawLegend(found);
}

// A group says how many of its nodes are not well, since its cells may be small.
function drawLabel(pen, label, found) {
  let ill = 0, worst = WELL;
  for (const i of label.cells) {
    if (found.nodes[i].kind < WELL) { ill++; worst = Math.min(worst, found.nodes[i].kind); }
  }
  const says = ill && label.name !== OUTSIDE ? `${SIGNS[worst]}${ill} ` : "";
  const text = says + clean(label.name, Math.max(4, Math.floor(label.wide / 6.6) - says.length));
  if (text === label.shown) return;
  label.shown = text;
  pen.clearRect(label.x, label.y - 12, label.wide, 15);
  pen.font = `${says ? "700 " : ""}12px system-ui, sans-serif`;
  pen.fillStyle = says ? tones.ink : tones.soft;
  pen.fillText(`\u2066${text}\u2069`, label.x, label.y, Math.max(label.wide, 20));
}

function drawLegend(found) {
  const words = NAMES.map((name, code) => found.counts[code] && `${num(found.counts[code])} ${name}`).filter(Boolean);
  at("map").setAttribute("aria-label", `${many(found.nodes.length, "node")}: ${words.join(", ")}`);
  replace(at("legend"), words + tones.bg, () => NAMES.flatMap((name, code) => {
    if (!found.counts[code]) return [];
    const item = el("span"), sign = el("canvas");
    sign.width = sign.height = 28;
    shape(sign.getContext("2d"), code, 2, 2, 24, 24, tones);
    item.append(sign, `${num(found.counts[code])} ${name}`);
    return [item];
  }));
}

// The pointer is a box of the document, so that pointing draws nothing.
function drawCursor() {
  const mark = at("cursor");
  mark.hidden = !layout || selected < 0 || selected >= layout.x.length;
  if (mark.hidden) return;
  const [w, h] = sized(selected);
  mark.style.width = w + 6 + "px";
  mark.style.height = h + 6 + "px";
  mark.style.transform = `translate(${layout.x[selected]}px, ${layout.y[selected]}px)`;
}

function nodeUnder(event) {
  const box = at("map").getBoundingClientRect(), px = event.clientX - box.left, py = event.clientY - box.top;
  const isUnder = (left, i) => px >= left && py >= layout.y[i] && px < left + sized(i)[0] + 1 && py < layout.y[i] + sized(i)[1] + 1;
  return layout ? layout.x.findIndex(isUnder) : -1;
}

// Where a key leads to from the selected node; undefined if the key means nothing, or leads nowhere.
function nodeAfter(key, nodes) {
  const { order, x, y } = layout, spot = order.indexOf(selected);
  const beside = (sign) => {
    let best, least = Infinity;
    for (const i of order) {
      const dy = sign * (y[i] - y[selected]), far = dy * 3 + Math.abs(x[i] - x[selected]);
      if (dy > 1 && far < least) { least = far; best = i; }
    }
    return best;
  };
  const ill = (way) => {
    for (let n = 1; n <= order.length; n++) {
      const i = order[(spot + way * n + 2 * order.length) % order.length];
      if (nodes[i].kind < WELL) return i;
    }
    return selected;
  };
  switch (key) {
    case "ArrowRight": return order[spot + 1];
    case "ArrowLeft": return order[spot - 1];
    case "ArrowDown": return selected < 0 ? order[0] : beside(1);
    case "ArrowUp": return beside(-1);
    case "Home": return order[0];
    case "End": return order[order.length - 1];
    case "n": return ill(1);
    case "p": return ill(-1);
    case "Escape": return -1;
  }
}
