// Draws the timeline of a run into an element: rounds as bands, nodes as rows, outages red; says under the pointer what
// each span was. Names and reasons come from strangers: they only ever become text.
function drawTimeline(holder, shown) {
  const colours = { round: "#4a8f57", meeting: "#d9a13b", lost: "#c62828", left: "#8a8a8a", closed: "#5d6bb0" };
  const line = 18, top = 44, narrow = holder.clientWidth < 600, names = narrow ? 96 : 190;
  const rows = [["rounds", shown.rounds], ...shown.nodes];
  const width = Math.max(holder.clientWidth, 320), height = top + rows.length * line + 6;
  const canvas = document.createElement("canvas"), tip = document.createElement("div");
  const ratio = Math.min(window.devicePixelRatio || 1, 2, 32000 / height);
  canvas.width = width * ratio; canvas.height = height * ratio;
  canvas.style.width = "100%"; canvas.style.height = height + "px";
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", `timeline of ${shown.run_id}: ${shown.nodes.length} nodes`);
  tip.className = "tip"; tip.hidden = true;
  holder.replaceChildren(canvas, tip);
  const pen = canvas.getContext("2d"), ink = getComputedStyle(holder).color;
  const seconds = shown.seconds || 1, x = (at) => names + (width - names - 6) * at / seconds;
  pen.scale(ratio, ratio);
  pen.font = "12px system-ui, sans-serif"; pen.textBaseline = "middle";
  const label = (at) => shown.began === null ? `${Math.round(at)} s` : new Date((shown.began + at) * 1000).toISOString().slice(5, 19).replace("T", " ");
  const ticks = Math.max(1, Math.floor((width - names) / 130));
  for (let tick = 0; tick <= ticks; tick++) {
    const at = seconds * tick / ticks;
    pen.globalAlpha = .25; pen.fillStyle = ink; pen.fillRect(x(at), top - 12, 1, height - top + 6);
    pen.globalAlpha = 1; pen.textAlign = tick === 0 ? "left" : tick === ticks ? "right" : "center"; pen.fillText(label(at), x(at), 18);
  }
  pen.textAlign = "left";
  rows.forEach(([name, spans], at) => {
    const y = top + at * line;
    pen.fillStyle = ink; pen.fillText(name.length * 7 > names ? name.slice(0, names / 7 - 1) + "…" : name, 2, y + line / 2, names - 6);
    for (const [kind, began, long] of spans) {
      pen.fillStyle = colours[kind];
      pen.globalAlpha = kind === "lost" ? 1 : .8;
      pen.fillRect(x(began), y + 2, Math.max(x(began + long) - x(began) - (kind === "round" ? .6 : 0), kind === "round" ? .6 : 1.6), line - 4);
    }
    pen.globalAlpha = 1;
  });
  const at = (event) => {
    const box = canvas.getBoundingClientRect(), row = rows[Math.floor((event.clientY - box.top - top) / line)];
    const when = ((event.clientX - box.left) * width / box.width - names) / (width - names - 6) * seconds, near = seconds * 3 / width;
    const found = row && when >= -near ? row[1].findLast(([, began, long]) => when >= began - near && when <= began + long + near) : null;
    tip.hidden = !found;
    if (!found) return;
    tip.textContent = `${row[0]}: ${found[3]}, from ${label(found[1])} for ${found[2].toFixed(1)} s`;
    tip.style.left = Math.max(0, Math.min(event.clientX - box.left + 12, box.width - 260)) + "px";
    tip.style.top = event.clientY - box.top + 14 + "px";
  };
  canvas.addEventListener("pointermove", at);
  canvas.addEventListener("pointerdown", at);
  canvas.addEventListener("pointerleave", () => { tip.hidden = true; });
}
