// 4: asynchrony begets momentum.

import { number } from "./frame.js";
import { curves } from "./plot.js";
import { runs, updatesOf, vector } from "./runs.js";
import { plain } from "../draw.js";

const LR = 0.2;
const BATCHES = 8;
const RUNS = 100;
const ASKED = 0.9;
const PROBLEM = { problem: "illconditionedquadratic", x: 1, y: 0, delay_adaptive: false };

export const momentum = {
  id: "momentum",
  title: "Run A, the mean path of many runs with several workers and no momentum, beside run B, one worker with momentum",
  controls: {
    workers: { kind: "slide", label: "Workers", options: [2, 3, 4, 6, 8, 12, 16].map((one) => [one, String(one)]), start: 8, text: (value) => `${value} workers` },
  },
  text: `<p>In run <strong class="a">A</strong>, {workers} push to one server and nobody waits. Nobody asked for momentum. Yet each gradient comes
    late by a random number of updates, so the server keeps going the way it went. Over many runs that is the same as a velocity that
    fades by a factor <math><mi>μ</mi></math> with each update:</p>
    <math display="block"><mi>μ</mi><mo>=</mo><mn>1</mn><mo>−</mo><mfrac><mn>1</mn><mi>M</mi></mfrac></math>
    <p>Run <strong class="b">B</strong> is one worker with that momentum and the rate divided by <math><mi>M</mi></math>, from A's first step on. So if you ask for momentum on top,
    you get more than you asked for. A server that <strong>matches</strong> takes less by what asynchrony adds, so that many workers
    learn what one learns.</p>`,
  caption: `f = x²/2 from x = 1 at a rate of ${LR}; times of gradients are exponential. The band is the mean of A ± 2 standard errors.`,
  *compute(core, { workers }) {
    const paths = [];
    const fits = [];
    for (let batch = 0; batch < BATCHES; batch += 1) {
      core.give(vector(core, { ...PROBLEM, workers, lr: LR, seed: 1 + 100000 * batch }));
      const fit = core.ask("fit_make");
      try {
        for (let done = 0; done < RUNS; done += 2) {
          core.ask("fit_run", fit, 2);
          yield null;
        }
        core.ask("fit_read", fit);
        paths.push(core.numbers().slice(4));
      } finally {
        core.ask("fit_destroy", fit);
      }
      fits.push(momentumOf(paths.at(-1)));
      if (batch >= 1) yield yield* result(core, workers, paths, fits);
    }
    return yield* result(core, workers, paths, fits);
  },
  insight({ workers, fitted, error, matched, count }) {
    return `Over ${number("runs", count)} runs <strong class="a">A</strong> moves like one worker with a momentum of ` +
      `${number("fitted", fitted, fitted.toFixed(3))} ± ${number("error", error, error.toFixed(3))}; 1 − 1/${workers} is ${number("expected", 1 - 1 / workers, (1 - 1 / workers).toFixed(3))}. ` +
      `Asked for ${ASKED}, a server that matches takes ${number("matched", matched, matched.toFixed(2))} from ${workers} workers.`;
  },
  draw(pen, { workers, mean, band, one }) {
    const { width, height } = pen;
    const far = Math.max(0.3, ...mean.map(([, x]) => Math.abs(x)), ...one.map(([, x]) => Math.abs(x)));
    const least = Math.min(0, ...mean.map(([, x]) => x), ...one.map(([, x]) => x));
    curves(pen, { left: 0, top: 0, width, height }, {
      x: { label: "updates of the server", least: 0, most: 4 * workers },
      y: { label: "x", least: Math.floor(least * 4) / 4, most: Math.ceil(far * 4) / 4 },
      series: [
        { letter: "A", name: `${workers} workers`, points: mean, band },
        { letter: "B", name: `μ = ${plain(1 - 1 / workers)}`, points: one },
      ],
    });
  },
  table({ mean, band, one, count, fits, matched }) {
    const rows = mean.map(([k, x], at) => [k, x, band[at][1], band[at][2], one[at]?.[1] ?? "", "", ""]);
    fits.forEach((fit, k) => { rows[k][5] = fit; });
    rows[0][6] = matched;
    return { head: ["update", `A: mean of ${count} runs`, "band from", "to", "B", `momentum fitted to ${RUNS} runs`, "momentum that matching leaves"], rows };
  },
};

function* result(core, workers, paths, fits) {
  const updates = 4 * workers;
  const columns = Array.from({ length: Math.min(updates + 1, paths[0].length) }, (_, k) => paths.map((path) => path[k]));
  const stats = columns.map((column) => [meanOf(column), errorOf(column)]);
  const one = momentumPath(core, workers, stats[1][0], updates);
  const asked = { ...PROBLEM, workers, lr: 0.002, momentum: ASKED, momentum_matching: true };
  const matched = yield* runs(core, asked, { updates: 400, piece: 40 }, (run) => meanOf(updatesOf(run).slice(100).map((one) => one.momentum)));
  return {
    workers, one, matched, fits: [...fits], count: RUNS * paths.length,
    mean: stats.map(([mean], k) => [k, mean]),
    band: stats.map(([mean, error], k) => [k, mean - 2 * error, mean + 2 * error]),
    fitted: momentumOf(stats.map(([mean]) => mean)),
    error: 2 * errorOf(fits),
  };
}

/** One worker with momentum 1 - 1/M, which goes on from A's first step. */
function momentumPath(core, workers, second, updates) {
  const { id } = core.problem(PROBLEM.problem);
  const path = [1, second];
  while (path.length <= updates) {
    const [before, now] = path.slice(-2);
    core.ask("gradient", id, now, 0);
    path.push(now + (1 - 1 / workers) * (now - before) - (LR / workers) * core.numbers()[1]);
  }
  return path.map((x, k) => [k, x]);
}

function meanOf(all) {
  return all.reduce((sum, one) => sum + one, 0) / all.length;
}

/** The standard error of a mean. */
function errorOf(all) {
  const mean = meanOf(all);
  return Math.sqrt(meanOf(all.map((one) => (one - mean) ** 2)) / (all.length - 1));
}

/** Least squares of each step of a path on the step before and the slope, which is x. */
export function momentumOf(path) {
  let [dd, dg, gg, nd, ng] = [0, 0, 0, 0, 0];
  for (let k = 2; k < path.length; k += 1) {
    const [past, slope, next] = [path[k - 1] - path[k - 2], path[k - 1], path[k] - path[k - 1]];
    dd += past * past;
    dg -= past * slope;
    gg += slope * slope;
    nd += past * next;
    ng -= slope * next;
  }
  return (nd * gg - ng * dg) / (dd * gg - dg * dg);
}
