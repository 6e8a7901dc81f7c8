// The state of the page in the fragment of its address, and back.

import { isEssayPart } from "./essay/frame.js";
import { BY_NAME, CONTROLS, DEFAULTS, nearest, startOf } from "./settings.js";

export const VIEWS = ["race", "lanes", "loss", "staleness", "bytes", "optimizers", "break"];
export const SPEEDS = [0.25, 0.5, 1, 2, 4, 8, 16, 32, 64, 256];

/** Bytes of a fragment that are read, and events in it. */
const MOST_TEXT = 8192;
const MOST_EVENTS = 64;
const MOST_TIME = 20000;
const ACTS = ["kill", "pause", "join", "nan"];

export function freshState(core) {
  return {
    settings: { ...DEFAULTS, ...startOf(DEFAULTS.problem, core) },
    events: [],
    time: 0,
    paused: false,
    speed: 2,
    view: "race",
    lesson: "",
    way: "page",
    whole: false,
  };
}

/** The fragment of a state; what is as at the beginning is left out. */
export function fragmentOf(state, core) {
  const parts = [];
  const start = { ...DEFAULTS, ...startOf(state.settings.problem, core) };
  for (const { name } of CONTROLS) {
    const value = state.settings[name];
    const usual = name === "problem" ? DEFAULTS.problem : start[name];
    if (value !== usual) parts.push([name, shown(value)]);
  }
  const fresh = freshState(core);
  for (const name of ["view", "speed", "lesson", "way"]) {
    if (state[name] !== fresh[name]) parts.push([name, String(state[name])]);
  }
  if (state.whole) parts.push(["whole", "1"]);
  if (state.events.length > 0) parts.push(["did", state.events.map(eventText).join(",")]);
  if (state.time > 0 && state.way === "page") parts.push(["t", String(state.time)]);
  if (state.paused && state.way === "page") parts.push(["paused", "1"]);
  return parts.map(([name, value]) => `${name}=${encodeURIComponent(value).replace(/%3A/g, ":").replace(/%2C/g, ",")}`).join("&");
}

function shown(value) {
  return typeof value === "boolean" ? String(Number(value)) : String(value);
}

/** `time:kill:worker`, `time:pause:worker:seconds` or `time:set:name:value`. */
function eventText(event) {
  const what = event.act === undefined ? ["set", event.name, shown(event.value)] : [event.act, event.worker, event.seconds];
  return [event.time, ...what].join(":");
}

/** The state of a fragment, and what had to be changed to make it valid. */
export function stateOfFragment(text, core) {
  const state = freshState(core);
  const changed = [];
  if (text.length > MOST_TEXT) changed.push(`the address has ${text.length} characters, of which ${MOST_TEXT} are read`);
  const given = new Map();
  for (const part of text.slice(0, MOST_TEXT).split("&")) {
    const at = part.indexOf("=");
    if (part === "" || part.startsWith("token=") || isEssayPart(part)) continue;
    given.set(at < 0 ? part : part.slice(0, at), at < 0 ? "" : decoded(part.slice(at + 1)));
  }
  if (given.has("problem")) {
    const [problem, wrong] = nearest("problem", given.get("problem"), core);
    Object.assign(state.settings, startOf(problem, core));
    if (wrong) changed.push(`problem is ${problem}`);
    given.delete("problem");
  }
  for (const [name, value] of given) take(state, name, value, core, changed);
  return { state, changed };
}

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return "";
  }
}

function take(state, name, value, core, changed) {
  if (BY_NAME.has(name)) {
    const [good, wrong] = nearest(name, value, core);
    state.settings[name] = good;
    if (wrong) changed.push(`${BY_NAME.get(name).label} is ${shown(good)}`);
  } else if (name === "view" && VIEWS.includes(value)) {
    state.view = value;
  } else if (name === "way" && (value === "page" || value === "real")) {
    state.way = value;
  } else if (name === "speed" && SPEEDS.includes(Number(value))) {
    state.speed = Number(value);
  } else if (name === "lesson" && /^[a-z-]{0,40}$/.test(value)) {
    state.lesson = value;
  } else if (name === "paused" || name === "whole") {
    state[name] = value === "1";
  } else if (name === "t" && Number(value) >= 0 && Number(value) <= MOST_TIME) {
    state.time = Number(value);
  } else if (name === "t" && Number(value) > MOST_TIME) {
    state.time = MOST_TIME;
    changed.push(`the time is ${MOST_TIME}`);
  } else if (name === "did") {
    state.events = value.split(",").slice(0, MOST_EVENTS).map((one) => eventOf(one, core)).filter((one) => one !== null);
    state.events.sort((a, b) => a.time - b.time);
    if (state.events.length < value.split(",").length) changed.push("some events are left out");
  } else {
    changed.push(`"${name.slice(0, 20)}" is left out`);
  }
}

function eventOf(text, core) {
  const [when, what, first, second] = text.split(":");
  const time = Number(when);
  if (!(time >= 0 && time <= MOST_TIME)) return null;
  if (what === "set" && BY_NAME.has(first)) return { time, name: first, value: nearest(first, second, core)[0] };
  const worker = Number(first);
  const seconds = Number(second);
  const least = what === "pause" ? Number.MIN_VALUE : 0;
  const good = ACTS.includes(what) && Number.isInteger(worker) && worker >= -1 && worker < 128 && seconds >= least && seconds <= 1000;
  return good ? { time, act: what, worker, seconds } : null;
}
