// 6: fewer bits, fewer messages.

import { number } from "./frame.js";
import { curves, decades } from "./plot.js";
import { lossOf, runs } from "./runs.js";
import { curveTable } from "./slow.js";
import { bytesText, plain } from "../draw.js";

const UPDATES = 200;
const EVERY = 20;
const GRADIENTS = 400;

/** The loss over a run, with the bytes pushed until then. */
function withBytes(run) {
  const curve = lossOf(run);
  const { bytes, updates } = run.read();
  return curve.map((point) => ({ ...point, bytes: updates > 0 ? (bytes * point.update) / updates : 0 }));
}

export const bits = {
  id: "bits",
  title: "Training on digits with fewer bits: run A remembers what rounding dropped, run B forgets it",
  controls: {
    codec: { kind: "choice", label: "Bits of a number", options: [["onebit", "1 bit"], ["int8", "8 bits"], ["bfloat16", "16 bits"]], start: "onebit" },
  },
  text: `<p>A gradient is 32 bits a number. Send {codec} instead: for one bit, only its sign, and for each block of numbers two sizes.</p>
    <p>What rounding drops is not lost in run <strong class="a">A</strong>: the worker keeps the rest and adds it to its next gradient
    (<strong>error feedback</strong>). Run <strong class="b">B</strong> forgets it, which the product refuses; only this page can do that.
    The dotted line sends all 32 bits.</p>`,
  caption: `Two workers wait for each other. Loss on 1,442 images, every ${EVERY} updates; the scale is logarithmic.`,
  *compute(core, { codec }) {
    const made = { codec, A: [], B: [], C: [] };
    for (const [letter, sent, feedback] of [["C", "float32", true], ["A", codec, true], ["B", codec, false]]) {
      const settings = { problem: "digits", workers: 2, mode: "sync", backup: 0, codec: sent, error_feedback: feedback, momentum: 0.9, lr: 0.1 };
      const limits = { updates: UPDATES, more: { evaluate_every: EVERY, batch: 16 }, piece: 1 };
      made[letter] = yield* runs(core, settings, limits, withBytes, (run) => ({ ...made, [letter]: withBytes(run) }));
    }
    return made;
  },
  insight({ A, B, C }) {
    const [a, b, c] = [A, B, C].map((curve) => curve.at(-1));
    return `<strong class="a">A</strong> pushes ${number("bytes", a.bytes, bytesText(a.bytes))} where 32 bits take ${number("plain", c.bytes, bytesText(c.bytes))}: ${number("fewer", c.bytes / a.bytes)} × less. ` +
      `Its loss ends at ${number("A", a.loss / c.loss, (a.loss / c.loss).toFixed(2))} × that of 32 bits, that of <strong class="b">B</strong> at ${number("B", b.loss / c.loss, (b.loss / c.loss).toFixed(2))} ×.`;
  },
  draw(pen, { A, B, C }) {
    const series = [["C", "32 bits", C], ["B", "forgets", B], ["A", "remembers", A]].map(([letter, name, curve]) => ({ letter, name, points: curve.map(({ update, loss }) => [update, loss]) }));
    curves(pen, { left: 0, top: 0, width: pen.width, height: pen.height }, {
      x: { label: "updates", least: 0, most: UPDATES }, y: { label: "loss", log: true, ...decades(series, 1e-3) }, series,
    });
  },
  table: curveTable,
};

export const local = {
  id: "local",
  title: "Training on digits with fewer messages: run A pushes every gradient, run B the sum of several",
  controls: {
    n: { kind: "slide", label: "Steps between pushes", options: [2, 5, 10, 20, 50].map((one) => [one, String(one)]), start: 10, text: (value) => `${value} steps` },
  },
  text: `<p>Or send less often. In run <strong class="a">A</strong> each of four workers pushes every gradient. In run <strong class="b">B</strong> it first
    takes {n} on its own copy of the model, and then pushes the sum of their gradients and pulls what the others have done.</p>`,
  caption: `Both runs compute ${GRADIENTS} gradients and apply them with Adagrad at 0.1. The scale is logarithmic.`,
  *compute(core, { n }) {
    const made = { n, A: [], B: [] };
    for (const [letter, every] of [["A", 1], ["B", n]]) {
      const settings = { problem: "digits", workers: 4, mode: "local", push_every: every, pull_every: every, local_lr: 0.1, optimizer: "adagrad", lr: 0.1 };
      const limits = { updates: GRADIENTS / every, more: { evaluate_every: Math.max(1, Math.round(20 / every)), batch: 16 }, piece: 1 };
      const read = (run) => withBytes(run).map((point) => ({ ...point, update: point.update * every }));
      made[letter] = yield* runs(core, settings, limits, read, (run) => ({ ...made, [letter]: read(run) }));
    }
    return made;
  },
  insight({ n, A, B }) {
    const [a, b] = [A.at(-1), B.at(-1)];
    return `With ${n} steps between pushes <strong class="b">B</strong> sends ${number("bytes", b.bytes, bytesText(b.bytes))} where <strong class="a">A</strong> sends ${number("plain", a.bytes, bytesText(a.bytes))}, ` +
      `${number("fewer", a.bytes / b.bytes)} × less. From as many gradients it has a loss of ${number("B", b.loss)}, and A of ${number("A", a.loss)}.`;
  },
  draw(pen, { n, A, B }) {
    const series = [["A", "1 step", A], ["B", `${plain(n)} steps`, B]].map(([letter, name, curve]) => ({ letter, name, points: curve.map(({ update, loss }) => [update, loss]) }));
    curves(pen, { left: 0, top: 0, width: pen.width, height: pen.height }, {
      x: { label: "gradients computed", least: 0, most: GRADIENTS }, y: { label: "loss", log: true, ...decades(series, 1e-3) }, series,
    });
  },
  table: (data) => {
    const { head, rows } = curveTable(data);
    return { head: head.map((one) => (one === "update" ? "gradients" : one)), rows };
  },
};
