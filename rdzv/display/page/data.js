// What the store has told: all at first, then changes. Hours are by the store's clock, and so is `clock()`.
let told = null, offset = 0, stopped = null;

// The hour now by the store's clock; it stands still while the store does not answer, and with it each duration.
function clock() { return stopped ?? Date.now() / 1000 + offset; }
function heardHour(seconds) { offset = seconds - Date.now() / 1000; stopped = null; }
function stopClock() { stopped ??= clock(); }

function takeAll(state) {
  told = state;
  told.runs = new Map(told.runs.map((run) => [run.run_id, run]));
  if (told.run) told.run.costAt = told.now;
}

function takeChanges(news) {
  if ("chosen" in news) told.chosen = news.chosen;
  for (const run of news.runs ?? []) told.runs.set(run.run_id, run);
  for (const name of news.gone ?? []) told.runs.delete(name);
  if ("run" in news) told.run = news.run;
  if (news.run) told.run.costAt = news.now;
  if (!news.changed) return;
  const { members, ...fields } = news.changed, run = told.run;
  Object.assign(run, fields);
  if (fields.cost) run.costAt = news.now;
  if (!members) return;
  if (members.gone.length || members.come.length) {
    const gone = new Set(members.gone);
    run.members = run.members.filter((one) => !gone.has(one.node_id)).concat(members.come);
    run.members.sort((a, b) => a.rank - b.rank);
    run.byName = null;
  }
  const byName = named(run);
  for (const name in members.changed) Object.assign(byName.get(name), members.changed[name]);
}

// The members by name, made once and kept until some come or go.
function named(run) {
  run.byName ??= new Map(run.members.map((one) => [one.node_id, one]));
  return run.byName;
}

const nodeOf = new WeakMap();

function nodeFor(member) {
  const node = { name: member.node_id, kind: 0, rank: null, address: "", attributes: null, member };
  nodeOf.set(member, node);
  return node;
}

// All nodes of a run, those outside the round first; `counts` by state.
function nodesOf(run) {
  const nodes = [], counts = new Array(STATES.length).fill(0);
  const add = (name, kind, more) => {
    counts[kind]++;
    nodes.push({ name, kind, rank: null, address: run.addresses[name], attributes: run.attributes[name], ...more });
  };
  for (const one of run.missing) add(one.node_id, K[one.kind] ?? K.lost, { gone: one, address: one.address });
  for (let more = run.missing.length; more < Math.min(run.missing_count, run.missing.length + 2000); more++) {
    add("", K.lost, { says: "missing; the store names the first only" });
  }
  for (const one of run.unfit) add(one.node_id, K.unfit, { says: "unfit: " + one.reason });
  for (const one of run.banned) add(one.node_id, K.banned, { says: banOf(one) });
  for (const name of run.waiting) add(name, K.waiting);
  for (const name of run.spares) add(name, K.spare);
  const outside = nodes.length;
  for (const one of run.closed === null ? run.members : run.last_members) {
    const node = nodeOf.get(one) ?? nodeFor(one); // made once: ten thousand of them each second would be half of the time
    node.kind = K[one.state] ?? K["in the round"];
    node.rank = one.rank;
    node.address = one.address;
    node.attributes = one.attributes;
    counts[node.kind]++;
    nodes.push(node);
  }
  return { nodes, outside, counts };
}

function banOf(ban) {
  const by = ban.by ? ` by ${ban.by}` : "", left = ban.ends_at === null ? "" : ` for ${long(ban.ends_at - clock())} more`;
  return `banned${by}${left}${ban.reason ? `: ${ban.reason}` : ""}`;
}

function goneOf(one) {
  return `${one.kind}${one.at === null ? "" : ` ${long(clock() - one.at)} ago, at ${hour(one.at)}`}${one.why ? `: ${one.why}` : ""}`;
}

function stepOf(one) {
  if (!one) return "";
  const step = one.step === null ? "" : `step ${num(one.step)}, ${long(clock() - one.step_at)} ago`;
  const rate = one.step_rate ? `${one.step_rate.toPrecision(3)}/s` : "", busy = one.busy ? `busy with ${clean(one.busy)}` : "";
  return [step, step && rate, busy, one.waits_for ? `waits for the key ${clean(one.waits_for)}` : ""].filter(Boolean).join(", ");
}

// Why a node is in its state, in words.
function saysOf(node, run, all = true) {
  if (node.says) return node.says;
  if (node.gone) return goneOf(node.gone);
  const of = (list, say) => list.filter((one) => one.node_id === node.name).map(say);
  const notes = [
    ...of(run.stuck, (one) => `stuck: no step for ${long(clock() - node.member.step_at)}; ${one.why}`),
    ...of(run.accused, (one) => `accused by ${one.by}: ${one.why}`),
    ...of(run.slow, (one) => `slow: ${one.why}`),
    ...of(run.draining, (one) => `draining: leaves within ${long(one.until - clock())}${one.reason ? ": " + one.reason : ""}`),
  ];
  if (run.since[node.name] && !node.member) notes.push(`since ${hour(run.since[node.name])}`);
  const step = notes.length && !all ? "" : stepOf(node.member);
  return [notes.length && node.member ? "" : NAMES[node.kind], ...notes, step].filter(Boolean).join("; ");
}

// What the run has cost until now; since it was told, time has passed that was lost, or not.
function costOf(run) {
  const { cost } = run;
  if (!cost || !cost.rounds) return ["nothing yet", "no round has completed"];
  const passed = run.closed === null ? Math.max(0, clock() - run.costAt) : 0;
  const waits = run.waiting_since !== null ? passed : 0, meets = run.phase === "training" ? 0 : passed - waits;
  const all = cost.seconds + passed, meeting = cost.regrouping + meets, waiting = cost.waiting + waits, lost = meeting + waiting;
  const losses = many(cost.losses, "loss").replace("losss", "losses");
  return [
    `${long(lost)}, ${(all ? (100 * lost) / all : 0).toFixed(1)} %`,
    `${long(all)} in ${many(cost.rounds, "round")}: ${long(meeting)} lost by regrouping, ${long(waiting)} by waiting for nodes; ${losses}`,
  ];
}

// What happened, the newest first: hour, sign, tone, words.
function eventsOf(history) {
  const events = [], names = (list, count) => list.slice(0, 8).map((name) => clean(name)).join(", ") + (count > Math.min(8, list.length) ? ` and ${num(count - Math.min(8, list.length))} more` : "");
  history.rounds.forEach((round, index) => {
    const before = history.rounds[index - 1], notes = [];
    if (round.size <= 8) notes.push(names(round.members, round.size));
    if (round.joined > 0 && round.joined < round.size) notes.push(`joined: ${names(round.joined_ids, round.joined)}`);
    if (before && before.stopped !== null && round.after !== null) notes.push(`after ${long(round.after - before.stopped)} of meeting again`);
    events.push([round.at, "▶", "ok", [`round ${round.number} with ${many(round.size, "node")}`, ...notes].join("; ")]);
    for (const one of round.incidents) {
      const sign = { lost: "✕", left: "–", closed: "■" }[one.kind] ?? "!", tone = one.kind === "lost" || one.kind === "given up" ? "bad" : "over";
      events.push([one.at, sign, tone, [one.kind, one.count ? names(one.node_ids, one.count) + (one.reason ? ":" : "") : "", one.reason].filter(Boolean).join(" ")]);
    }
  });
  if (history.forgotten.rounds) events.unshift([history.forgotten.since, "", "over", `${many(history.forgotten.rounds, "earlier round")} forgotten`]);
  return events.reverse().slice(0, 200);
}
