// What a visitor may choose, in the form of the controls, the fragment, the core and the real workers.

import { slugOf } from "./engine/core.js";
import { TABLE } from "./table.js";

const ROWS = new Map(TABLE.map((row) => [row.name, row]));

export const DEFAULTS = Object.fromEntries(TABLE.map(({ name, usual }) => [name, usual]));

export const CODECS = ROWS.get("codec").words;

/**
 * The controls in their order, each with its row of the table. `kind` is how it looks, where that differs; `when`
 * says for which other settings it means something.
 */
export const CONTROLS = [
  { name: "problem", label: "Problem", group: "Problem" },
  { name: "x", label: "Start x", group: "Problem", when: (s) => s.problem !== "digits" },
  { name: "y", label: "Start y", group: "Problem", when: (s) => s.problem !== "digits" },
  { name: "workers", label: "Workers", group: "Workers" },
  { name: "durations", label: "Times of gradients", group: "Workers" },
  { name: "spread", label: "Spread of speeds", group: "Workers", kind: "slide", step: 0.5, unit: "×" },
  { name: "straggler", label: "One straggler", group: "Workers", kind: "slide", step: 0.5, unit: "× slower" },
  { name: "delay", label: "Delay each way", group: "Workers", kind: "slide", step: 0.25, unit: "gradients" },
  { name: "seed", label: "Seed", group: "Workers", plain: true },
  { name: "mode", label: "Mode", group: "Mode" },
  { name: "push_every", label: "push_every", group: "Mode", plain: true, when: (s) => s.mode === "local" },
  { name: "pull_every", label: "pull_every", group: "Mode", plain: true, when: (s) => s.mode === "local" },
  { name: "local_lr", label: "Local rate", group: "Mode", kind: "rate", when: (s) => s.mode === "local" },
  { name: "bound", label: "staleness", group: "Mode", when: (s) => s.mode === "bounded" },
  { name: "backup", label: "Backup workers", group: "Mode", when: (s) => s.mode === "sync" },
  { name: "warm_steps", label: "Steps alone", group: "Mode", plain: true, when: (s) => s.mode === "warm" },
  { name: "max_staleness", label: "Staleness limit", group: "Mode", kind: "slide", step: 1, none: -1, unit: "", when: isFree },
  { name: "on_stale", label: "Beyond it", group: "Mode", when: (s) => isFree(s) && s.max_staleness >= 0 },
  { name: "delay_adaptive", label: "Scale down the stale ones", group: "Mode", when: isFree },
  { name: "momentum_matching", label: "Match the momentum", group: "Mode", when: (s) => isFree(s) && hasMomentum(s) },
  { name: "optimizer", label: "Optimizer", group: "Optimizer" },
  { name: "lr", label: "Rate", group: "Optimizer", kind: "rate" },
  { name: "momentum", label: "Momentum", group: "Optimizer", kind: "slide", step: 0.01, unit: "", when: (s) => hasMomentum(s) },
  { name: "nesterov", label: "Nesterov's form", group: "Optimizer", when: (s) => s.optimizer === "sgd" && s.momentum > 0 },
  { name: "codec", label: "Codec", group: "Codec" },
  { name: "error_feedback", label: "Error feedback", group: "Codec", when: (s) => s.codec !== "float32" },
].map((control) => ({ ...ROWS.get(control.name), ...control }));

function isFree(settings) {
  return settings.mode === "async" || settings.mode === "warm";
}

export function hasMomentum(settings) {
  return settings.optimizer === "sgd" || settings.optimizer === "rmsprop";
}

export const BY_NAME = new Map(CONTROLS.map((control) => [control.name, control]));

const LABELS = {
  async: "Async",
  local: "Local (Downpour)",
  bounded: "Bounded (SSP)",
  sync: "Sync",
  warm: "WarmStart, then Async",
  scale: "scale it down",
  reject: "refuse it",
  float32: "Float32",
  bfloat16: "BFloat16",
  int8: "Int8",
  stochastic: "Int8, stochastic",
  onebit: "OneBit",
  constant: "all the same",
  exponential: "exponential",
  pareto: "Pareto, heavy tail",
};

/** Values and labels of a control that chooses among words. */
export function choices(name, core) {
  if (name === "problem") return core.about.problems.map((one) => [slugOf(one.name), one.name]);
  if (name === "optimizer") {
    const all = core.about.optimizers.map((one) => [slugOf(one.name), one.name]);
    return all.filter(([slug]) => slug !== "average"); // it takes values, not gradients
  }
  return ROWS.get(name).words.map((word) => [word, LABELS[word]]);
}

/** The nearest valid value of a control, and whether it is another one than given. */
export function nearest(name, given, core) {
  const control = BY_NAME.get(name);
  const fall = DEFAULTS[name];
  if (control.kind === "word") {
    const known = choices(name, core).some(([word]) => word === given);
    return known ? [given, false] : [fall, true];
  }
  if (control.kind === "flag") {
    const known = given === "1" || given === "0" || given === true || given === false;
    return known ? [given === "1" || given === true, false] : [fall, true];
  }
  const number = typeof given === "string" && given.trim() === "" ? NaN : Number(given);
  if (Number.isNaN(number)) return [fall, true];
  let value = Math.min(control.most, Math.max(control.least, number));
  if (ROWS.get(name).kind === "whole") value = Math.round(value);
  return [value, value !== number];
}

/** The settings of a problem: where it starts, and a rate at which SGD goes down. */
export function startOf(slug, core) {
  const problem = core.problem(slug);
  const [x, y] = problem.start ?? [0, 0]; // the net has one start, of its own
  return { problem: slug, x, y, lr: problem.lr };
}

/** The settings as the product takes them: numbers that exclude each other give way. */
function usable(settings) {
  const { max_staleness: limit, on_stale: beyond } = settings;
  return {
    ...settings,
    on_stale: limit < 0 ? "scale" : beyond,
    max_staleness: limit === 0 && beyond === "scale" ? 1 : limit, // a factor of 0 would drop the gradient
    backup: Math.min(settings.backup, settings.workers - 1),
    nesterov: settings.nesterov && settings.momentum > 0,
  };
}

/** The numbers that the core takes. */
export function vectorOf(chosen, core, more = {}) {
  const settings = usable(chosen);
  const vector = Float64Array.from(core.about.defaults);
  const put = (field, value) => {
    vector[core.fields.get(field)] = Number(value);
  };
  const optimizer = core.optimizer(settings.optimizer);
  for (const { name, words } of TABLE) {
    if (words !== undefined) put(name, words.indexOf(settings[name]));
    else if (core.fields.has(name)) put(name, settings[name]);
  }
  put("problem", core.problem(settings.problem).id);
  put("overlap", 0);
  put("optimizer", optimizer.id);
  for (const [name, value] of Object.entries(more)) put(name, value);
  const first = core.fields.get("optimizer") + 1;
  optimizer.settings.forEach((setting, k) => {
    vector[first + k] = NaN;
    if (setting.name === "lr") vector[first + k] = settings.lr;
    if (setting.name === "momentum") vector[first + k] = settings.momentum;
    if (setting.name === "nesterov") vector[first + k] = Number(settings.nesterov);
  });
  return vector;
}

/** What real workers take: they refuse to go without error feedback. */
export function forReal(settings) {
  const { error_feedback: _, ...rest } = usable(settings);
  return rest;
}

/** The Python program that does the same, with the events that `fastps.simulate` has. */
export function programOf(chosen, core, updates, events = []) {
  const settings = usable(chosen);
  const problem = core.problem(settings.problem);
  const optimizer = optimizerText(settings, core.optimizer(settings.optimizer).name);
  const run = runText(settings, updates, events);
  const code = problem.toy ? toyProgram(settings, problem, optimizer, run) : digitsProgram(settings, optimizer, run);
  const left = events.some((event) => !(event.act in EVENTS));
  return left ? `# The page changed settings or made gradients NaN on the way; this program does not.\n${code}` : code;
}

const EVENTS = {
  kill: (event) => `simulate.Kill(${event.worker}, at=${event.time})`,
  pause: (event) => `simulate.Pause(${event.worker}, at=${event.time}, seconds=${event.seconds})`,
  join: (event) => `simulate.Join(at=${event.time})`,
};

function eventsText(events) {
  const known = events.filter((event) => event.act in EVENTS).map((event) => EVENTS[event.act](event));
  return known.length > 0 ? `    events=[${known.join(", ")}],\n    lease=10,\n` : "";
}

function modeText(s) {
  const free = [];
  if (s.max_staleness >= 0) free.push(`max_staleness=${s.max_staleness}`, `on_stale="${s.on_stale}"`);
  if (!s.delay_adaptive) free.push("delay_adaptive=False");
  const matched = s.momentum_matching && hasMomentum(s); // the page matches no beta1
  if (!matched && (hasMomentum(s) || s.optimizer.startsWith("adam"))) free.push("momentum_matching=False");
  const asynchronous = `fastps.Async(${free.join(", ")})`;
  return {
    async: asynchronous,
    local: `fastps.Local(push_every=${s.push_every}, pull_every=${s.pull_every}, lr=${s.local_lr}, overlap=False)`,
    bounded: `fastps.Bounded(staleness=${s.bound})`,
    sync: `fastps.Sync(workers=${s.workers - s.backup}, backup=${s.backup})`,
    warm: `fastps.WarmStart(steps=${s.warm_steps}, then=${asynchronous})`,
  }[s.mode];
}

function optimizerText(s, name) {
  const more = [`lr=${s.lr}`];
  if (hasMomentum(s) && s.momentum > 0) more.push(`momentum=${s.momentum}`);
  if (s.optimizer === "sgd" && s.momentum > 0 && s.nesterov) more.push("nesterov=True");
  return `fastps.${name}(${more.join(", ")})`;
}

function runText(s, updates, events) {
  const codecs = { float32: "None", bfloat16: "fastps.BFloat16()", int8: "fastps.Int8()", stochastic: "fastps.Int8(stochastic=True)", onebit: "fastps.OneBit()" };
  const times = { constant: "Constant", exponential: "Exponential", pareto: "Pareto" }[s.durations];
  const mean = `${s.spread} ** (k / ${Math.max(1, s.workers - 1)}) * (${s.straggler} if k == ${s.workers - 1} else 1)`;
  const late = events.filter((event) => event.act === "join").length; // as fast as the first one
  return `    mode=${modeText(s)},
    codec=${codecs[s.codec]},
    durations=[simulate.${times}(${mean}) for k in range(${s.workers})]${late > 0 ? ` + [simulate.${times}(1)] * ${late}` : ""},
    delay=${s.delay},
${eventsText(events)}    updates=${updates},
    seed=${s.seed},
)
print(trace.updates, trace.seconds, trace.staleness.mean(), trace.waiting_share)`;
}

function toyProgram(s, problem, optimizer, run) {
  return `import numpy as np

import fastps
from fastps import simulate
from fastps_lab.live.problems import PLANES

plane = PLANES["${s.problem}"]  # ${problem.name}
start = plane.start((${s.x}, ${s.y}))
store = fastps.Store()
store.register("w", start["w"], ${optimizer})
trace = simulate.run(
    store,
    start,
    lambda params, worker, step, rng: plane.gradient(params, rng),
    workers=${s.workers},
${run}
print(store.pull("w"))
`;
}

function digitsProgram(s, optimizer, run) {
  return `import fastps
from fastps import simulate
from fastps_lab.live.problems import Digits

digits = Digits()
start = digits.start((0.0, 0.0))
store = fastps.Store()
for name, values in start.items():
    store.register(name, values, ${optimizer})
trace = simulate.run(
    store,
    start,
    lambda params, worker, step, rng: digits.gradient(params, rng),
    workers=${s.workers},
${run}
print(digits.loss(store.pull(list(start))))
`;
}
