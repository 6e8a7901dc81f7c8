// What the figures share: curves of runs A and B, lanes of workers, a map with paths. A run is told by its
// letter, its line and its mark, not by colour alone.

import { plain, ticks } from "../draw.js";
import { SCALE, Surface } from "../views/surface.js";
import { font } from "./frame.js";

/** How a run looks: A is solid with discs, B is dashed with squares, C, a reference, is dotted. */
export function styleOf(letter, colours) {
  return {
    A: { colour: colours.a, dash: [], mark: disc },
    B: { colour: colours.b, dash: [7, 4], mark: square },
    C: { colour: colours.soft, dash: [2, 4], mark: () => {} },
  }[letter];
}

function disc(context, x, y, r) {
  context.arc(x, y, r, 0, 7);
}

function square(context, x, y, r) {
  context.rect(x - r * 0.9, y - r * 0.9, r * 1.8, r * 1.8);
}

export function mark(context, letter, x, y, r, colours) {
  const style = styleOf(letter, colours);
  context.beginPath();
  style.mark(context, x, y, r);
  context.fillStyle = style.colour;
  context.fill();
  context.strokeStyle = colours.paper;
  context.lineWidth = 1.5;
  context.stroke();
}

/** Text with a halo of the paper, so that lines behind it do not hurt it. */
export function label(context, text, x, y, colours, { align = "left", colour = colours.ink, weight = 400, size = 13 } = {}) {
  context.font = font(weight, size);
  context.textAlign = align;
  context.lineWidth = 4;
  context.strokeStyle = colours.paper;
  context.strokeText(text, x, y);
  context.fillStyle = colour;
  context.fillText(text, x, y);
}

/** A line in a run's style. */
export function line(context, points, letter, colours, width = 2.25, halo = true) {
  const style = styleOf(letter, colours);
  for (const [colour, thick, dash] of [[colours.paper, width + 2.5, []], [style.colour, width, style.dash]].slice(halo ? 0 : 1)) {
    context.beginPath();
    points.forEach(([x, y], k) => (k === 0 ? context.moveTo(x, y) : context.lineTo(x, y)));
    context.strokeStyle = colour;
    context.lineWidth = thick;
    context.setLineDash(dash);
    context.stroke();
    context.setLineDash([]);
  }
}

/** An arrow from one point to another. */
export function arrow(context, from, to, colour, width = 2.5) {
  const [dx, dy] = [to[0] - from[0], to[1] - from[1]];
  const length = Math.hypot(dx, dy);
  if (!(length > 1)) return;
  const size = Math.min(10, length * 0.6);
  const [ux, uy] = [dx / length, dy / length];
  const foot = [to[0] - ux * size, to[1] - uy * size];
  context.strokeStyle = context.fillStyle = colour;
  context.lineWidth = width;
  context.beginPath();
  context.moveTo(...from);
  context.lineTo(...foot);
  context.stroke();
  context.setLineDash([]);
  context.beginPath();
  context.moveTo(...to);
  context.lineTo(foot[0] - uy * size * 0.5, foot[1] + ux * size * 0.5);
  context.lineTo(foot[0] + uy * size * 0.5, foot[1] - ux * size * 0.5);
  context.closePath();
  context.fill();
}

/**
 * Curves over axes.
 *
 * @param box left, top, width, height of the whole plot
 * @param x, y label, least, most; y may be logarithmic
 * @param series letter, name, points, and a band of [x, least, most]
 */
export function curves({ context, colours }, box, { x, y, series, events = [] }) {
  const names = series.map(({ letter, name }) => (letter === "C" ? name : `${letter}  ${name}`));
  context.font = font(600);
  const wide = box.width >= 520;
  const room = wide ? Math.max(...names.map((name) => context.measureText(name).width)) + 18 : 12;
  const [left, right, top, bottom] = [box.left + 52, box.left + box.width - room, box.top + (wide ? 26 : 26 + 20 * names.length), box.top + box.height - 42];
  const height = y.log ? Math.log10 : (value) => value;
  const low = height(y.least);
  const px = (value) => left + ((value - x.least) / (x.most - x.least)) * (right - left);
  const py = (value) => bottom - ((height(Math.min(y.most, Math.max(y.least, value))) - low) / (height(y.most) - low)) * (bottom - top);
  const down = y.log ? powers(y.least, y.most) : ticks(y.least, y.most, (bottom - top) / 48);
  for (const value of down) {
    context.strokeStyle = colours.line;
    context.lineWidth = 1;
    context.beginPath();
    context.moveTo(left, Math.round(py(value)) + 0.5);
    context.lineTo(right, Math.round(py(value)) + 0.5);
    context.stroke();
    label(context, plain(value), left - 8, py(value), colours, { align: "right", colour: colours.soft });
  }
  for (const value of ticks(x.least, x.most, (right - left) / 76)) {
    label(context, plain(value), px(value), bottom + 14, colours, { align: "center", colour: colours.soft });
  }
  label(context, x.label, (left + right) / 2, bottom + 33, colours, { align: "center", colour: colours.soft });
  label(context, y.label, box.left + 4, box.top + 9, colours, { colour: colours.soft });
  events.forEach(({ at, text }, k) => {
    context.strokeStyle = colours.ink;
    context.lineWidth = 1.5;
    context.setLineDash([3, 3]);
    context.beginPath();
    context.moveTo(px(at), top);
    context.lineTo(px(at), bottom);
    context.stroke();
    context.setLineDash([]);
    context.font = font(600);
    const late = px(at) + context.measureText(text).width + 8 > right;
    label(context, text, px(at) + (late ? -5 : 5), bottom - 14 - 18 * k, colours, { align: late ? "right" : "left", weight: 600 });
  });
  context.save();
  context.beginPath();
  context.rect(left - 6, top - 6, right - left + 12, bottom - top + 12);
  context.clip();
  for (const { letter, band } of series) {
    if (band === undefined) continue;
    context.beginPath();
    band.forEach(([at, least], k) => (k === 0 ? context.moveTo(px(at), py(least)) : context.lineTo(px(at), py(least))));
    [...band].reverse().forEach(([at, , most]) => context.lineTo(px(at), py(most)));
    context.fillStyle = styleOf(letter, colours).colour;
    context.globalAlpha = 0.22;
    context.fill();
    context.globalAlpha = 1;
  }
  const shown = series.map(({ points }) => points.filter((point) => Number.isFinite(point[1])).map(([a, b]) => [px(a), py(b)]));
  series.forEach(({ letter }, k) => line(context, shown[k], letter, colours, 2.25, false));
  series.forEach(({ letter }, k) => {
    let next = left + 30 + 22 * k;
    for (const [at, up] of shown[k]) {
      if (at < next) continue;
      mark(context, letter, at, up, 4.5, colours);
      next = at + 64;
    }
  });
  context.restore();
  const ends = shown.map((points, k) => ({ k, y: points.at(-1)?.[1] ?? bottom })).sort((a, b) => a.y - b.y);
  if (wide) {
    for (let k = 1; k < ends.length; k += 1) ends[k].y = Math.max(ends[k].y, ends[k - 1].y + 18);
    const over = Math.max(0, ends.at(-1).y - bottom);
    for (const end of ends) end.y -= over;
  } else {
    ends.sort((a, b) => a.k - b.k).forEach((end, k) => { end.y = box.top + 30 + 20 * k; });
  }
  for (const end of ends) {
    const { letter } = series[end.k];
    const at = wide ? right + 10 : left + 30;
    if (!wide) {
      line(context, [[left, end.y], [left + 22, end.y]], letter, colours);
      mark(context, letter, left + 11, end.y, 4.5, colours);
    }
    label(context, names[end.k], at, end.y, colours, { weight: 600, colour: styleOf(letter, colours).colour });
  }
}

function powers(least, most) {
  const found = [];
  for (let power = Math.ceil(Math.log10(least) - 1e-9); power <= Math.log10(most) + 1e-9; power += 1) found.push(Number((10 ** power).toPrecision(3)));
  const every = Math.ceil(found.length / 6);
  return found.filter((_, k) => k % every === 0);
}

/** The least and most of curves on a logarithmic axis, rounded to powers of ten. */
export function decades(series, lowest = 1e-12, highest = 1e4) {
  const all = series.flatMap(({ points }) => points.map((point) => point[1])).filter((one) => Number.isFinite(one) && one > 0);
  const least = Math.max(lowest, Math.min(...all, 1));
  const most = Math.min(highest, Math.max(...all, least * 10));
  return { least: 10 ** Math.floor(Math.log10(least)), most: 10 ** Math.ceil(Math.log10(most)) };
}

/** What each worker of a run does: it computes (filled) or waits (hatched); a cross ends one that is killed. */
export function lanes({ context, colours }, box, { letter, name, workers, bars, until, axis = false, gone = new Map() }) {
  const [left, right, top] = [box.left + 30, box.left + box.width - 12, box.top + 24];
  const row = (box.height - 24 - (axis ? 34 : 0)) / workers;
  const px = (time) => left + (Math.min(time, until) / until) * (right - left);
  const style = styleOf(letter, colours);
  mark(context, letter, box.left + 8, box.top + 10, 6, colours);
  label(context, `${letter}  ${name}`, box.left + 20, box.top + 10, colours, { weight: 600, colour: style.colour });
  for (const { worker, from, to, waits } of bars) {
    if (from >= until) continue;
    const [x, y, width, height] = [px(from), top + row * worker + 1.5, Math.max(1, px(to) - px(from) - 1), Math.max(2, row - 3)];
    if (waits) hatch(context, x, y, width, height, colours.soft);
    else {
      context.fillStyle = style.colour;
      context.fillRect(x, y, width, height);
    }
  }
  for (let worker = 0; worker < workers; worker += 1) {
    if (row >= 13 || worker === 0 || worker === workers - 1) label(context, String(worker + 1), left - 8, top + row * (worker + 0.5), colours, { align: "right", colour: colours.soft });
    if (!gone.has(worker)) continue;
    const [x, y, r] = [px(gone.get(worker)), top + row * (worker + 0.5), 6];
    context.strokeStyle = colours.ink;
    context.lineWidth = 2.5;
    context.beginPath();
    for (const way of [1, -1]) {
      context.moveTo(x - r, y - r * way);
      context.lineTo(x + r, y + r * way);
    }
    context.stroke();
  }
  if (!axis) return;
  const bottom = top + row * workers;
  for (const value of ticks(0, until, (right - left) / 80)) {
    label(context, `${plain(value)} s`, px(value), bottom + 13, colours, { align: value === until ? "right" : "center", colour: colours.soft });
  }
}

function hatch(context, x, y, width, height, colour) {
  context.save();
  context.beginPath();
  context.rect(x, y, width, height);
  context.clip();
  context.strokeStyle = colour;
  context.lineWidth = 1;
  context.beginPath();
  for (let at = x - height; at < x + width; at += 6) {
    context.moveTo(at, y + height);
    context.lineTo(at + height, y);
  }
  context.stroke();
  context.strokeRect(x + 0.5, y + 0.5, width - 1, height - 1);
  context.restore();
}

const grounds = new WeakMap();

/** The heights of a problem in a box, with their scale in its foot; returns how points of the plane lie in it. */
export function scaledMap(pen, block, { left, top, width, height }, problem) {
  const ground = map(pen, block, { left, top, width, height: height - SCALE }, problem);
  const { context, colours } = pen;
  context.save();
  context.translate(left, 0);
  context.font = font(400, 12);
  grounds.get(block).drawScale(context, colours, top + height - SCALE);
  context.restore();
  return ground;
}

/** The heights of a problem, or of a part of it, in a box; returns how points of the plane lie in it. */
export function map({ context, colours, core }, block, box, problem, part = problem.view) {
  if (!grounds.has(block)) grounds.set(block, new Surface(core));
  const surface = grounds.get(block);
  surface.prepare(problem, box.width, box.height, colours, part);
  context.save();
  context.beginPath();
  context.roundRect(box.left, box.top, box.width, box.height, 6);
  context.clip();
  context.translate(box.left, box.top);
  context.font = font(400, 12);
  surface.draw(context, colours);
  context.restore();
  return {
    at: ([x, y]) => {
      const [left, top] = surface.toScreen(x, y);
      return [left + box.left, top + box.top];
    },
    toPlane: (left, top) => surface.toPlane(left - box.left, top - box.top),
    clip(draw) {
      context.save();
      context.beginPath();
      context.rect(box.left, box.top, box.width, box.height);
      context.clip();
      draw();
      context.restore();
    },
  };
}

/** The server: a ring. */
export function ring(context, [x, y], colours, r = 9) {
  for (const [colour, width] of [[colours.paper, 6], [colours.ink, 2.5]]) {
    context.beginPath();
    context.arc(x, y, r, 0, 7);
    context.strokeStyle = colour;
    context.lineWidth = width;
    context.stroke();
  }
}
