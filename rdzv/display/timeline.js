// Draws the timeline of a run into an element: rounds as bands, nodes as rows, outages red; says under the pointer what
// each span was. Names and reasons come from strangers: they only ever become text.
// The element scrolls, and only the rows that are in sight are painted: a thousand rows cost as much as forty.
function drawTimeline(holder, shown) {
  const colours = { round: "#4a8f57", meeting: "#d9a13b", lost: "#c62828", left: "#8a8a8a", closed: "#5d6bb0" };
  const line = 18, top = 44, narrow = holder.clientWidth < 600, names = narrow ? 96 : 190;
  const rows = [["rounds", shown.rounds], ...shown.nodes], scrolled = holder.scrollTop;
  const space = document.createElement("div"), canvas = document.createElement("canvas"), tip = document.createElement("div");
  space.style.position = "relative"; space.style.height = top + rows.length * line + 6 + "px";
  const note = document.createElement("div");
  note.textContent = shown.note; note.style.fontSize = "12px";
  space.append(canvas, tip);
  holder.replaceChildren(space, note);
  holder.scrollTop = scrolled;
  const width = Math.max(space.clientWidth, 300), height = Math.min(space.clientHeight, holder.clientHeight || Infinity);
  const ratio = Math.min(window.devicePixelRatio || 1, 2);
  canvas.width = width * ratio; canvas.height = height * ratio;
  canvas.style.cssText = `display: block; position: sticky; top: 0; width: 100%; height: ${height}px`;
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", `timeline of ${shown.run_id}: ${shown.nodes.length} nodes`);
  tip.className = "tip"; tip.hidden = true;
  const pen = canvas.getContext("2d"), ink = getComputedStyle(holder).color;
  const seconds = shown.seconds || 1, x = (at) => names + (width - names - 6) * at / seconds;
  const label = (at) => shown.began === null ? `${Math.round(at)} s` : new Date((shown.began + at) * 1000).toISOString().slice(5, 19).replace("T", " ");
  const ticks = Math.max(1, Math.floor((width - names) / 170));

  function paintRow([name, spans], y) {
    pen.globalAlpha = 1;
    pen.fillStyle = ink; pen.fillText(name.length * 7 > names ? name.slice(0, names / 7 - 1) + "…" : name, 2, y + line / 2, names - 6);
    for (const [kind, began, long] of spans) {
      pen.fillStyle = colours[kind];
      pen.globalAlpha = kind === "lost" ? 1 : .8;
      pen.fillRect(x(began), y + 2, Math.max(x(began + long) - x(began) - (kind === "round" ? .6 : 0), kind === "round" ? .6 : 1.6), line - 4);
    }
  }

  function paint() {
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    pen.font = "12px system-ui, sans-serif"; pen.textBaseline = "middle";
    for (let tick = 0; tick <= ticks; tick++) {
      const at = seconds * tick / ticks;
      pen.globalAlpha = .25; pen.fillStyle = ink; pen.fillRect(x(at), top - 12, 1, height - top + 6);
      pen.globalAlpha = 1; pen.textAlign = tick === 0 ? "left" : tick === ticks ? "right" : "center"; pen.fillText(label(at), x(at), 18);
    }
    pen.textAlign = "left";
    pen.save();
    pen.beginPath(); pen.rect(0, top - 2, width, height); pen.clip();
    const first = Math.floor(holder.scrollTop / line);
    for (let at = first; at < rows.length && top + at * line - holder.scrollTop < height; at++) {
      paintRow(rows[at], top + at * line - holder.scrollTop);
    }
    pen.restore();
  }

  const point = (event) => {
    const box = canvas.getBoundingClientRect(), row = rows[Math.floor((event.clientY - box.top - top + holder.scrollTop) / line)];
    const when = ((event.clientX - box.left) * width / box.width - names) / (width - names - 6) * seconds, near = seconds * 3 / width;
    const found = row && when >= -near ? row[1].findLast(([, began, long]) => when >= began - near && when <= began + long + near) : null;
    tip.hidden = !found;
    if (!found) return;
    tip.textContent = `${row[0]}: ${found[3]}, from ${label(found[1])} for ${found[2].toFixed(1)} s`;
    tip.style.left = Math.max(0, Math.min(event.clientX - box.left + 12, box.width - 260)) + "px";
    // Above the pointer where there is no room below it, so that the element need not be scrolled to read it.
    const below = event.clientY - box.top + 14, high = tip.offsetHeight;
    tip.style.top = holder.scrollTop + (below + high > height ? Math.max(0, below - high - 28) : below) + "px";
  };
  canvas.addEventListener("pointermove", point);
  canvas.addEventListener("pointerdown", point);
  canvas.addEventListener("pointerleave", () => { tip.hidden = true; });
  holder.onscroll = () => { tip.hidden = true; paint(); };
  paint();
}
