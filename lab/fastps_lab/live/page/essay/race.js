// 2: the optimizers from one start.

import { font, number } from "./frame.js";
import { label, line, mark, ring, scaledMap, styleOf } from "./plot.js";
import { lossOf, runs, updatesOf } from "./runs.js";
import { RECORDED } from "./recorded.js";

const MOST = 400;
/** A run has arrived when its loss is this near the least. */
const NEAR = 0.01;
/** The first updates, in which Adadelta has not gone far. */
const EARLY = 50;

const RULES = {
  sgd: { name: "SGD", settings: { optimizer: "sgd" }, rates: [0.02, 0.002], weakness: "crawls where the ground is flat", kind: "shrinks" },
  momentum: { name: "momentum", settings: { optimizer: "sgd", momentum: 0.9 }, rates: [0.01, 0.001], weakness: "runs past the valley and comes back", kind: "turns" },
  nesterov: { name: "Nesterov", settings: { optimizer: "sgd", momentum: 0.9, nesterov: true }, rates: [0.01, 0.001], weakness: "looks ahead, and still overshoots", kind: "turns" },
  adagrad: { name: "Adagrad", settings: { optimizer: "adagrad" }, rates: [0.5, 0.5], weakness: "remembers each gradient, so its steps only shrink", kind: "shrinks" },
  rmsprop: { name: "RMSProp", settings: { optimizer: "rmsprop" }, rates: [0.05, 0.02], weakness: "makes small gradients large, so it jitters", kind: "turns" },
  adadelta: { name: "Adadelta", settings: { optimizer: "adadelta" }, rates: [5, 1], weakness: "has to learn how far to go, and begins slowly", kind: "slow" },
  adam: { name: "Adam", settings: { optimizer: "adam" }, rates: [0.2, 0.1], weakness: "has momentum in it, and swings out, too", kind: "turns" },
  cg: { name: "conjugate gradients", weakness: "needs exact values and many of them: no noise, no stale gradients" },
};
/** How a weakness shows in a path: its measure, whether that tells, its sentence, and where the picture marks it. */
const KINDS = {
  turns: {
    measure: (points) => turnsOf(points).length,
    tells: (times) => times > 0,
    told: (times, shown) => `here it turns back ${shown} time${times === 1 ? "" : "s"}`,
    mark: "turns back",
    spot: (points) => turnsOf(points).reduce((most, at) => (stepOf(points, at) > stepOf(points, most) ? at : most)),
  },
  shrinks: {
    measure: (points) => stepOf(points, 1) / stepOf(points, points.length - 1),
    tells: (ratio) => ratio >= 2,
    told: (ratio, shown) => `here its last step is ${shown} × shorter than its first`,
    mark: "has short steps left",
    spot: (points) => points.length - 1,
  },
  slow: {
    measure: (points) => Math.hypot(...between(points[0], points[EARLY] ?? points.at(-1))),
    tells: (way, points) => points.length > EARLY,
    told: (way, shown) => `here it is ${shown} from the start after ${EARLY} updates`,
    mark: `is here after ${EARLY}`,
    spot: () => EARLY,
  },
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
    const weak = (path, letter) => {
      const { weakness, kind } = RULES[path.id];
      const subject = `<strong class="${letter.toLowerCase()}">${letter}</strong> ${weakness}`;
      if (path.left) return `${subject}; from here it flies off.`;
      if (kind === undefined) return `${subject}.`;
      const value = KINDS[kind].measure(path.points);
      return KINDS[kind].tells(value, path.points) ? `${subject}: ${KINDS[kind].told(value, number(`weak${letter}`, value))}.` : `${subject}, though not from this start.`;
    };
    const told = (path, letter) => {
      const name = `<strong class="${letter.toLowerCase()}">${letter}</strong>, ${RULES[path.id].name},`;
      const far = ` over a path of length ${number(`way${letter}`, wayOf(path.points))}`;
      return path.updates <= MOST ? `${name} arrives after ${number(`updates${letter}`, path.updates)} updates${far}`
        : `${name} has not arrived after ${number(`updates${letter}`, MOST)} updates${far}`;
    };
    return `${told(one, "A")}; ${told(other, "B")}. ${weak(one, "A")}${a === b ? "" : ` ${weak(other, "B")}`}`;
  },
  draw(pen, { a, b, problem, paths }, block) {
    const { context, width, height, colours } = pen;
    const ground = scaledMap(pen, block, { left: 0, top: 0, width, height }, pen.core.problem(problem));
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
      for (const [letter, id] of a === b ? [["A", a]] : [["B", b], ["A", a]]) {
        const spot = spotOf(paths.find((path) => path.id === id));
        if (spot !== null) pointAt(context, `${letter} ${spot.mark}`, ground.at(spot.at), letter, { width, colours });
      }
      const start = ground.at(paths[0].points[0]);
      ring(context, start, colours, 10);
      label(context, "start", start[0], start[1] - 20, colours, { align: "center", weight: 600 });
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
      head: ["optimizer", "rate", "updates to arrive", "length of the path", "loss at the end", "times it turns back", "first step over last", `way after ${EARLY} updates`],
      rows: paths.map(({ id, lr, updates, points, loss, left }) => [
        RULES[id].name, lr ?? "recorded", updates <= MOST ? updates : `over ${MOST}`, wayOf(points), loss,
        ...["turns", "shrinks", "slow"].map((kind) => (left ? "" : KINDS[kind].measure(points))),
      ]),
    };
  },
};

/** Where a path shows its weakness, and what to write there; null where it does not. */
function spotOf({ id, points, left }) {
  const kind = KINDS[RULES[id].kind];
  if (left || kind === undefined || !kind.tells(kind.measure(points), points)) return null;
  return { at: points[kind.spot(points)], mark: kind.mark };
}

/** A text beside a point, with a line to it: that of A on the right, that of B on the left. */
function pointAt(context, text, [x, y], letter, { width, colours }) {
  const side = letter === "A" ? 1 : -1;
  const [dx, dy] = side > 0 ? [60, 10] : [-44, 30];
  const { colour } = styleOf(letter, colours);
  context.strokeStyle = colour;
  context.lineWidth = 1.5;
  context.beginPath();
  context.moveTo(x, y);
  context.lineTo(x + dx, y + dy);
  context.stroke();
  context.font = font(600);
  const long = context.measureText(text).width;
  const left = Math.max(6, Math.min(width - long - 6, side > 0 ? x + dx + 4 : x + dx - 4 - long));
  label(context, text, left, y + dy, colours, { weight: 600, colour });
}

function between([a, b], [c, d]) {
  return [c - a, d - b];
}

/** The length of the step that leads to a point. */
function stepOf(points, at) {
  return Math.hypot(...between(points[at - 1], points[at]));
}

/** Points at which a path turns by more than a right angle. */
function turnsOf(points) {
  const found = [];
  for (let k = 1; k < points.length - 1; k += 1) {
    const [[a, b], [c, d]] = [between(points[k - 1], points[k]), between(points[k], points[k + 1])];
    if (a * c + b * d < 0) found.push(k);
  }
  return found;
}

function wayOf(points) {
  return points.slice(1).reduce((sum, [x, y], k) => sum + Math.hypot(x - points[k][0], y - points[k][1]), 0);
}

function pathOf(run, start, least) {
  const curve = lossOf(run);
  const done = curve.find(({ loss }) => loss <= least + NEAR);
  const updates = done?.update ?? MOST + 1;
  const way = updatesOf(run).filter(({ update }) => update <= updates).map(({ to }) => to);
  const points = [start, ...way].filter(([x, y]) => Math.hypot(x, y) < 1e3);
  return { updates, points, loss: (done ?? curve.at(-1)).loss, left: points.length <= Math.min(updates, MOST) };
}

/** The recording that begins nearest. */
function recorded(problem, x, y, least) {
  const far = ({ points: [[a, b]] }) => Math.hypot(a - x, b - y);
  const { points, losses } = RECORDED[problem].reduce((one, other) => (far(other) < far(one) ? other : one));
  const at = losses.findIndex((loss) => loss <= least + NEAR);
  const end = at < 0 ? points.length - 1 : at;
  return { updates: at < 0 ? MOST + 1 : end, points: points.slice(0, end + 1), loss: losses[end], left: false };
}
