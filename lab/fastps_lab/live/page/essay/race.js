// 2: the optimizers from one start.

import { number } from "./frame.js";
import { label, line, map, mark, ring, styleOf } from "./plot.js";
import { lossOf, runs, updatesOf } from "./runs.js";
import { RECORDED } from "./recorded.js";

const MOST = 400;
/** A run has arrived when its loss is this near the least. */
const NEAR = 0.01;

const RULES = {
  sgd: { name: "SGD", settings: { optimizer: "sgd" }, rates: [0.02, 0.002], weakness: "crawls where the ground is flat" },
  momentum: { name: "momentum", settings: { optimizer: "sgd", momentum: 0.9 }, rates: [0.01, 0.001], weakness: "runs past the turn and comes back" },
  nesterov: { name: "Nesterov", settings: { optimizer: "sgd", momentum: 0.9, nesterov: true }, rates: [0.01, 0.001], weakness: "looks ahead, and still overshoots" },
  adagrad: { name: "Adagrad", settings: { optimizer: "adagrad" }, rates: [0.5, 0.5], weakness: "remembers each gradient, so its steps only shrink" },
  rmsprop: { name: "RMSProp", settings: { optimizer: "rmsprop" }, rates: [0.05, 0.02], weakness: "keeps its step length, so it jitters at the end" },
  adadelta: { name: "Adadelta", settings: { optimizer: "adadelta" }, rates: [5, 1], weakness: "has to learn how far to go, and begins slowly" },
  adam: { name: "Adam", settings: { optimizer: "adam" }, rates: [0.2, 0.1], weakness: "has momentum in it, and swings out, too" },
  cg: { name: "conjugate gradients", weakness: "needs exact values and many of them: no noise, no stale gradients" },
};
const PROBLEMS = [["beale", "Beale's function"], ["rosenbrock", "Rosenbrock's valley"]];
const NAMES = Object.entries(RULES).map(([id, { name }]) => [id, name]);

export const race = {
  id: "race",
  title: "Optimizers from one start; A and B stand out",
  controls: {
    a: { kind: "choice", label: "Optimizer A", options: NAMES, start: "momentum" },
    b: { kind: "choice", label: "Optimizer B", options: NAMES, start: "adam" },
    x: { kind: "slide", label: "Start x", least: -2, most: 2, step: 0.1, start: -1 },
    y: { kind: "slide", label: "Start y", least: -1, most: 3, step: 0.1, start: 1.5 },
    problem: { kind: "choice", label: "Function", options: PROBLEMS, start: "rosenbrock" },
  },
  drag: ["x", "y"],
  shape: "square",
  text: `<p>Every optimizer sees the same gradients and takes another step. They differ in what they remember: nothing, a velocity, or
    how large the gradients of each number have been.</p>
    <p>Compare <strong class="a">A</strong> {a} and <strong class="b">B</strong> {b} on {problem}; the others stay pale. Drag the start,
    or set <math><mi>x</mi></math> {x} and <math><mi>y</mi></math> {y}. All rates are fixed, one for each optimizer and function.</p>`,
  caption: `Up to ${MOST} updates of one worker; × is a lowest point. Conjugate gradients are a recording from the nearest of 64 starts.`,
  *compute(core, { a, b, x, y, problem }) {
    const { least } = core.problem(problem);
    const paths = [];
    for (const [id, rule] of Object.entries(RULES)) {
      if (id === "cg") {
        paths.push({ id, ...recorded(problem, x, y, least) });
        continue;
      }
      const lr = rule.rates[PROBLEMS.findIndex(([one]) => one === problem)];
      const settings = { problem, workers: 1, durations: "constant", x, y, ...rule.settings, lr };
      const found = yield* runs(core, settings, { updates: MOST, piece: 60 }, (run) => pathOf(run, [x, y], least));
      paths.push({ id, lr, ...found });
    }
    return { a, b, problem, paths };
  },
  insight({ a, b, paths }) {
    const [one, other] = [a, b].map((id) => paths.find((path) => path.id === id));
    const told = (path, letter) => {
      const name = `<strong class="${letter.toLowerCase()}">${letter}</strong>, ${RULES[path.id].name},`;
      const far = ` over a path of length ${number(`way${letter}`, wayOf(path.points))}`;
      return path.updates <= MOST ? `${name} arrives after ${number(`updates${letter}`, path.updates)} updates${far}`
        : `${name} has not arrived after ${number(`updates${letter}`, MOST)} updates${far}`;
    };
    return `${told(one, "A")}; ${told(other, "B")}. Known weakness of A: it ${RULES[a].weakness}.${a === b ? "" : ` Of B: it ${RULES[b].weakness}.`}`;
  },
  draw(pen, { a, b, problem, paths }, block) {
    const { context, width, height, colours } = pen;
    const ground = map(pen, block, { left: 0, top: 0, width, height }, pen.core.problem(problem));
    block.toPlane = ground.toPlane;
    const shown = (path) => path.points.map(ground.at).filter(([left, top]) => Math.abs(left) + Math.abs(top) < 1e5);
    ground.clip(() => {
      context.globalAlpha = 0.5;
      context.lineWidth = 1.25;
      context.strokeStyle = colours.soft;
      for (const path of paths) {
        if (path.id === a || path.id === b) continue;
        context.beginPath();
        shown(path).forEach(([left, top], k) => (k === 0 ? context.moveTo(left, top) : context.lineTo(left, top)));
        context.stroke();
      }
      context.globalAlpha = 1;
      for (const [letter, id] of [["B", b], ["A", a]]) {
        const points = shown(paths.find((path) => path.id === id));
        line(context, points, letter, colours);
        points.forEach(([left, top], k) => {
          if (k > 0 && (k % 10 === 0 || k === points.length - 1)) mark(context, letter, left, top, k === points.length - 1 ? 7 : 4, colours);
        });
      }
      const start = ground.at(paths[0].points[0]);
      ring(context, start, colours, 10);
      label(context, "start", start[0] + 16, start[1] - 14, colours, { weight: 600 });
    });
    [["A", a], ["B", b]].forEach(([letter, id], k) => {
      const top = 20 + 22 * k;
      line(context, [[14, top], [44, top]], letter, colours);
      mark(context, letter, 29, top, 5, colours);
      label(context, `${letter}  ${RULES[id].name}`, 52, top, colours, { weight: 600, colour: styleOf(letter, colours).colour });
    });
  },
  table({ paths }) {
    return {
      head: ["optimizer", "rate", "updates to arrive", "length of the path", "loss at the end"],
      rows: paths.map(({ id, lr, updates, points, loss }) => [RULES[id].name, lr ?? "recorded", updates <= MOST ? updates : `over ${MOST}`, wayOf(points), loss]),
    };
  },
};

function wayOf(points) {
  return points.slice(1).reduce((sum, [x, y], k) => sum + Math.hypot(x - points[k][0], y - points[k][1]), 0);
}

function pathOf(run, start, least) {
  const curve = lossOf(run);
  const done = curve.find(({ loss }) => loss <= least + NEAR);
  const updates = done?.update ?? MOST + 1;
  const way = updatesOf(run).filter(({ update }) => update <= updates).map(({ to }) => to);
  const points = [start, ...way].filter(([x, y]) => Math.hypot(x, y) < 1e3);
  return { updates, points, loss: (done ?? curve.at(-1)).loss };
}

/** The recording that begins nearest. */
function recorded(problem, x, y, least) {
  const far = ({ points: [[a, b]] }) => Math.hypot(a - x, b - y);
  const { points, losses } = RECORDED[problem].reduce((one, other) => (far(other) < far(one) ? other : one));
  const at = losses.findIndex((loss) => loss <= least + NEAR);
  const end = at < 0 ? points.length - 1 : at;
  return { updates: at < 0 ? MOST + 1 : end, points: points.slice(0, end + 1), loss: losses[end] };
}
