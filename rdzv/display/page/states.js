// The states of a node: their words, tones, signs and shapes. Needs no document, so that a test can draw each of them.
// The order is that of urgency, as in rdzv/core/stuck/pace.py: the first are drawn, listed and found first.
const STATES = [
  ["lost", "bad", "✕"],
  ["never seen", "bad", "?"],
  ["left", "over", "–"],
  ["unfit", "bad", "⊘"],
  ["banned", "over", "⊘"],
  ["stuck", "bad", "!"],
  ["accused", "bad", "◆"],
  ["slow", "warn", "▲"],
  ["draining", "drain", "▼"],
  ["waiting", "wait", "●"],
  ["spare", "wait", "○"],
  ["busy", "ok", "·"],
  ["in the round", "ok", ""],
];
const NAMES = STATES.map(([name]) => name), TONES = STATES.map(([, tone]) => tone), SIGNS = STATES.map(([, , sign]) => sign);
const K = Object.fromEntries(NAMES.map((name, code) => [name, code]));
const WELL = K.waiting; // from here on an operator need do nothing

// The sign of a run's state, so that its tone is never told by colour alone.
function signOf(run) {
  if (run.closed !== null) return run.closing && run.closing.given_up ? "✕" : "■";
  if (run.phase === "last call") return "◔";
  if (run.state.meant === "wait") return "○";
  return { ok: "▶", drain: "▼", warn: "▲", bad: run.phase === "training" ? "!" : "✕" }[run.state.meant] ?? "■";
}

// Draw a state into a square. No two states have the same shape, whatever colours are left of it.
function shape(pen, kind, x, y, w, h, colours) {
  const s = Math.min(w, h), thin = Math.max(1, s / 9), cx = x + w / 2, cy = y + h / 2, r = s * 0.5 - thin / 2;
  pen.clearRect(x - 0.5, y - 0.5, w + 1, h + 1);
  pen.fillStyle = pen.strokeStyle = colours[TONES[kind]];
  pen.lineWidth = thin;
  const lines = (...points) => {
    pen.beginPath();
    for (const [a, b, c, d] of points) { pen.moveTo(cx + a * s, cy + b * s); pen.lineTo(cx + c * s, cy + d * s); }
    pen.stroke();
  };
  const solid = (...points) => {
    pen.beginPath();
    points.forEach(([a, b]) => pen.lineTo(cx + a * s, cy + b * s));
    pen.fill();
  };
  const frame = () => pen.strokeRect(x + thin / 2, y + thin / 2, w - thin, h - thin);
  const ring = (radius) => { pen.beginPath(); pen.arc(cx, cy, radius, 0, 7); };
  switch (kind) {
    case K.lost: frame(); pen.lineWidth = thin * 1.6; lines([-0.26, -0.26, 0.26, 0.26], [0.26, -0.26, -0.26, 0.26]); break;
    case K["never seen"]:
      pen.setLineDash([s / 5, s / 7]); frame(); pen.setLineDash([]);
      solid([-0.12, -0.12], [0.12, -0.12], [0.12, 0.12], [-0.12, 0.12]); break;
    case K.left: frame(); lines([-0.25, 0, 0.25, 0]); break;
    case K.unfit: frame(); lines([-0.5, 0.5, 0.5, -0.5]); break;
    case K.banned: ring(r); pen.stroke(); lines([-0.35, 0.35, 0.35, -0.35]); break;
    case K.stuck:
      pen.fillRect(x, y, w, h); pen.fillStyle = colours.bg;
      pen.fillRect(cx - s * 0.09, cy - s * 0.36, s * 0.18, s * 0.42); pen.fillRect(cx - s * 0.09, cy + s * 0.16, s * 0.18, s * 0.18); break;
    case K.accused: solid([0, -0.5], [0.5, 0], [0, 0.5], [-0.5, 0]); break;
    case K.slow: solid([0, -0.48], [0.5, 0.45], [-0.5, 0.45]); break;
    case K.draining: solid([-0.5, -0.45], [0.5, -0.45], [0, 0.48]); break;
    case K.waiting: ring(s / 2); pen.fill(); break;
    case K.spare: ring(r); pen.stroke(); break;
    case K.busy:
      pen.fillRect(x, y, w, h); pen.fillStyle = colours.bg;
      pen.fillRect(cx - s * 0.18, cy - s * 0.18, s * 0.36, s * 0.36); break;
    default: pen.fillRect(x, y, w, h);
  }
}
