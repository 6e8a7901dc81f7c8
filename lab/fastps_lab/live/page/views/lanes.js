// Lanes: what each worker does over time.

import { drawWorker, fit, make, plain, theme, ticks } from "../draw.js";
import { FIELD, presenceOf } from "../engine/journal.js";
import { Picture } from "./picture.js";

const PHASES = [
  ["compute", "computes", FIELD.began, FIELD.pushed],
  ["push", "pushes", FIELD.pushed, FIELD.arrived],
  ["wait", "waits for others", FIELD.arrived, FIELD.ended],
  ["pull", "pulls", FIELD.pulled, FIELD.began],
];
const VERBS = new Map(PHASES.map(([name, text]) => [name, text]));
const OF_STATE = { computes: "compute", pushes: "push", waits: "wait", pulls: "pull" };

export class LanesView {
  constructor(root, app) {
    this.app = app;
    this.boxes = [];
    const about = { class: "figure tall", role: "img", "aria-label": "What each worker does over time; the table has the numbers." };
    this.picture = new Picture(root, about, (x, y) => this.boxes.findLast((box) => x >= box.left && x <= box.right && y >= box.top && y <= box.bottom)?.text() ?? "");
    this.canvas = this.picture.canvas;
    const legend = make("p", { class: "legend" });
    for (const [name, text] of PHASES) legend.append(make("span", { class: `swatch ${name}` }), text);
    this.caption = make("p", { class: "caption" });
    root.append(legend, this.caption);
  }

  draw(journal) {
    const colours = theme();
    const { context, width, height } = fit(this.canvas);
    const { state } = journal;
    const narrow = width < 520;
    const [left, right] = [34, width - (narrow ? 58 : 150)];
    const mean = meanDuration(journal);
    const span = Math.max(mean * (narrow ? 8 : 14), 1e-9);
    const [from, to] = [Math.max(0, state.time - span), Math.max(span, state.time)];
    const x = (time) => left + ((Math.max(from, Math.min(to, time)) - from) / (to - from)) * (right - left);
    this.axis(context, from, to, x, height, colours);
    const row = (height - 42) / Math.max(1, state.workers.length);
    const thick = Math.min(22, row * 0.66);
    const patterns = this.patternsOf(context, colours);
    this.boxes = [];
    const recent = new Map(state.workers.map((worker) => [worker.index, []]));
    for (const one of journal.since(from)) recent.get(one[FIELD.worker])?.push(one);
    state.workers.forEach((worker, k) => {
      const y = 8 + row * (k + 0.5);
      const bar = (name, begin, end) => {
        if (!(end > from) || !(end > begin)) return;
        context.fillStyle = patterns[name];
        context.fillRect(x(begin), y - thick / 2, Math.max(1, x(end) - x(begin)), thick);
        const text = () => `worker ${worker.index} ${VERBS.get(name)} from ${plain(begin)} to ${end === state.time ? "now" : `${plain(end)} s`}`;
        this.boxes.push({ left: x(begin), right: x(end), top: y - row / 2, bottom: y + row / 2, text });
      };
      context.fillStyle = colours.line;
      context.fillRect(left, y - 0.5, right - left, 1);
      for (const one of recent.get(worker.index)) {
        for (const [name, , begin, end] of PHASES) bar(name, one[begin], one[end]);
        // Without a delay a push takes no time: a notch shows it all the same.
        context.fillStyle = colours.ink;
        if (one[FIELD.pushed] >= from) context.fillRect(x(one[FIELD.pushed]) - 0.75, y - thick / 2 - 2, 1.5, thick + 4);
      }
      if (worker.phase in OF_STATE) bar(OF_STATE[worker.phase], worker.since, state.time);
      drawWorker(context, worker.index, 16, y, Math.min(6, row / 3), colours, worker.phase === "gone");
      const { share, rate } = numbersOf(worker, state);
      context.fillStyle = colours.ink;
      context.textAlign = "left";
      const gone = worker.phase === "gone" || worker.phase === "paused" ? worker.phase : "";
      const text = narrow ? `${Math.round(100 * share)} %` : `${plain(rate, 2)}/s · waits ${Math.round(100 * share)} %`;
      if (row > 9) context.fillText(gone || text, right + 8, y);
    });
    this.caption.textContent =
      `${plain(state.time > 0 ? state.updates / state.time : 0)} updates per ${this.app.isReal ? "second" : "virtual second"}; ` +
      `the workers wait for ${Math.round(100 * state.waiting)} % of their time.`;
    this.picture.lack(state.time > 0 ? "" : "No time has passed: press Play or Step to see the workers compute.");
    this.picture.show();
  }

  /** They stay while the colours do. */
  patternsOf(context, colours) {
    const key = [colours.paper, colours.compute].join();
    if (key !== this.key) this.patterns = patternsOf(context, colours);
    this.key = key;
    return this.patterns;
  }

  axis(context, from, to, x, height, colours) {
    context.fillStyle = colours.soft;
    context.textAlign = "center";
    for (const tick of ticks(from, to, 6)) {
      context.fillRect(x(tick), 6, 0.5, height - 34);
      context.fillText(`${tick} s`, x(tick), height - 14);
    }
  }

  table(journal) {
    const rows = journal.state.workers.map((worker) => {
      const { share, rate } = numbersOf(worker, journal.state);
      return [`worker ${worker.index}`, worker.phase, worker.step, worker.applied, plain(rate), `${(100 * share).toFixed(1)} %`, worker.pid ?? ""];
    });
    return { head: ["", "state", "step", "applied", "applied/s", "waiting", this.app.isReal ? "process" : ""], rows };
  }
}

function numbersOf(worker, state) {
  const present = Math.max(presenceOf(worker, state.time), 1e-9);
  return { share: Math.min(1, worker.waited / present), rate: worker.applied / present };
}

function meanDuration(journal) {
  const rows = journal.rows.slice(-200);
  if (rows.length === 0) return 1;
  return rows.reduce((sum, row) => sum + row[FIELD.ended] - row[FIELD.pulled], 0) / rows.length;
}

/** Phases differ by pattern, too. */
function patternsOf(context, colours) {
  const hatch = (colour, lines) => {
    const tile = document.createElement("canvas");
    tile.width = tile.height = 8;
    const c = tile.getContext("2d");
    c.fillStyle = colours.paper;
    c.fillRect(0, 0, 8, 8);
    c.strokeStyle = colour;
    c.lineWidth = 3;
    for (const [x0, y0, x1, y1] of lines) {
      c.beginPath();
      c.moveTo(x0, y0);
      c.lineTo(x1, y1);
      c.stroke();
    }
    return context.createPattern(tile, "repeat");
  };
  return {
    compute: colours.compute,
    push: colours.push,
    wait: hatch(colours.wait, [[-2, 2, 2, -2], [-2, 10, 10, -2], [6, 10, 10, 6]]),
    pull: hatch(colours.pull, [[0, 4, 8, 4]]),
  };
}
