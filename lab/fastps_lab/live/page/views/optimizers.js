// Optimizers: all rules from one start, each at the best of seven rates; on the net, whose runs take longer, at one.

import { OKABE_ITO, colourOf, drawWorker, fit, make, plain, theme } from "../draw.js";
import { vectorOf } from "../settings.js";
import { Chart } from "./chart.js";
import { partOf } from "./part.js";
import { Picture } from "./picture.js";
import { SCALE, Surface } from "./surface.js";

const RATES = [0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1];
const MOST = 400;
/** A run is done when its loss is this near the least. */
const NEAR = 1e-3;
/** Updates on the net, and between two evaluations; events between two looks at the clock. */
const MOST_NET = 100;
const EVERY_NET = 10;
const PIECE_NET = 1;
const PIECE = 100;
/** Milliseconds of a frame that the runs may take. */
const BUDGET = 2;
const FIRST = "The first of nine rules is being computed.";
/** Pixels from the end of a path at which hovering means it. */
const AT_END = 11;

/** Rules, and the rate of each on the net: the best of eight, tried with eight workers. */
const RULES = [
  ["SGD", { optimizer: "sgd", momentum: 0 }, 1],
  ["momentum .9", { optimizer: "sgd", momentum: 0.9, nesterov: false }, 0.1],
  ["Nesterov .9", { optimizer: "sgd", momentum: 0.9, nesterov: true }, 0.1],
  ["Adagrad", { optimizer: "adagrad" }, 0.1],
  ["RMSprop", { optimizer: "rmsprop", momentum: 0 }, 0.01],
  ["Adadelta", { optimizer: "adadelta" }, 3],
  ["Adam", { optimizer: "adam" }, 0.01],
  ["AdamW", { optimizer: "adamw" }, 0.01],
  ["Ftrl", { optimizer: "ftrl" }, 1],
];

export class OptimizersView {
  constructor(root, app) {
    this.app = app;
    this.surface = new Surface(app.core);
    this.key = "";
    this.found = [];
    this.ends = [];
    const about = { class: "figure tall", role: "img", "aria-label": "Paths of all optimizers; the table has the numbers." };
    const stage = make("div", {});
    this.picture = new Picture(stage, about, (x, y) => this.tell(x, y));
    this.canvas = this.picture.canvas;
    this.curves = make("div", { hidden: true });
    stage.append(this.curves);
    this.chart = new Chart(this.curves, { title: "Loss of the net", x: "updates", y: "loss", log: true, height: 380 });
    this.caption = make("p", { class: "caption" });
    this.list = make("ul", { class: "legend" });
    root.append(stage, this.list, this.caption);
  }

  draw() {
    const { settings, core } = this.app;
    const problem = core.problem(settings.problem);
    this.problem = problem;
    this.picture.canvas.parentElement.hidden = !problem.toy;
    this.curves.hidden = problem.toy;
    const key = JSON.stringify({ ...settings, lr: 0, optimizer: "", momentum: 0, nesterov: false });
    if (key !== this.key) {
      this.key = key;
      this.found = [];
      this.drawn = -1;
      this.job?.return(); // frees the run that it holds
      this.job = race(core, problem, settings, this.found);
    }
    this.advance();
    if (problem.toy) this.drawPaths(problem);
    else this.drawCurves();
    this.describe(problem);
  }

  /** Runs a little; the next frame goes on. */
  advance() {
    const late = performance.now() + BUDGET;
    while (this.job !== null && performance.now() < late) if (this.job.next().done) this.job = null;
    if (this.job !== null) this.app.redraw();
  }

  drawPaths(problem) {
    const colours = theme();
    const { context, width, height } = fit(this.canvas);
    const { x, y } = this.app.settings;
    const part = this.app.state.whole ? problem.view : partOf(problem.view, [[x, y], ...problem.minima.slice(0, 1), ...this.found.flatMap(({ points }) => points)]);
    this.surface.prepare(problem, width, height - SCALE, colours, part);
    context.save();
    context.beginPath();
    context.rect(0, 0, width, height - SCALE);
    context.clip();
    this.surface.draw(context, colours);
    this.found.forEach((one, k) => drawPath(context, this.surface, one.points, k, colours));
    context.restore();
    this.surface.drawScale(context, colours, height - SCALE);
    this.ends = this.found.map((one) => ({ at: this.surface.toScreen(...one.points.at(-1)), text: () => `${one.name}: ${resultOf(one)}` }));
    this.picture.lack(this.found.length > 0 ? "" : FIRST);
    this.picture.show();
  }

  tell(left, top) {
    const end = this.ends.findLast(({ at: [x, y] }) => Math.hypot(x - left, y - top) < AT_END);
    if (end !== undefined) return end.text();
    if (top > this.surface.height) return "";
    const [x, y] = this.surface.toPlane(left, top);
    this.app.core.ask("gradient", this.problem.id, x, y);
    return `x ${plain(x)}, y ${plain(y)}: height ${plain(this.app.core.numbers()[0])}`;
  }

  drawCurves() {
    const [first] = this.found;
    const series = this.found.map(({ name }, k) => ({ label: name, colour: OKABE_ITO[k % 8], dash: k < 8 ? undefined : [7, 4] }));
    const updates = first === undefined ? [] : first.curve.map(([update]) => update);
    const losses = this.found.map(({ curve }) => updates.map((_, k) => (curve[k]?.[2] > 0 && Number.isFinite(curve[k][2]) ? curve[k][2] : null)));
    if (this.drawn === this.found.length && this.curves.clientWidth === this.wide) return;
    [this.drawn, this.wide] = [this.found.length, this.curves.clientWidth];
    this.chart.draw([updates, ...losses], series, first === undefined ? FIRST : "");
  }

  describe(problem) {
    const order = (one) => (problem.toy ? one.updates : one.loss);
    const ranked = [...this.found].sort((a, b) => order(a) - order(b));
    const told = ranked.map((one) => `${one.name}: ${resultOf(one)}`).join();
    if (told !== this.told) {
      this.told = told;
      this.list.replaceChildren(...ranked.map((one) => {
        const mark = make("canvas", { class: "mark", width: "36", height: "36", "aria-hidden": "true" });
        const context = mark.getContext("2d");
        context.scale(2, 2);
        drawWorker(context, this.found.indexOf(one), 9, 9, 5, theme());
        return make("li", {}, mark, `${one.name}: ${resultOf(one)}`);
      }));
    }
    const { workers } = this.app.settings;
    const left = this.job === null ? "" : ` ${this.found.length} of ${RULES.length} are computed.`;
    this.caption.textContent = problem.toy
      ? `Updates until the loss is within ${NEAR} of the least, with ${workers} workers, at the best of seven rates.${left}`
      : `Loss of the net after ${MOST_NET} updates, with ${workers} workers, each at a rate that suits the net.${left}`;
  }

  table() {
    const rows = this.found.map((one) => [one.name, one.updates <= MOST ? one.updates : `> ${MOST}`, one.rate, plain(one.loss, 4)]);
    return { head: ["optimizer", "updates", "rate", "loss at the end"], rows };
  }
}

function resultOf({ curve, loss, updates, rate }) {
  if (curve !== undefined) return `loss ${plain(loss)} (rate ${rate})`;
  return `${updates <= MOST ? `${updates} updates` : `not within ${MOST}`} (rate ${rate})`;
}

/** Adds a rule after the other to what is found. */
function* race(core, problem, settings, found) {
  for (const [name, rule, rate] of RULES) {
    const chosen = { ...settings, ...rule };
    found.push({ name, ...(problem.toy ? yield* best(core, problem, chosen) : yield* train(core, { ...chosen, lr: rate })) });
    yield;
  }
}

function* best(core, problem, settings) {
  const runs = [];
  for (const lr of RATES) {
    runs.push(yield* descend(core, problem, { ...settings, lr }));
  }
  const order = (run) => run.updates * 1e9 + Math.min(1e8, Number.isFinite(run.loss) ? run.loss : 1e8);
  return runs.reduce((a, b) => (order(b) < order(a) ? b : a));
}

function* train(core, settings) {
  const run = core.make(vectorOf(settings, core, { evaluate_every: EVERY_NET }));
  try {
    let left = 500 + 100 * MOST_NET; // one that diverges, or whose pushes are refused, makes no more updates
    while (left > 0 && run.advance(1e9, MOST_NET, PIECE_NET) === PIECE_NET) {
      left -= PIECE_NET;
      yield;
    }
    const curve = run.curve();
    return { curve, updates: curve.at(-1)[0], rate: settings.lr, loss: curve.at(-1)[2] };
  } finally {
    run.destroy();
  }
}

function* descend(core, problem, settings) {
  const run = core.make(vectorOf(settings, core, { evaluate_every: 1 }));
  const points = [[settings.x, settings.y]];
  const goal = problem.least + NEAR;
  try {
    let left = 1e5; // one that diverges makes no more updates
    while (left > 0 && run.advance(1e9, MOST, PIECE) === PIECE) {
      left -= PIECE;
      yield;
    }
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
