// Race: where the server is, where each worker believes it to be, and where each gradient came from.

import { colourOf, drawWorker, fit, make, plain, theme, ticks } from "../draw.js";
import { APPLIED, FIELD } from "../engine/journal.js";
import { partOf } from "./part.js";
import { Picture } from "./picture.js";
import { placesOf } from "./places.js";
import { SCALE, Surface } from "./surface.js";

/** Pushes whose lines are shown, and points of the path. */
const PUSHES = 48;
const PATH = 3000;
/** Pixels from a mark at which hovering means it. */
const NEAR = 11;

export class RaceView {
  constructor(root, app) {
    this.app = app;
    this.surface = new Surface(app.core);
    this.cursor = null;
    this.marks = [];
    this.picture = new Picture(root, {
      class: "figure tall",
      tabindex: "0",
      role: "application",
      "aria-label": "Plane of the problem",
      onclick: (event) => this.choose(event.offsetX, event.offsetY),
      onkeydown: (event) => this.key(event),
      onblur: () => {
        this.cursor = null;
        this.app.redraw();
      },
    }, (x, y) => this.tell(x, y));
    this.canvas = this.picture.canvas;
    this.caption = make("p", { class: "caption" });
    this.whole = make("button", { type: "button", id: "whole", onclick: () => app.showWhole(!app.state.whole) }, "Whole function");
    root.append(make("div", { class: "under" }, this.caption, this.whole));
  }

  get onPlane() {
    return this.problem.toy;
  }

  choose(left, top) {
    if (this.onPlane && top <= this.surface.height) this.start(this.surface.toPlane(left, top));
  }

  start([x, y]) {
    this.app.change({ x: rounded(x), y: rounded(y) });
  }

  /** What is at a point of the picture: a mark, or the height of the ground. */
  tell(left, top) {
    const far = ({ at }) => Math.hypot(at[0] - left, at[1] - top);
    const mark = this.marks.reduce((near, one) => (far(one) < Math.min(NEAR, near === null ? Infinity : far(near)) ? one : near), null);
    if (mark !== null) return mark.text();
    if (!this.onPlane || top > this.surface.height) return "";
    const [x, y] = this.surface.toPlane(left, top);
    return `x ${plain(x)}, y ${plain(y)}: height ${plain(this.heightAt(x, y))}`;
  }

  heightAt(x, y) {
    this.app.core.ask("gradient", this.problem.id, x, y);
    return this.app.core.numbers()[0];
  }

  key(event) {
    const move = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1] }[event.key];
    if (!this.onPlane) return;
    const { settings } = this.app;
    if (move !== undefined) {
      const [x, y] = this.cursor ?? [settings.x, settings.y];
      const step = (event.shiftKey ? 0.1 : 0.02) * (this.surface.x1 - this.surface.x0);
      this.cursor = [x + move[0] * step, y + move[1] * step];
      this.app.say(`start at ${plain(this.cursor[0])}, ${plain(this.cursor[1])}, height ${plain(this.heightAt(...this.cursor))}`);
      this.app.redraw();
      event.preventDefault();
    } else if (event.key === "Enter" && this.cursor !== null) {
      this.start(this.cursor);
      this.cursor = null;
      event.preventDefault();
    }
  }

  draw(journal) {
    this.problem = this.app.core.problem(journal.settings.problem);
    const colours = theme();
    const { context, width, height } = fit(this.canvas);
    this.whole.hidden = !this.onPlane;
    this.whole.setAttribute("aria-pressed", String(this.app.state.whole));
    if (this.onPlane) this.drawPlane(journal, context, width, height, colours);
    else this.drawVersions(journal, context, width, height, colours);
    this.picture.show();
  }

  /** The part of the plane that shows start, path, workers, and the minimum next to the start. */
  part(journal) {
    const { problem } = this;
    if (this.app.state.whole) return problem.view;
    const { state } = journal;
    const start = [this.app.settings.x, this.app.settings.y];
    const far = ([x, y]) => Math.hypot(x - start[0], y - start[1]);
    const goals = [...problem.minima].sort((a, b) => far(a) - far(b)).slice(0, 1);
    const path = journal.rows.slice(-PATH).map((row) => [row[FIELD.toX], row[FIELD.toY]]);
    return partOf(problem.view, [start, [state.x, state.y], ...goals, ...path, ...state.workers.map(({ x, y }) => [x, y])]);
  }

  drawPlane(journal, context, width, height, colours) {
    const { surface } = this;
    surface.prepare(this.problem, width, height - SCALE, colours, this.part(journal));
    context.save();
    context.beginPath();
    context.rect(0, 0, width, height - SCALE);
    context.clip();
    surface.draw(context, colours);
    this.drawPath(journal, context, colours);
    this.drawPushes(journal, context);
    const { state } = journal;
    const server = surface.toScreen(state.x, state.y);
    if (Number.isFinite(server[0] + server[1])) ring(context, ...server, colours);
    this.drawWorkers(state, server, context, colours);
    if (this.cursor !== null) cross(context, ...surface.toScreen(...this.cursor), colours);
    context.restore();
    surface.drawScale(context, colours, height - SCALE);
    this.describe(`Plane of the problem, ${surface.heights}. Click, or move with the arrow keys and press Enter, to choose the start.`);
    const outside = !surface.isInside(state.x, state.y) || !Number.isFinite(state.x);
    const where = state.diverged > 0 ? `Diverged at update ${plain(state.diverged)}.` : outside ? "The path has left the picture." : "";
    this.picture.lack(where);
    this.caption.textContent =
      `f = ${formulaOf(this.problem)}. Ring: the server. Marks: workers at their stale values, beside the ring when they have the server's. ` +
      `Lines: from a push to where its gradient was computed. ×: a minimum. ${where}`;
  }

  describe(text) {
    if (this.canvas.getAttribute("aria-label") !== text) this.canvas.setAttribute("aria-label", text);
  }

  /** Workers at one point are drawn around it, each with a line to where it is. */
  drawWorkers(state, server, context, colours) {
    const own = state.workers.map(({ x, y }) => this.surface.toScreen(x, y));
    const behind = (worker) => Math.max(0, state.version - worker.version);
    this.marks = [{ at: server, text: () => `server: x ${plain(state.x)}, y ${plain(state.y)}, loss ${plain(state.loss)}, update ${plain(state.updates)}` }];
    placesOf(server, own).forEach((place, k) => {
      if (place === null) return;
      const worker = state.workers[k];
      if (place.moved) {
        context.beginPath();
        context.moveTo(...place.own);
        context.lineTo(...place.at);
        context.strokeStyle = colours.ink;
        context.lineWidth = 1;
        context.stroke();
      }
      drawWorker(context, worker.index, ...place.at, 6, colours, worker.phase === "gone" || worker.phase === "paused");
      this.marks.unshift({ at: place.at, text: () => `worker ${worker.index} ${worker.phase}: x ${plain(worker.x)}, y ${plain(worker.y)}, ${plain(behind(worker))} updates behind` });
    });
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
    this.picture.lack("");
    this.marks = [];
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
      this.marks.push({ at: [x(behind[k]), y], text: () => `worker ${worker.index} ${worker.phase}: ${plain(behind[k])} updates behind` });
    });
    context.beginPath();
    context.moveTo(x(0), 14);
    context.lineTo(x(0), height - 26);
    context.strokeStyle = colours.ink;
    context.lineWidth = 2.5;
    context.stroke();
    this.describe("How many updates each worker is behind the server; the table has the numbers.");
    if (state.updates === 0) this.picture.lack("All workers have the server's values: press Play or Step to see them fall behind.");
    this.caption.textContent =
      "The net has 2,410 parameters and no plane to be shown in: the thick line is the server, and each worker is as far behind it as " +
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

/** With raised powers and minus signs. */
function formulaOf({ formula }) {
  return formula.replace(/\^(\d)/g, (_, power) => "⁰¹²³⁴⁵⁶⁷⁸⁹"[power]).replaceAll("-", "−");
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
