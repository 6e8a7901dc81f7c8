// Race: where the server is, where each worker believes it to be, and where each gradient came from.

import { colourOf, drawWorker, fit, make, plain, theme, ticks } from "../draw.js";
import { APPLIED, FIELD } from "../engine/journal.js";
import { Surface } from "./surface.js";

/** Pushes whose lines are shown, and points of the path. */
const PUSHES = 48;
const PATH = 3000;

export class RaceView {
  constructor(root, app) {
    this.app = app;
    this.surface = new Surface(app.core);
    this.cursor = null;
    this.canvas = make("canvas", {
      class: "figure tall",
      tabindex: "0",
      role: "application",
      "aria-label": "Plane of the problem. Click, or move with the arrow keys and press Enter, to choose the start.",
      onclick: (event) => this.choose(this.surface.toPlane(event.offsetX, event.offsetY)),
      onkeydown: (event) => this.key(event),
      onblur: () => {
        this.cursor = null;
        this.app.redraw();
      },
    });
    this.caption = make("p", { class: "caption" });
    root.append(this.canvas, this.caption);
  }

  get onPlane() {
    return this.problem.toy;
  }

  choose([x, y]) {
    if (!this.onPlane) return;
    this.app.change({ x: rounded(x), y: rounded(y) });
  }

  key(event) {
    const move = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1] }[event.key];
    if (!this.onPlane) return;
    const { settings } = this.app;
    if (move !== undefined) {
      const [x, y] = this.cursor ?? [settings.x, settings.y];
      const step = (event.shiftKey ? 0.1 : 0.02) * (this.surface.x1 - this.surface.x0);
      this.cursor = [x + move[0] * step, y + move[1] * step];
      this.app.say(`start at ${plain(this.cursor[0])}, ${plain(this.cursor[1])}`);
      this.app.redraw();
      event.preventDefault();
    } else if (event.key === "Enter" && this.cursor !== null) {
      this.choose(this.cursor);
      this.cursor = null;
      event.preventDefault();
    }
  }

  draw(journal) {
    this.problem = this.app.core.problem(journal.settings.problem);
    const colours = theme();
    const { context, width, height } = fit(this.canvas);
    if (this.onPlane) this.drawPlane(journal, context, width, height, colours);
    else this.drawVersions(journal, context, width, height, colours);
  }

  drawPlane(journal, context, width, height, colours) {
    const { surface } = this;
    surface.prepare(this.problem, width, height, colours);
    surface.draw(context, colours);
    this.drawPath(journal, context, colours);
    this.drawPushes(journal, context);
    const { state } = journal;
    const [left, top] = surface.toScreen(state.x, state.y);
    for (const worker of state.workers) {
      const [x, y] = surface.toScreen(worker.x, worker.y);
      if (Number.isFinite(x + y)) drawWorker(context, worker.index, x, y, 6, colours, worker.phase === "gone" || worker.phase === "paused");
    }
    if (Number.isFinite(left + top)) ring(context, left, top, colours);
    if (this.cursor !== null) cross(context, ...surface.toScreen(...this.cursor), colours);
    const outside = !surface.isInside(state.x, state.y) || !Number.isFinite(state.x);
    const where = state.diverged > 0 ? `Diverged at update ${plain(state.diverged)}.` : outside ? "The path has left the picture." : "";
    this.caption.textContent =
      `${this.problem.formula}. The ring is the server, a mark is a worker at its stale values, a line goes from a push to ` +
      `where its gradient was computed; × marks a minimum. ${where}`;
  }

  drawPath(journal, context, colours) {
    const { surface } = this;
    const rows = journal.rows.slice(-PATH);
    context.save();
    context.lineJoin = "round";
    for (const [colour, widthOfLine] of [[colours.paper, 4], [colours.ink, 1.75]]) {
      context.beginPath();
      const [x, y] = surface.toScreen(this.app.settings.x, this.app.settings.y);
      if (rows.length < PATH) context.moveTo(x, y);
      for (const row of rows) {
        const [left, top] = surface.toScreen(row[FIELD.toX], row[FIELD.toY]);
        if (Math.abs(left) + Math.abs(top) < 1e5) context.lineTo(left, top);
      }
      context.strokeStyle = colour;
      context.lineWidth = widthOfLine;
      context.stroke();
    }
    context.restore();
  }

  drawPushes(journal, context) {
    const rows = journal.rows.slice(-PUSHES);
    context.save();
    context.lineWidth = 1.5;
    rows.forEach((row, k) => {
      if (row[FIELD.status] !== APPLIED) return;
      const from = this.surface.toScreen(row[FIELD.toX], row[FIELD.toY]);
      const to = this.surface.toScreen(row[FIELD.atX], row[FIELD.atY]);
      if (!Number.isFinite(from[0] + to[0] + from[1] + to[1])) return;
      context.globalAlpha = 0.15 + (0.75 * (k + 1)) / rows.length;
      context.strokeStyle = colourOf(row[FIELD.worker]);
      context.beginPath();
      context.moveTo(...from);
      context.lineTo(...to);
      context.stroke();
    });
    context.restore();
  }

  /** Where there is no plane, distance counts in updates. */
  drawVersions(journal, context, width, height, colours) {
    const { state } = journal;
    const [left, right] = [44, width - 40];
    const behind = state.workers.map((worker) => Math.max(0, state.version - worker.version));
    const most = Math.max(8, ...behind) * 1.1;
    const x = (updates) => right - (updates / most) * (right - left);
    context.strokeStyle = colours.line;
    context.fillStyle = colours.soft;
    context.textAlign = "center";
    for (const tick of ticks(0, most, width / 90)) {
      context.beginPath();
      context.moveTo(x(tick), 14);
      context.lineTo(x(tick), height - 26);
      context.stroke();
      context.fillText(tick === 0 ? "now" : `${tick} behind`, x(tick), height - 12);
    }
    const row = (height - 44) / Math.max(1, state.workers.length);
    state.workers.forEach((worker, k) => {
      const y = 16 + row * (k + 0.5);
      context.strokeStyle = colourOf(worker.index);
      context.lineWidth = 2;
      context.beginPath();
      context.moveTo(x(0), y);
      context.lineTo(x(behind[k]), y);
      context.stroke();
      drawWorker(context, worker.index, x(behind[k]), y, Math.min(6, row / 3), colours, worker.phase === "gone");
    });
    ring(context, x(0), height / 2, colours);
    this.caption.textContent =
      "The net has 2,410 parameters and no plane to be shown in: the ring is the server, and each worker is as far behind it as " +
      `there were updates since its values were pulled. Loss ${plain(state.loss)}` +
      `${Number.isFinite(state.error) ? `, test error ${plain(state.error)} %` : ""}.` +
      `${state.diverged > 0 ? ` Diverged at update ${plain(state.diverged)}.` : ""}`;
  }

  table(journal) {
    const { state } = journal;
    const at = (x, y) => (Number.isFinite(x) ? `${x}, ${y}` : "–");
    const rows = state.workers.map((worker) => [
      `worker ${worker.index}`, at(worker.x, worker.y), worker.version, Math.max(0, state.version - worker.version), worker.phase,
    ]);
    return { head: ["", "x, y", "version", "updates behind", "state"], rows: [["server", at(state.x, state.y), state.version, 0, ""], ...rows] };
  }
}

function rounded(value) {
  return Number(value.toPrecision(3));
}

function ring(context, x, y, colours) {
  for (const [colour, width] of [[colours.paper, 6], [colours.ink, 2.5]]) {
    context.beginPath();
    context.arc(x, y, 11, 0, 7);
    context.strokeStyle = colour;
    context.lineWidth = width;
    context.stroke();
  }
}

function cross(context, x, y, colours) {
  context.beginPath();
  for (const [dx, dy] of [[14, 0], [0, 14]]) {
    context.moveTo(x - dx, y - dy);
    context.lineTo(x + dx, y + dy);
  }
  context.strokeStyle = colours.accent;
  context.lineWidth = 3;
  context.stroke();
}
