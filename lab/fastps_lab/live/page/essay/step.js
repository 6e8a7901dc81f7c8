// 1: one worker, one server, one gradient.

import { number } from "./frame.js";
import { arrow, label, ring, scaledMap } from "./plot.js";
import { runs, updatesOf } from "./runs.js";
import { plain } from "../draw.js";

const STEPS = 12;
/** The largest curvature of Booth's function; above twice its reciprocal every step overshoots by more. */
const STEEPEST = 18;

export const step = {
  id: "step",
  title: "One worker and one server: the path of twelve steps on Booth's function",
  controls: {
    lr: { kind: "slide", label: "Rate", least: 0.005, most: 0.125, step: 0.005, start: 0.05 },
    x: { kind: "slide", label: "Start x", least: -10, most: 10, step: 0.5, start: -8 },
    y: { kind: "slide", label: "Start y", least: -10, most: 10, step: 0.5, start: 8 },
  },
  drag: ["x", "y"],
  shape: "square",
  text: `<p>A model is a list of numbers, here two: <math><mi>w</mi><mo>=</mo><mo stretchy="false">(</mo><mi>x</mi><mo>,</mo><mi>y</mi><mo stretchy="false">)</mo></math>.
    The <strong>server</strong> keeps them. A <strong>worker</strong> pulls them, finds out which way is up, the gradient, and pushes that.
    The server then takes one step down:</p>
    <math display="block"><mi>w</mi><mo>←</mo><mi>w</mi><mo>−</mo><mi>η</mi><mo>∇</mo><mi>f</mi><mo stretchy="false">(</mo><mi>w</mi><mo stretchy="false">)</mo></math>
    <p>How long the step is depends on the rate <math><mi>η</mi></math>. Let it be {lr}, and see where twelve steps lead from
    <math><mi>x</mi></math> {x} and <math><mi>y</mi></math> {y}. You can also drag the start in the picture.</p>`,
  caption: "Bluer is lower, as the scale says; × is the lowest point. The arrow is the first step, discs are the twelve that the server takes.",
  *compute(core, { lr, x, y }) {
    const settings = { problem: "booth", workers: 1, durations: "constant", x, y, lr };
    const points = yield* runs(core, settings, { updates: STEPS, piece: 8 }, (run) => updatesOf(run).map(({ to }) => to));
    const all = [[x, y], ...points];
    const losses = all.map(([a, b]) => {
      core.ask("gradient", core.problem("booth").id, a, b);
      return core.numbers()[0];
    });
    return { lr, points: all, losses };
  },
  insight({ lr, points, losses }) {
    const length = Math.hypot(points[1][0] - points[0][0], points[1][1] - points[0][1]);
    const last = losses.at(-1);
    const most = 2 / STEEPEST;
    const why = lr > most ? ` The rate is above 2/${STEEPEST} = ${plain(most)}, where the steepest direction overshoots further each time.`
      : lr > most / 2 ? ` The steps jump across the valley: the rate is near its limit, 2/${STEEPEST} = ${plain(most)}.` : "";
    return `The first step is ${number("length", length)} long and takes the loss from ${number("before", losses[0])} to ` +
      `${number("after", losses[1])}; after step ${STEPS} it is ${number("last", last)}.${why}`;
  },
  draw(pen, { points }, block) {
    const { context, width, height, colours } = pen;
    const ground = scaledMap(pen, block, { left: 0, top: 0, width, height }, pen.core.problem("booth"));
    block.toPlane = ground.toPlane;
    const shown = points.map(ground.at);
    ground.clip(() => {
      for (const [colour, thick] of [[colours.paper, 4.5], [colours.a, 2]]) {
        context.beginPath();
        shown.forEach(([a, b], k) => (k === 0 ? context.moveTo(a, b) : context.lineTo(a, b)));
        context.strokeStyle = colour;
        context.lineWidth = thick;
        context.stroke();
      }
      for (const [a, b] of shown.slice(1)) {
        context.beginPath();
        context.arc(a, b, 4, 0, 7);
        context.fillStyle = colours.a;
        context.fill();
        context.strokeStyle = colours.paper;
        context.lineWidth = 1.5;
        context.stroke();
      }
      arrow(context, shown[0], shown[1], colours.ink, 3);
      ring(context, shown[0], colours, 10);
      const right = shown[0][0] < width * 0.6;
      label(context, "the worker pulls w here", shown[0][0] + (right ? 18 : -18), shown[0][1] + (shown[1][1] > shown[0][1] ? -16 : 20), colours, { align: right ? "left" : "right", weight: 600 });
    });
  },
  table({ points, losses }) {
    return { head: ["step", "x", "y", "loss"], rows: points.map(([x, y], k) => [k, x, y, losses[k]]) };
  },
};
