// 3: two workers, one of them slow: wait, or not.

import { number } from "./frame.js";
import { arrow, label, lanes, line, map, ring } from "./plot.js";
import { barsOf, runs, updatesOf } from "./runs.js";
import { plain } from "../draw.js";
import { partOf } from "../views/part.js";

const UNTIL = 24;
const SETTINGS = { problem: "booth", workers: 2, durations: "constant", x: -8, y: 2, lr: 0.03, delay_adaptive: false };

export const wait = {
  id: "wait",
  title: "Two workers over 24 seconds: run A waits for the slow one, run B does not",
  controls: {
    slow: { kind: "slide", label: "How many times as long the second worker takes", least: 1, most: 8, step: 0.5, start: 4, text: (value) => `${plain(value)} ×` },
  },
  shape: "tall",
  text: `<p>Two workers share the model. The first needs one second for a gradient, the second {slow} as long.</p>
    <p>In run <strong class="a">A</strong> the server waits until both gradients are there, and steps along their mean, twice as far as B does
    along one. Nothing gets old, but the quick worker idles. In run <strong class="b">B</strong> it takes each gradient as it comes. Nobody idles, but while the slow
    worker computes, the model moves on: its gradient belongs to a place that the server has left. That distance, counted in updates, is its
    <strong>staleness</strong>.</p>`,
  caption: "Above: filled is computing, hatched is waiting. Below: the way of B, and its stalest gradient, from where it was computed to where the server was when it arrived.",
  *compute(core, { slow }) {
    const made = {};
    for (const [letter, mode] of [["A", "sync"], ["B", "async"]]) {
      // A step along the mean of two goes as far as two.
      const lr = SETTINGS.lr * (mode === "sync" ? SETTINGS.workers : 1);
      const settings = { ...SETTINGS, lr, straggler: slow, mode, backup: 0 };
      made[letter] = yield* runs(core, settings, { time: UNTIL, piece: 60 }, (run) => {
        const { updates, loss } = run.read();
        return { bars: barsOf(run, UNTIL), rows: updatesOf(run), updates, loss };
      });
    }
    return { slow, ...made };
  },
  insight({ A, B }) {
    const share = waitingOf(A.bars);
    const stale = B.rows.map(({ staleness }) => staleness);
    const mean = stale.reduce((sum, one) => sum + one, 0) / stale.length;
    return `In ${UNTIL} seconds <strong class="a">A</strong> makes ${number("updatesA", A.updates)} updates while its workers wait ` +
      `${number("waiting", 100 * share, `${Math.round(100 * share)} %`)} of their time. <strong class="b">B</strong> makes ` +
      `${number("updatesB", B.updates)}; its gradients are ${number("mean", mean)} updates old on average, ${number("most", Math.max(...stale))} at most. ` +
      `The loss is ${number("lossA", A.loss)} in A and ${number("lossB", B.loss)} in B.`;
  },
  draw(pen, { A, B }, block) {
    const { context, width, height, colours } = pen;
    const half = 78;
    lanes(pen, { left: 0, top: 0, width, height: half }, { letter: "A", name: "waits", workers: 2, bars: A.bars, until: UNTIL });
    lanes(pen, { left: 0, top: half + 10, width, height: half + 34 }, { letter: "B", name: "does not wait", workers: 2, bars: B.bars, until: UNTIL, axis: true });
    const top = 2 * half + 54;
    const points = [[SETTINGS.x, SETTINGS.y], ...B.rows.map(({ to }) => to)];
    const booth = pen.core.problem("booth");
    const ground = map(pen, block, { left: 0, top, width, height: height - top }, booth, partOf(booth.view, [...points, ...booth.minima]));
    ground.clip(() => {
      line(context, points.map(ground.at), "B", colours, 2);
      const stalest = stalestOf(B.rows);
      const before = points[B.rows.indexOf(stalest)];
      const [from, to, end] = [stalest.from, before, stalest.to].map(ground.at);
      context.setLineDash([3, 4]);
      context.strokeStyle = colours.ink;
      context.lineWidth = 2;
      context.beginPath();
      context.moveTo(...from);
      context.lineTo(...to);
      context.stroke();
      context.setLineDash([]);
      ring(context, from, colours, 7);
      arrow(context, to, end, colours.ink, 3);
      const right = from[0] < width / 2;
      label(context, "computed here", from[0] + (right ? 14 : -14), from[1] - 12, colours, { align: right ? "left" : "right", weight: 600 });
      const near = Math.hypot(from[0] - to[0], from[1] - to[1]) < 30;
      const told = `${plain(stalest.staleness)} update${stalest.staleness === 1 ? "" : "s"} later it moves the server`;
      const below = width < 520 ? Math.max(to[1], end[1]) - to[1] + 20 : near ? 24 : 16; // on a narrow map it would cover the arrow
      label(context, told, Math.min(to[0] + 14, width - context.measureText(told).width - 8), Math.min(height - 12, to[1] + below), colours, { weight: 600 });
    });
  },
  table({ A, B }) {
    const bars = [["A", A], ["B", B]].flatMap(([letter, { bars: all }]) =>
      all.map(({ worker, from, to, waits }) => [letter, waits ? "waits" : "computes", worker + 1, from, Math.min(to, UNTIL), "", ""]));
    const pushes = [["A", A], ["B", B]].flatMap(([letter, { rows, loss }]) =>
      rows.map((row, k) => [letter, "update", row.worker + 1, row.time, row.update, row.staleness, k === rows.length - 1 ? loss : ""]));
    return { head: ["run", "what", "worker", "from / at (s)", "to (s) / update", "staleness", "loss at the end"], rows: [...bars, ...pushes] };
  },
};

export function waitingOf(bars) {
  const sum = (all) => all.reduce((total, { from, to }) => total + Math.min(to, UNTIL) - Math.min(from, UNTIL), 0);
  return sum(bars.filter(({ waits }) => waits)) / sum(bars);
}

/** The stalest gradient; of equal ones the one that is farthest from where the server is. */
function stalestOf(rows) {
  const far = ({ from, to }) => Math.hypot(from[0] - to[0], from[1] - to[1]);
  const worse = (one, other) => other.staleness - one.staleness || far(other) - far(one);
  return rows.reduce((one, other) => (worse(one, other) > 0 ? other : one));
}
