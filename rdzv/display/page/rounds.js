// The rounds as one band with their sizes, gaps marked; below it only the nodes that came or went, the newest first.
let drawn = { run: null, key: "", at: 0, clock: 0, timeline: null, history: null }, bands = [], pointed = -1;
let zoom = null, drag = null, scale = null; // the zoomed seconds; pixels from and to while dragging; how pixels become seconds
const BAND = 34, LINE = 17, TOP = 22;

// Ask for what happened once something has.
async function fetchHappened(run) {
  const key = JSON.stringify([run.run_id, run.round, run.phase, run.missing_count, run.happened]);
  if (key === drawn.key) {
    if (performance.now() - drawn.at > 5000) drawTime();
    return;
  }
  drawn.key = key;
  try {
    const path = `api/runs/${encodeURIComponent(run.run_id)}/`;
    const answers = await Promise.all(["timeline", "history"].map((what) => fetch(path + what, { credentials: "same-origin" })));
    if (!answers.every((one) => one.ok)) throw new Error("it is asked again with the next message");
    const [timeline, history] = await Promise.all(answers.map((one) => one.json()));
    if (!now || now.run.run_id !== run.run_id) return;
    drawn = { run: run.run_id, key, at: performance.now(), clock: clock(), timeline, history };
  } catch {
    drawn.key = "";
    return;
  }
  drawTime();
  showEvents();
  showHead(now.run);
}

// What goes on is longer now than when it was told.
function stretched(spans, end, more) {
  return spans.map((span) => (span[0] !== "closed" && span[1] + span[2] >= end - 0.05 ? [span[0], span[1], span[2] + more, ...span.slice(3)] : span));
}

function drawTime() {
  const shown = drawn.timeline, run = now && now.run;
  if (!shown || !run || drawn.run !== run.run_id || !shown.rounds.length) return;
  drawn.at = performance.now();
  const canvas = at("time"), width = canvas.clientWidth, ratio = Math.min(devicePixelRatio || 1, 2), narrow = width < 600;
  const more = run.closed === null ? Math.max(0, clock() - drawn.clock) : 0, whole = (shown.seconds || 1) + more, range = Number(at("range").value);
  if (zoom && zoom.run !== run.run_id) zoom = null;
  const end = zoom ? Math.min(zoom.end, whole) : whole, names = narrow ? 84 : 150;
  const begin = zoom ? Math.min(zoom.begin, end - 1) : range ? Math.max(0, end - range) : 0;
  const grown = (spans) => stretched(spans, shown.seconds, more);
  const isGap = ([kind]) => kind === "lost" || kind === "left";
  const last = (spans) => Math.max(...spans.map(([kind, began]) => (kind === "round" ? 0 : began)));
  const went = shown.nodes.filter(([, spans]) => spans.length && (spans.some(isGap) || spans[0][1] > 0)).sort((a, b) => last(b[1]) - last(a[1]));
  const rows = went.slice(0, narrow || innerHeight < 1000 ? 4 : 6), high = TOP + BAND + 6 + rows.length * LINE;
  const x = (second) => names + ((width - names - 2) * (Math.min(Math.max(second, begin), end) - begin)) / (end - begin);
  const isShown = ([, began, seconds]) => began <= end && began + seconds >= begin;
  scale = { begin, end, names, wide: width - names - 2 };
  const pen = canvas.getContext("2d");
  canvas.width = width * ratio;
  canvas.height = high * ratio;
  canvas.style.height = high + "px";
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.font = "12px system-ui, sans-serif";
  pen.textBaseline = "middle";
  const ticks = Math.max(1, Math.floor((width - names) / (narrow ? 130 : 190)));
  for (let tick = 0; tick <= ticks; tick++) {
    const second = begin + ((end - begin) * tick) / ticks, hours = shown.began === null ? `${Math.round(second)} s` : hour(shown.began + second);
    const text = tick === ticks && run.closed === null && end === whole ? "now" : end - begin > 7200 && shown.began !== null ? hours.slice(0, -3) : hours;
    pen.fillStyle = tones.line; pen.fillRect(x(second), 15, 1, high);
    pen.fillStyle = tones.soft; pen.textAlign = tick === 0 ? "left" : tick === ticks ? "right" : "center"; pen.fillText(text, x(second), 8);
  }
  pen.textAlign = "left";
  const paint = ([kind, began, seconds], y, tall) => {
    const from = x(began), wide = Math.max(x(began + seconds) - from, kind === "round" ? 0.6 : 2.5);
    pen.fillStyle = tones[{ round: "ok", meeting: "warn", lost: "bad", left: "over", closed: "ink" }[kind] ?? "over"];
    if (kind === "lost" || kind === "left") { // thin: it is not there; its end is marked, so that the shape tells it, too
      pen.fillRect(from, y + tall / 2 - 2, wide, 4);
      pen.fillRect(from, y + 2, 2, tall - 4);
    } else if (kind === "meeting") pen.fillRect(from, y - 3, wide, tall + 6);
    else pen.fillRect(from, y, kind === "round" ? wide - 0.8 : wide, tall);
    return [from, wide];
  };
  pen.fillStyle = tones.ink;
  pen.fillText("round, size", 0, TOP + BAND / 2, names - 8);
  bands = [];
  const told = (span, name = "") => `${name}${span[3]}, from ${shown.began === null ? `${Math.round(span[1])} s` : hour(shown.began + span[1])} for ${long(span[2])}`;
  for (const span of grown(shown.rounds).filter(isShown)) {
    const [from, wide] = paint(span, TOP, BAND);
    bands.push({ from, wide, top: TOP, bottom: TOP + BAND + 3, span, text: told(span) });
    if (span[0] !== "round" || wide <= 46) continue;
    pen.fillStyle = tones.ink;
    pen.font = "600 13px system-ui, sans-serif";
    pen.fillText(wide > 90 ? many(span[5], "node") : num(span[5]), from + 5, TOP + 11, wide - 8);
    pen.font = "12px system-ui, sans-serif";
    pen.fillText(`round ${span[4]}`, from + 5, TOP + 25, wide - 8);
  }
  rows.forEach(([name, spans], number) => {
    const y = TOP + BAND + 6 + number * LINE;
    pen.fillStyle = tones.ink;
    pen.fillText(`\u2066${clean(name, narrow ? 13 : 22)}\u2069`, 0, y + LINE / 2, names - 8);
    for (const span of grown(spans).filter(isShown)) {
      const [from, wide] = paint(span, y + 2, LINE - 4);
      bands.push({ from, wide, top: y, bottom: y + LINE, text: told(span, `${name}: `) });
    }
  });
  if (drag) {
    pen.globalAlpha = 0.25; pen.fillStyle = tones.ink;
    pen.fillRect(Math.min(drag.from, drag.to), TOP - 4, Math.abs(drag.to - drag.from), high);
    pen.globalAlpha = 1;
  }
  const rounds = shown.rounds.filter(([kind]) => kind === "round").length, first = went.slice(0, 8).map(([name]) => clean(name)).join(", ");
  canvas.setAttribute("aria-label", `${many(rounds, "round")} in ${long(end)}; came or went: ${first || "no node"}${went.length > 8 ? " and others" : ""}`);
  const unshown = went.length > rows.length ? `${went.length - rows.length} more came or went earlier` : "";
  drawn.note = [zoom && "zoomed; Esc or a double click shows all again", unshown, shown.note && `${shown.note}; what is blank is not told`].filter(Boolean).join("; ");
  tellBand();
}

function tellBand() { set(at("span"), clean(bands[pointed]?.text ?? drawn.note ?? "", 300)); }

function pointAtBand(event) {
  const box = at("time").getBoundingClientRect(), px = event.clientX - box.left, py = event.clientY - box.top;
  if (drag) {
    drag.to = Math.max(px, scale.names);
    return drawTime();
  }
  const isUnder = ({ from, wide, top, bottom }) => px >= from - 2 && px <= from + wide + 2 && py >= top && py < bottom;
  pointed = bands.findLastIndex(isUnder);
  tellBand();
}

function beginDrag(event) {
  const px = event.clientX - at("time").getBoundingClientRect().left;
  if (!scale || event.button || px < scale.names) return;
  at("time").setPointerCapture(event.pointerId);
  drag = { from: px, to: px };
}

// Show the seconds between the ends of the drag; a drag of some pixels is a click.
function endDrag() {
  if (!drag) return;
  const [from, to] = [drag.from, drag.to].sort((a, b) => a - b).map((px) => scale.begin + ((scale.end - scale.begin) * (px - scale.names)) / scale.wide);
  const isClick = Math.abs(drag.to - drag.from) < 6;
  drag = null;
  isClick ? drawTime() : zoomTo(from, to);
}

// Show these seconds, at least one; without arguments all that the range says.
function zoomTo(begin, end) {
  zoom = begin === undefined ? null : { run: drawn.run, begin: Math.max(0, begin), end: Math.max(end, begin + 1) };
  pointed = -1;
  drawTime();
}

function bandAfter(key) {
  const rounds = bands.filter((one) => one.span).length, band = bands[pointed];
  if (key === "Enter" && band && band.span) {
    const [, began, seconds] = band.span, beside = Math.max(seconds / 4, 5);
    zoomTo(began - beside, began + seconds + beside);
    return true;
  }
  if (key === "Escape" && zoom) {
    zoomTo();
    return true;
  }
  const to = { ArrowRight: pointed + 1, ArrowLeft: pointed < 0 ? rounds - 1 : pointed - 1, Home: 0, End: rounds - 1, Escape: -1 }[key];
  if (to === undefined || to >= rounds) return false;
  pointed = to;
  tellBand();
  return true;
}
