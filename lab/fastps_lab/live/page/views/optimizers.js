// Optimizers: all rules from one start, each at the best of seven rates.

import { colourOf, drawWorker, fit, make, plain, theme } from "../draw.js";
import { vectorOf } from "../settings.js";
import { Surface } from "./surface.js";

const RATES = [0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1];
const MOST = 400;
/** A run is done when its loss is this near the least. */
const NEAR = 1e-3;

const RULES = [
  ["SGD", { optimizer: "sgd", momentum: 0 }],
  ["momentum .9", { optimizer: "sgd", momentum: 0.9, nesterov: false }],
  ["Nesterov .9", { optimizer: "sgd", momentum: 0.9, nesterov: true }],
  ["Adagrad", { optimizer: "adagrad" }],
  ["RMSprop", { optimizer: "rmsprop", momentum: 0 }],
  ["Adadelta", { optimizer: "adadelta" }],
  ["Adam", { optimizer: "adam" }],
  ["AdamW", { optimizer: "adamw" }],
  ["Ftrl", { optimizer: "ftrl" }],
];

export class OptimizersView {
  constructor(root, app) {
    this.app = app;
    this.surface = new Surface(app.core);
    this.key = "";
    this.found = [];
    this.canvas = make("canvas", { class: "figure tall", role: "img", "aria-label": "Paths of all optimizers; the table has the numbers." });
    this.caption = make("p", { class: "caption" });
    this.list = make("ul", { class: "legend" });
    root.append(this.canvas, this.list, this.caption);
  }

  draw() {
    const { settings, core } = this.app;
    const problem = core.problem(settings.problem);
    const colours = theme();
    const { context, width, height } = fit(this.canvas);
    if (!problem.toy) {
      this.found = [];
      this.key = "";
      this.list.replaceChildren();
      this.caption.textContent = "The optimizers race on functions of two numbers: choose another problem.";
      return;
    }
    const key = JSON.stringify({ ...settings, lr: 0, optimizer: "", momentum: 0, nesterov: false });
    if (key !== this.key) {
      this.key = key;
      this.found = RULES.map(([name, rule]) => best(core, problem, { ...settings, ...rule }, name));
      this.describe();
    }
    this.surface.prepare(problem, width, height, colours);
    this.surface.draw(context, colours);
    this.found.forEach((one, k) => drawPath(context, this.surface, one.points, k, colours));
  }

  describe() {
    const ranked = [...this.found].sort((a, b) => a.updates - b.updates);
    this.list.replaceChildren(...ranked.map((one) => {
      const mark = make("canvas", { class: "mark", width: "36", height: "36", "aria-hidden": "true" });
      const context = mark.getContext("2d");
      context.scale(2, 2);
      drawWorker(context, this.found.indexOf(one), 9, 9, 5, theme());
      return make("li", {}, mark, `${one.name}: ${one.updates <= MOST ? `${one.updates} updates` : `not within ${MOST}`} (rate ${one.rate})`);
    }));
    this.caption.textContent = `Updates until the loss is within ${NEAR} of the least, with ${this.app.settings.workers} workers, at the best of seven rates.`;
  }

  table() {
    const rows = this.found.map((one) => [one.name, one.updates <= MOST ? one.updates : `> ${MOST}`, one.rate, plain(one.loss, 4)]);
    return { head: ["optimizer", "updates", "rate", "loss at the end"], rows };
  }
}

function best(core, problem, settings, name) {
  const runs = RATES.map((rate) => descend(core, problem, { ...settings, lr: rate }));
  const order = (run) => run.updates * 1e9 + Math.min(1e8, Number.isFinite(run.loss) ? run.loss : 1e8);
  return { name, ...runs.reduce((a, b) => (order(b) < order(a) ? b : a)) };
}

function descend(core, problem, settings) {
  const run = core.make(vectorOf(settings, core, { evaluate_every: 1 }));
  const points = [[settings.x, settings.y]];
  const goal = problem.least + NEAR;
  try {
    run.advance(1e9, MOST, 1e5);
    const curve = run.curve();
    const done = curve.find((row) => row[2] <= goal);
    const updates = done === undefined ? MOST + 1 : done[0];
    for (const row of run.steps(0)) if (row[13] > 0 && row[13] <= updates) points.push([row[10], row[11]]);
    return { updates, rate: settings.lr, points, loss: (done ?? curve.at(-1))[2] };
  } finally {
    run.destroy();
  }
}

function drawPath(context, surface, points, k, colours) {
  const shown = points.map(([x, y]) => surface.toScreen(x, y)).filter(([x, y]) => Math.abs(x) + Math.abs(y) < 1e5);
  for (const [colour, width] of [[colours.paper, 4], [colourOf(k), 2.25]]) {
    context.beginPath();
    shown.forEach(([x, y], at) => (at === 0 ? context.moveTo(x, y) : context.lineTo(x, y)));
    context.strokeStyle = colour;
    context.lineWidth = width;
    context.setLineDash(k < 8 ? [] : [7, 4]); // there are eight colours
    context.stroke();
    context.setLineDash([]);
  }
  if (shown.length > 0) drawWorker(context, k, ...shown.at(-1), 6, colours);
}
