// 5: the slow and the dead.

import { number } from "./frame.js";
import { curves, decades, lanes } from "./plot.js";
import { barsOf, lossOf, runs } from "./runs.js";
import { plain } from "../draw.js";

const UNTIL = 30;
const KILLED_AT = 12;
const VICTIM = 2;
const ERRORS_EVERY = 20;
const UPDATES = 300;

export const slow = {
  id: "slow",
  title: "Eight workers over 30 seconds: run A waits for all of them, run B for seven",
  controls: {
    slow: { kind: "slide", label: "How many times as long the last worker takes", least: 1, most: 20, step: 1, start: 6, text: (value) => `${plain(value)} ×` },
    dead: { kind: "flag", label: `Kill worker ${VICTIM + 1} at ${KILLED_AT} s`, undo: `Let worker ${VICTIM + 1} live`, start: false },
  },
  shape: "tall",
  text: `<p>If a server waits for all, the slowest sets the pace. Let the last of eight workers take {slow} as long as the others.</p>
    <p>Run <strong class="a">A</strong> makes a new version of the model from all eight gradients. Run <strong class="b">B</strong> makes it from
    the first seven that come; the eighth is a <strong>backup</strong>, whose late gradient is thrown away.</p><p>{dead}</p>`,
  caption: "Each row is a worker: filled is computing, hatched is waiting, a cross is the end of a killed worker.",
  *compute(core, { slow: factor, dead }) {
    const made = {};
    for (const [letter, backup] of [["A", 0], ["B", 1]]) {
      const settings = { problem: "booth", workers: 8, mode: "sync", backup, straggler: factor, durations: "exponential", lr: 0.02, seed: 3 };
      const acts = dead ? [{ time: KILLED_AT, act: 0, worker: VICTIM }] : [];
      made[letter] = yield* runs(core, settings, { time: UNTIL, acts }, (run) => ({
        bars: barsOf(run, UNTIL),
        versions: lossOf(run).slice(1).map(({ time }) => time),
      }));
    }
    return { factor, dead, ...made };
  },
  insight({ factor, dead, A, B }) {
    const [a, b] = [A, B].map(({ versions }) => versions.length);
    const waits = share(A.bars);
    const all = `In ${UNTIL} seconds <strong class="a">A</strong> makes ${number("A", a)} versions while its workers wait ` +
      `${number("waiting", 100 * waits, `${Math.round(100 * waits)} %`)} of their time; <strong class="b">B</strong> makes ${number("B", b)}.`;
    if (!dead) return all;
    const [after, later] = [A, B].map(({ versions }) => versions.filter((time) => time > KILLED_AT).length);
    const pauses = A.versions.map((time, k) => (time > KILLED_AT ? time - (A.versions[k - 1] ?? 0) : 0));
    const waited = after === 0 ? ": it waits for a gradient that never comes" : `, after a pause of ${number("pause", Math.max(...pauses))} s`;
    return `${all} After the death at ${KILLED_AT} s, A makes ${number("afterA", after)}${waited}; a server waits for a dead worker until its lease is over. ` +
      `B makes ${number("afterB", later)}, but its backup is used up: it now waits for all that live${factor > 1 ? ", the slow one too" : ""}.`;
  },
  draw(pen, { dead, A, B }) {
    const { width, height } = pen;
    const half = (height - 44) / 2;
    const gone = dead ? new Map([[VICTIM, KILLED_AT]]) : new Map();
    lanes(pen, { left: 0, top: 0, width, height: half }, { letter: "A", name: "waits for all eight", workers: 8, bars: A.bars, until: UNTIL, gone });
    lanes(pen, { left: 0, top: half + 10, width, height: half + 34 }, { letter: "B", name: "waits for the first seven", workers: 8, bars: B.bars, until: UNTIL, gone, axis: true });
  },
  table({ A, B }) {
    return {
      head: ["run", "what", "worker", "from (s)", "to (s)"],
      rows: [["A", A], ["B", B]].flatMap(([letter, { bars, versions }]) => [
        ...bars.map(({ worker, from, to, waits }) => [letter, waits ? "waits" : "computes", worker + 1, from, Math.min(to, UNTIL)]),
        ...versions.map((time) => [letter, "version", "", time, ""]),
      ]),
    };
  },
};

function share(bars) {
  const sum = (all) => all.reduce((total, { from, to }) => total + Math.min(to, UNTIL) - Math.min(from, UNTIL), 0);
  return sum(bars.filter(({ waits }) => waits)) / sum(bars);
}

export const survives = {
  id: "survives",
  title: "Training on digits without waiting: run A with SGD, run B with Adagrad",
  controls: {
    workers: { kind: "slide", label: "Workers", options: [1, 2, 4, 8, 16, 32].map((one) => [one, String(one)]), start: 32, text: (value) => `${value} worker${value === 1 ? "" : "s"}` },
  },
  text: `<p>Not waiting has a price, too: the more workers, the older each gradient. With {workers}, a net learns to read handwritten digits, run <strong class="a">A</strong> with SGD at the largest rate that one worker bears, run
    <strong class="b">B</strong> with Adagrad, which takes smaller steps where gradients have been large.</p>`,
  caption: `Loss on 1,442 images, every ${ERRORS_EVERY} updates; the scale is logarithmic. Rates: SGD 4, Adagrad 0.2.`,
  *compute(core, { workers }) {
    const made = { workers, A: [], B: [] };
    for (const [letter, optimizer, lr] of [["A", "sgd", 4], ["B", "adagrad", 0.2]]) {
      const settings = { problem: "digits", workers, optimizer, lr };
      const more = { evaluate_every: ERRORS_EVERY };
      made[letter] = yield* runs(core, settings, { updates: UPDATES, more, piece: 1 }, lossOf, (run) => ({ ...made, [letter]: lossOf(run) }));
    }
    return made;
  },
  insight({ workers, A, B }) {
    const [a, b] = [A.at(-1).error, B.at(-1).error];
    const told = a / b >= 2 ? `that is ${number("ratio", a / b)} × as many` : "both have learned it";
    return `After ${number("updates", A.at(-1).update)} updates by ${workers} worker${workers === 1 ? "" : "s"} <strong class="a">A</strong> misreads ${number("A", a)} % of the test images and ` +
      `<strong class="b">B</strong> ${number("B", b)} %: ${told}.`;
  },
  draw(pen, { A, B }) {
    const series = [["A", "SGD", A], ["B", "Adagrad", B]].map(([letter, name, curve]) => ({ letter, name, points: curve.map(({ update, loss }) => [update, loss]) }));
    curves(pen, { left: 0, top: 0, width: pen.width, height: pen.height }, {
      x: { label: "updates", least: 0, most: UPDATES }, y: { label: "loss", log: true, least: 0.001, most: Math.max(10, decades(series, 1e-3, 1e2).most) }, series,
    });
  },
  table: curveTable,
};

/** Curves of A, B and perhaps C. */
export function curveTable(data) {
  const rows = ["A", "B", "C"].filter((letter) => data[letter] !== undefined).flatMap((letter) =>
    data[letter].map(({ update, time, loss, error, bytes }) => [letter, update, time, loss, error, bytes ?? ""]));
  return { head: ["run", "update", "time (s)", "loss", "test error (%)", "bytes pushed"], rows };
}
