// Lessons: links that set the controls, a sentence each, and a number that is computed then and there.

import { plain } from "./draw.js";
import { startOf, vectorOf, DEFAULTS } from "./settings.js";

/** Runs of the path whose momentum is fitted, for each number of workers. */
const FIT_RUNS = 4000;

const digits = { problem: "digits", delay_adaptive: true };

export const LESSONS = [
  {
    id: "momentum",
    title: "Momentum you did not ask for",
    sentence: "Workers whose gradients are stale act together like one worker with a momentum of 1 − 1/M.",
    settings: { problem: "illconditionedquadratic", y: 0, lr: 0.2, delay_adaptive: false, workers: 8 },
    view: "staleness",
    run: fitMomenta,
  },
  {
    id: "tune",
    title: "Tune it down",
    sentence: "The best momentum to ask for falls as workers join, because asynchrony brings its own.",
    settings: { ...digits, lr: 0.4, momentum: 0.8, workers: 16 },
    view: "loss",
    run: bestMomenta,
  },
  {
    id: "adagrad",
    title: "Adagrad survives",
    sentence: "With 32 asynchronous workers SGD at its largest rate falls apart, and Adagrad hardly notices.",
    settings: { ...digits, optimizer: "adagrad", lr: 0.2, workers: 32 },
    view: "loss",
    run: collapse,
  },
  {
    id: "onebit",
    title: "One bit is enough",
    sentence: "One bit per number trains as well as 32, if what it drops is added to the next gradient.",
    settings: { ...digits, lr: 0.1, momentum: 0.9, workers: 4, mode: "sync", backup: 0, codec: "onebit" },
    view: "bytes",
    run: oneBit,
  },
  {
    id: "backup",
    title: "Nobody waits",
    sentence: "One of eight workers is ten times slower: with one backup worker, no version waits for it.",
    settings: { ...digits, lr: 0.4, workers: 8, mode: "sync", backup: 1, straggler: 10 },
    view: "lanes",
    run: waiting,
  },
  {
    id: "stale",
    title: "Too stale",
    sentence: "A limit on the staleness rescues a rate that is too high for 32 workers.",
    settings: { ...digits, lr: 4, workers: 32, max_staleness: 8 },
    view: "staleness",
    run: tooStale,
  },
];

/** All settings of a lesson. */
export function settingsOf(lesson, core, more = {}) {
  return { ...DEFAULTS, ...startOf(lesson.settings.problem, core), ...lesson.settings, ...more };
}

/** The loss, the test error, the virtual time and the bytes at the end of a run. */
function outcome(core, settings, updates, more = {}) {
  const run = core.make(vectorOf(settings, core, { evaluate_every: 1e9, ...more }));
  try {
    run.advance(1e9, updates);
    const [loss, error] = run.evaluate();
    const { time, bytes, bytesPlain, updates: made } = run.read();
    return { loss: Number.isFinite(loss) ? loss : Infinity, error, time, bytes, bytesPlain, made };
  } finally {
    run.destroy();
  }
}

/** The mean of a figure over seeds. */
function mean(core, settings, updates, figure, seeds, note) {
  let sum = 0;
  for (const seed of seeds) {
    note();
    sum += outcome(core, { ...settings, seed }, updates)[figure];
  }
  return sum / seeds.length;
}

function fitMomenta(core, lesson, note) {
  const fits = [2, 4, 8, 16].map((workers) => {
    core.give(vectorOf(settingsOf(lesson, core, { workers }), core));
    const fit = core.ask("fit_make");
    for (let done = 0; done < FIT_RUNS; done += 250) {
      note();
      core.ask("fit_run", fit, 250);
    }
    core.ask("fit_read", fit);
    const [, momentum, , expected] = core.numbers();
    core.ask("fit_destroy", fit);
    return { workers, momentum, expected };
  });
  const off = Math.max(...fits.map((fit) => Math.abs(fit.momentum - fit.expected)));
  return {
    good: off <= 0.02,
    figure: off,
    text: `Fitted over ${plain(FIT_RUNS)} runs: ${fits.map((fit) => `${fit.momentum.toFixed(3)} for M = ${fit.workers} (1 − 1/M = ${fit.expected})`).join(", ")}.`,
    head: ["M", "fitted momentum", "1 − 1/M"],
    rows: fits.map((fit) => [fit.workers, fit.momentum, fit.expected]),
  };
}

function bestMomenta(core, lesson, note) {
  const momenta = [0, 0.2, 0.4, 0.6, 0.7, 0.8, 0.9, 0.95];
  const rows = [1, 4, 16].map((workers) => {
    const losses = momenta.map((momentum) =>
      mean(core, settingsOf(lesson, core, { workers, momentum }), 500, "loss", [1, 2, 3], note));
    return [workers, momenta[losses.indexOf(Math.min(...losses))], ...losses];
  });
  const best = rows.map((row) => row[1]);
  return {
    good: best[0] >= best[1] && best[1] >= best[2] && best[0] - best[2] >= 0.2,
    figure: best,
    text: `The best momentum is ${best.join(", ")} for M = 1, 4, 16.`,
    head: ["M", "best", ...momenta.map((momentum) => `loss at ${momentum}`)],
    rows,
  };
}

function collapse(core, lesson, note) {
  const error = (optimizer, lr, workers) =>
    mean(core, settingsOf(lesson, core, { optimizer, lr, workers }), 600, "error", [1, 2, 3], note);
  const sgd = [error("sgd", 4, 1), error("sgd", 4, 32)];
  const adagrad = [error("adagrad", 0.2, 1), error("adagrad", 0.2, 32)];
  const ratios = [sgd[1] / sgd[0], adagrad[1] / adagrad[0]];
  return {
    good: ratios[0] >= 5 && ratios[1] <= 2,
    figure: ratios,
    text: `From M = 1 to 32 the test error of SGD grows ${plain(ratios[0])} ×, that of Adagrad ${plain(ratios[1])} ×.`,
    head: ["", "test error, M = 1 (%)", "M = 32 (%)"],
    rows: [["SGD, 4.0", ...sgd], ["Adagrad, 0.2", ...adagrad]],
  };
}

function oneBit(core, lesson, note) {
  const arms = [["float32", true], ["onebit", true], ["onebit", false]];
  const losses = arms.map(([codec, feedback]) =>
    mean(core, settingsOf(lesson, core, { codec, error_feedback: feedback }), 400, "loss", [1, 2, 3], note));
  const { bytes, bytesPlain } = outcome(core, settingsOf(lesson, core), 20);
  const ratios = [losses[1] / losses[0], losses[2] / losses[0], bytesPlain / bytes];
  return {
    good: Math.abs(ratios[0] - 1) <= 0.05 && ratios[1] >= 1.5 && ratios[2] >= 28,
    figure: ratios,
    text: `Loss ${ratios[0].toFixed(2)} × that of Float32 with error feedback, ${ratios[1].toFixed(2)} × without; ${plain(ratios[2])} × fewer bytes.`,
    head: ["", "loss"],
    rows: [["Float32", losses[0]], ["OneBit with error feedback", losses[1]], ["OneBit without", losses[2]]],
  };
}

function waiting(core, lesson, note) {
  const time = (backup) => mean(core, settingsOf(lesson, core, { backup }), 150, "time", [1, 2, 3], note) / 150;
  const times = [time(0), time(1)];
  return {
    good: times[0] / times[1] >= 2,
    figure: times[0] / times[1],
    text: `A version takes ${plain(times[0])} with Sync(8) and ${plain(times[1])} with Sync(7, backup=1): ${plain(times[0] / times[1])} × less.`,
    head: ["mode", "virtual seconds per version"],
    rows: [["Sync(8)", times[0]], ["Sync(7, backup=1)", times[1]]],
  };
}

function tooStale(core, lesson, note) {
  const loss = (limit) => mean(core, settingsOf(lesson, core, { max_staleness: limit }), 600, "loss", [1, 2, 3], note);
  const losses = [loss(-1), loss(8)];
  return {
    good: losses[0] / losses[1] >= 2,
    figure: losses[0] / losses[1],
    text: `After 600 updates the loss is ${plain(losses[0])} without a limit and ${plain(losses[1])} with max_staleness=8: ${plain(losses[0] / losses[1])} × lower.`,
    head: ["", "loss"],
    rows: [["no limit", losses[0]], ["max_staleness=8", losses[1]]],
  };
}
