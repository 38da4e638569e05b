"use strict";
// Text and durations. Names come from strangers: they are only ever put into textContent or drawn, and what is invisible
// or changes the direction of text in them is written out.
const at = (id) => document.getElementById(id);
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const HIDDEN = /[\u0000-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u2028-\u202f\u2060-\u206f\ufeff\ufff9-\ufffb]/g;
const written = (text) =>
  Array.from(text.replace(HIDDEN, (one) => "\\u" + one.charCodeAt(0).toString(16).padStart(4, "0")));

// A long name keeps its beginning and its end, since names of one job often differ in the end alone.
function clean(text, most = 60) {
  const whole = String(text), points = written(whole.slice(0, 2 * most));
  if (points.length <= most && whole.length <= 2 * most) return points.join("");
  return points.slice(0, most - 9).join("") + "…" + written(whole.slice(-16)).slice(-8).join("");
}

function el(tag, text, kind) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (kind) made.className = kind;
  return made;
}

function bdi(name) {
  const made = el("bdi", clean(name));
  made.dir = "ltr";
  if (name.length > 60) made.title = clean(name, 600);
  return made;
}

const num = (count) => count.toLocaleString("en");
const many = (count, what) => `${num(count)} ${what}${count === 1 ? "" : "s"}`;

function long(seconds) {
  const s = Math.max(0, Math.round(seconds)), d = Math.floor(s / 86400), h = Math.floor(s / 3600) % 24, m = Math.floor(s / 60) % 60;
  if (d) return `${d} d ${h} h`;
  if (h) return `${h} h ${m} min`;
  return m ? `${m} min${m < 10 && s % 60 ? ` ${s % 60} s` : ""}` : `${s} s`;
}

const hourly = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });
const daily = new Intl.DateTimeFormat(undefined, { day: "numeric", month: "short" });
// The hour of a moment in seconds since 1970, in the reader's zone; the day, too, if it is not today.
function hour(seconds) {
  const date = new Date(seconds * 1000);
  return (new Date().toDateString() === date.toDateString() ? "" : daily.format(date) + " ") + hourly.format(date);
}

// What has not changed is not touched.
function set(node, text) { if (node.textContent !== text) node.textContent = text; }
function replace(holder, key, make) {
  if (holder.key === key) return;
  holder.key = key;
  holder.replaceChildren(...make());
}
