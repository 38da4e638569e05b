// The page: what is shown of what was told, the link to the store, and the hands.
let chosen = wanted(), source = null, now = null;

function wanted() {
  try { return decodeURIComponent(location.hash.slice(1)); } catch { return location.hash.slice(1); }
}

// ---------------------------------------------------------------------------------------------------- one run

function showHead(run) {
  const away = document.body.className === "old", { pace, state } = run, mark = signOf(run);
  set(at("state"), away ? `? Unknown (was: ${state.words})` : `${mark} ${state.words}`);
  at("head").className = state.meant;
  document.title = `${away ? "no answer" : mark + " " + state.words}: ${clean(run.run_id)}`;
  drawIcon(away ? "#888" : css("--" + state.meant));
  const most = run.settings.max_nodes > run.world_size ? ` (at most ${num(run.settings.max_nodes)})` : "";
  const facts = [
    ["nodes in the round", run.round === null ? "none yet" : `${num(run.members.length)} of ${num(run.world_size)}${most}`],
    ["round", run.round === null ? "-" : num(run.round)],
    run.phase_since !== null && ["in this state for", long(clock() - run.phase_since)],
    run.last_call_until !== null && ["last call ends in", long(run.last_call_until - clock())],
    pace.step !== null && run.closed === null && ["step", `${num(pace.step)}${pace.rate && !run.standstill ? ` at ${pace.rate.toPrecision(3)}/s` : ""}`],
    ["time lost so far", costOf(run)[0]],
  ].filter(Boolean);
  replace(at("facts"), JSON.stringify(facts), () => facts.map(([name, value]) => {
    const one = el("div");
    one.append(el("dt", name), el("dd", value));
    return one;
  }));
  const closing = run.closing, reached = run.bootstrap && run.closed === null ? `; rank 0 at ${run.bootstrap.host}:${run.bootstrap.port}` : "";
  const over = closing && closing.at !== null ? `; closed at ${hour(closing.at)}${closing.status ? `, with status ${closing.status}` : ""}` : "";
  set(at("reason"), clean(run.waits_for + reached + over, 400));
  set(at("cost"), costOf(run)[1]);
}

function drawIcon(hue) {
  if (at("icon").hue === hue) return;
  const dot = el("canvas"), ink = dot.getContext("2d");
  dot.width = dot.height = 16;
  ink.fillStyle = hue;
  ink.fillRect(0, 0, 16, 16);
  at("icon").hue = hue;
  at("icon").href = dot.toDataURL();
}

const SENTENCES_MOST = 24;

// What is not well, by urgency, the missing first; slow members have a list of their own.
function showTrouble(run, found) {
  const items = [];
  let count = 0;
  for (const node of run.closed === null ? found.nodes : []) {
    if (node.kind >= WELL || node.kind === K.slow) continue;
    count++;
    if (items.length < SENTENCES_MOST && (node.name || node.says)) items.push([TONES[node.kind], SIGNS[node.kind], node.name || "one more", saysOf(node, run, false), node.kind]);
  }
  items.sort((a, b) => a[4] - b[4]);
  if (count > items.length) items.push(["bad", "…", "", `and ${num(count - items.length)} more`]);
  if (run.standstill) items.push(["bad", "!", "", `${run.standstill}: no member is to blame, as far as can be seen`]);
  for (const ban of run.banned_where) items.push(["over", SIGNS[K.banned], ban.where, `all such nodes are ${banOf(ban)}`]);
  const unknown = run.phase === "gathering" ? run.settings.min_nodes - run.counts.here - run.missing_count : 0;
  if (unknown > 0) items.push(["wait", "○", "", `${many(unknown, "more node")} ${unknown === 1 ? "is" : "are"} needed; no name of theirs is known`]);
  if (run.resized) {
    const { min_nodes: least, max_nodes: most, by, reason } = run.resized;
    items.push(["wait", "↔", "", `resized to ${least === most ? least : `${least} to ${most}`} nodes from the next round on, by ${by}${reason ? `: ${reason}` : ""}`]);
  }
  replace(at("trouble"), JSON.stringify(items), () => items.map(([tone, sign, name, says]) => {
    const item = el("li"), mark = el("span", sign, "mark " + tone);
    mark.setAttribute("aria-hidden", "true");
    item.append(mark, ...(name ? [bdi(name), " "] : []), clean(says, 200));
    return item;
  }));
}

function showSlow(run) {
  const { pace } = run, byName = named(run), rate = pace.rate && !run.standstill ? `; usual rate ${pace.rate.toPrecision(3)}/s` : "";
  set(at("pace"), pace.step === null ? "" : `newest step ${num(pace.step)}, begun ${long(clock() - pace.step_at)} ago${rate}`);
  const rule = `Stuck: no step for ${long(pace.limit)} while others get on. Slow: below 80 % of the median rate, or 10 s behind.`;
  set(at("rule"), pace.told ? rule : "");
  const rows = [...run.stuck.map((one) => [K.stuck, one]), ...run.slow.map((one) => [K.slow, one])].slice(0, 20);
  const texts = rows.map(([kind, { node_id: name, why }]) => {
    const member = byName.get(name);
    const quiet = kind === K.stuck && member ? `no step for ${long(clock() - member.step_at)}; ` : "";
    return [kind, name, member ? `rank ${member.rank}, ${NAMES[kind]}` : NAMES[kind], quiet + why, member ? stepOf(member) : ""];
  });
  const none = !pace.told ? "no member says its steps" : run.standstill ? "all stand still: no member is to blame, as far as can be seen" : "none";
  replace(at("slow"), JSON.stringify([texts, none]), () => {
    if (!texts.length) {
      const row = el("tr");
      row.append(el("td", none, "soft"));
      return [row];
    }
    return texts.map(([kind, name, rank, why, step]) => {
      const row = el("tr"), node = el("td");
      node.append(el("span", SIGNS[kind], "mark " + TONES[kind]), bdi(name), ` ${rank}`);
      row.append(node, el("td", why), el("td", step));
      return row;
    });
  });
}

function showTable(run, found) {
  if (!at("list").open) return;
  const urgent = (one) => (one.kind < WELL ? one.kind : 99);
  const rows = found.nodes.map((one, i) => [urgent(one), i]).sort((a, b) => a[0] - b[0] || a[1] - b[1]).slice(0, 100).map(([, i]) => found.nodes[i]);
  const texts = rows.map((one) => [
    one.rank ?? "", one.name, one.says ?? (one.gone ? goneOf(one.gone) : NAMES[one.kind]), stepOf(one.member), one.address ?? "",
    Object.entries(one.attributes ?? {}).map((pair) => pair.join("=")).join(" "),
  ]);
  replace(at("rows"), JSON.stringify(texts), () => texts.map((cells) => {
    const row = el("tr");
    row.append(...cells.map((text, i) => {
      const cell = el("td");
      cell.append(i === 1 ? bdi(text) : clean(text, 160));
      return cell;
    }));
    return row;
  }));
  const more = found.nodes.length - rows.length;
  set(at("more"), more > 0 ? `and ${num(more)} more, all well or less urgent than these` : "");
}

function showEvents() {
  const { history } = drawn;
  replace(at("events"), drawn.key + new Date().toDateString(), () => !history || !history.rounds.length ? [el("li", "nothing yet", "soft")] :
    eventsOf(history).map(([when, sign, tone, text]) => {
      const item = el("li"), mark = el("span", sign, "mark " + tone);
      mark.setAttribute("aria-hidden", "true");
      item.append(mark);
      if (when !== null) {
        const shown = el("time", hour(when));
        shown.dateTime = new Date(when * 1000).toISOString();
        item.append(shown);
      }
      item.append(el("span", clean(text, 220)));
      return item;
    }));
}

const HELP = "Point at a node, or use the arrow keys on the map; n and p: the next and the previous one that is not well; Esc lets go.";

function tell(run, found) {
  const node = found.nodes[selected];
  if (!node) return set(at("told"), found.nodes.length ? HELP : "No node is in the run any more.");
  const attributes = Object.entries(node.attributes ?? {}).map(([name, value]) => `${name}=${value}`).join(" ");
  const rank = node.rank === null ? "" : `rank ${node.rank}`, where = node.address ? clean(node.address) : "";
  set(at("told"), [clean(node.name || "not named", 120), rank, clean(saysOf(node, run), 240), where, clean(attributes, 160)].filter(Boolean).join("  ·  "));
}

function select(i) {
  if (!now) return;
  selected = i;
  drawCursor();
  tell(now.run, now.found);
}

// Attributes by which some nodes are alike and some are not.
function showChoices(run) {
  const few = run.members.slice(0, 2000), names = [...new Set(few.slice(0, 50).flatMap((one) => Object.keys(one.attributes)))].filter((name) => {
    const values = new Set(few.map((one) => one.attributes[name])).size;
    return values > 1 && values <= Math.max(2, few.length / 2);
  });
  replace(at("by"), JSON.stringify([run.run_id, names]), () => {
    const made = [["", "by rank"], ...names.map((name) => [name, "by " + clean(name)])].map(([value, text]) => {
      const one = el("option", text);
      one.value = value;
      return one;
    });
    at("by").hidden = made.length < 2;
    if (made.length > 1) made[1].selected = true;
    return made;
  });
}

// ---------------------------------------------------------------------------------------------------- all runs

const RUNS_MOST = 100;
const URGENCY = ["bad", "warn", "drain", "wait", "ok", "over"];

function showAll(runs) {
  const urgency = (run) => (run.closed !== null ? 10 : 0) + URGENCY.indexOf(run.state.meant);
  const texts = runs.sort((a, b) => urgency(a) - urgency(b) || a.run_id.localeCompare(b.run_id)).map((run) => {
    const lost = run.spent.regrouping + run.spent.waiting, all = lost + run.spent.training;
    const cost = all && run.round !== null ? `; ${((100 * lost) / all).toFixed(1)} % of ${long(all)} lost` : "";
    const says = run.closed ?? (run.round === null ? run.waits_for : `round ${run.round}: ${num(run.members)} of ${num(run.world_size)} nodes${cost}`);
    return [run.run_id, run.state.meant, `${signOf(run)} ${run.state.words}`, says];
  });
  const sought = at("findrun").value.trim().toLowerCase();
  const found = texts.filter(([id, , ...words]) => [id, ...words].some((one) => one.toLowerCase().includes(sought))), cards = found.slice(0, RUNS_MOST);
  set(at("howmany"), texts.length ? `${many(texts.length, "run")} in this store` : "No run has begun yet.");
  at("findrun").hidden = texts.length < 2;
  set(at("morecards"), !found.length && sought ? "no such run" : found.length > cards.length ? `and ${num(found.length - cards.length)} more: find them by name` : "");
  replace(at("cards"), JSON.stringify(cards), () => cards.map(([id, tone, words, says]) => {
    const item = el("li"), link = el("a", undefined, tone);
    link.href = "#" + encodeURIComponent(id);
    link.append(bdi(id), el("b", words), el("span", clean(says, 120), "soft"));
    item.append(link);
    return item;
  }));
}

function show() {
  const run = chosen || told.runs.size === 1 ? told.run : null, name = chosen ? `no run ${clean(chosen)} in this store` : "all runs";
  set(at("store"), "store " + clean(told.store));
  at("overview").hidden = !!run;
  at("run").hidden = !run;
  set(at("name"), run ? clean(run.run_id) : name);
  set(at("home"), told.runs.size > 1 && run ? "‹ all runs" : "rdzv");
  now = null;
  if (!run) {
    showAll([...told.runs.values()]);
    document.title = "rdzv: all runs";
    return;
  }
  const found = nodesOf(run);
  now = { run, found };
  if (!tones) themed();
  at("rounds").hidden = run.round === null;
  showChoices(run);
  showHead(run);
  showTrouble(run, found);
  showSlow(run);
  showTable(run, found);
  showEvents();
  drawMap(run, found);
  if (document.activeElement !== at("map") || selected < 0) tell(run, found); // else a screen reader would say it each second
  fetchHappened(run);
}

// Nothing has changed but the hour.
function tick() {
  if (!now) return;
  const { run, found } = now;
  showHead(run);
  showTrouble(run, found);
  showSlow(run);
  showTable(run, found);
  if (layout.cards) drawMap(run, found);
  fetchHappened(run);
}

// ---------------------------------------------------------------------------------------------------- the link

// Silence counts as much as a connection that has closed: a machine that has lost its network closes nothing.
const BEAT_WITHIN = 2000; // milliseconds; the server says something each second, or more rarely if there is much to read
let heardAt = 0, silence = 0, why = "";

function heard(seconds) {
  const gap = heardAt && document.body.className === "" ? Date.now() - heardAt : 0;
  heardAt = Date.now();
  heardHour(seconds);
  clearTimeout(silence);
  silence = setTimeout(lost, Math.max(BEAT_WITHIN, 2 * gap));
  document.body.className = "";
  at("away").hidden = true;
  why = "";
  set(at("live"), "live");
  set(at("clock"), hourly.format(heardAt));
}

function lost() {
  clearTimeout(silence);
  stopClock();
  document.body.className = "old";
  at("away").hidden = false;
  const since = heardAt ? `since ${hour(heardAt / 1000)}: all below is as it was then` : "yet";
  set(at("away"), `No answer from the store ${since}.${why} Trying again ...`);
  set(at("live"), "no answer since");
  if (now) showHead(now.run);
}

function follow() {
  if (source) source.close();
  source = new EventSource("api/events?run=" + encodeURIComponent(chosen));
  source.onerror = () => {
    lost();
    if (source.readyState !== EventSource.CLOSED) return; // a browser tries those again by itself
    fetch("api/runs", { credentials: "same-origin" }).then((answer) => { why = answer.ok ? "" : ` It says ${answer.status}.`; }, () => { why = ""; });
    setTimeout(follow, BEAT_WITHIN);
  };
  source.addEventListener("beat", (event) => { heard(Number(event.data)); tick(); });
  source.addEventListener("changed", (event) => {
    const news = JSON.parse(event.data);
    heard(news.now);
    takeChanges(news);
    show();
  });
  source.onmessage = (event) => {
    const state = JSON.parse(event.data);
    heard(state.now);
    takeAll(state);
    show();
  };
}

// ---------------------------------------------------------------------------------------------------- the hands

const again = () => {
  if (!now) return;
  themed();
  drawMap(now.run, now.found);
  drawTime();
};

at("map").addEventListener("pointermove", (event) => {
  const i = nodeUnder(event);
  if (i !== selected && i >= 0) select(i);
});
at("map").addEventListener("pointerdown", (event) => select(nodeUnder(event)));
at("map").addEventListener("keydown", (event) => {
  if (!now || event.ctrlKey || event.metaKey || event.altKey) return;
  const to = nodeAfter(event.key, now.found.nodes);
  if (to === undefined) return;
  event.preventDefault();
  select(to);
});
at("time").addEventListener("pointermove", pointAtBand);
at("time").addEventListener("pointerdown", beginDrag);
at("time").addEventListener("pointerup", endDrag);
at("time").addEventListener("pointercancel", () => { drag = null; drawTime(); });
at("time").addEventListener("dblclick", () => zoomTo());
at("range").addEventListener("change", () => { zoom = null; });
at("time").addEventListener("pointerleave", () => { pointed = -1; tellBand(); });
at("time").addEventListener("keydown", (event) => { if (bandAfter(event.key)) event.preventDefault(); });
at("find").addEventListener("input", () => {
  const text = at("find").value.trim().toLowerCase(), nodes = now ? now.found.nodes : [];
  const byRank = nodes.findIndex((one) => String(one.rank) === text);
  select(!text ? -1 : byRank >= 0 ? byRank : nodes.findIndex((one) => one.name.toLowerCase().includes(text)));
});
at("findrun").addEventListener("input", () => showAll([...told.runs.values()]));
for (const [id, kind] of [["by", "change"], ["range", "change"], ["list", "toggle"]]) {
  at(id).addEventListener(kind, () => { again(); if (now) showTable(now.run, now.found); });
}
for (const media of ["(prefers-color-scheme: dark)", "print"]) matchMedia(media).addEventListener("change", again);
addEventListener("beforeprint", () => {
  at("list").open = true;
  if (now) showTable(now.run, now.found);
  again();
});
addEventListener("resize", again);
at("skip").addEventListener("click", (event) => { event.preventDefault(); at("map").focus(); });
// A browser keeps a page that was left, for the way back, and with it the connection, of which it has six for a host.
addEventListener("pagehide", () => { source.close(); clearTimeout(silence); });
addEventListener("pageshow", (event) => { if (event.persisted) follow(); });
addEventListener("hashchange", () => { chosen = wanted(); selected = -1; at("find").value = ""; follow(); });
set(at("zone"), `newest first; times in ${Intl.DateTimeFormat().resolvedOptions().timeZone}`);
follow();
