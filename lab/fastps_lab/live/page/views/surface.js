// The ground of a race: heights of a function as bands, its minima, and the plane's coordinates.

import { ticks } from "../draw.js";

const BANDS = 18;

/** Maps the plane of a problem to a box of the screen. */
export class Surface {
  constructor(core) {
    this.core = core;
    this.key = "";
    this.image = document.createElement("canvas");
  }

  /** Chooses problem and box; the picture of the ground is kept while they stay. */
  prepare(problem, width, height, colours) {
    this.problem = problem;
    this.width = width;
    this.height = height;
    const [x0, x1, y0, y1] = problem.view;
    Object.assign(this, { x0, x1, y0, y1 });
    const key = [problem.id, width, height, colours.low, colours.high].join();
    if (key === this.key || width < 8 || height < 8) return;
    this.key = key;
    this.paint(colours);
  }

  toScreen(x, y) {
    return [((x - this.x0) / (this.x1 - this.x0)) * this.width, ((this.y1 - y) / (this.y1 - this.y0)) * this.height];
  }

  toPlane(left, top) {
    return [this.x0 + (left / this.width) * (this.x1 - this.x0), this.y1 - (top / this.height) * (this.y1 - this.y0)];
  }

  isInside(x, y) {
    return x >= this.x0 && x <= this.x1 && y >= this.y0 && y <= this.y1;
  }

  paint(colours) {
    const scale = Math.min(2, window.devicePixelRatio || 1);
    const columns = Math.round(this.width * scale);
    const rows = Math.round(this.height * scale);
    const heights = this.core.contours(this.problem.id, this.problem.view, columns, rows);
    // Low ground has as many bands as high ground: heights count by their logarithm above the least.
    let least = Infinity;
    for (const height of heights) least = Math.min(least, height);
    const levels = heights.map((height) => Math.log1p((height - least) * 4));
    let most = 0;
    for (const level of levels) most = Math.max(most, level);
    const shades = Array.from({ length: BANDS }, (_, k) => mix(colours.low, colours.high, k / (BANDS - 1)));
    const edge = mix(colours.low, colours.high, 0.5).map((part, k) => (part + rgb(colours.line)[k]) / 2);
    const image = new ImageData(columns, rows);
    const band = new Uint8Array(columns * rows);
    for (let k = 0; k < levels.length; k += 1) band[k] = Math.min(BANDS - 1, Math.floor((levels[k] / most) * BANDS));
    for (let row = 0; row < rows; row += 1) {
      const from = (rows - 1 - row) * columns;
      for (let column = 0; column < columns; column += 1) {
        const at = from + column;
        const border = (column + 1 < columns && band[at + 1] !== band[at]) || (at >= columns && band[at - columns] !== band[at]);
        const colour = border ? edge : shades[band[at]];
        const to = 4 * (row * columns + column);
        image.data[to] = colour[0];
        image.data[to + 1] = colour[1];
        image.data[to + 2] = colour[2];
        image.data[to + 3] = 255;
      }
    }
    this.image.width = columns;
    this.image.height = rows;
    this.image.getContext("2d").putImageData(image, 0, 0);
  }

  draw(context, colours) {
    context.drawImage(this.image, 0, 0, this.width, this.height);
    for (const [x, y] of this.problem.minima) this.drawGoal(context, x, y, colours);
    context.fillStyle = colours.soft;
    context.textAlign = "center";
    for (const x of ticks(this.x0, this.x1, this.width / 90)) {
      const [left] = this.toScreen(x, 0);
      if (left > 12 && left < this.width - 12) context.fillText(String(x), left, this.height - 9);
    }
    context.textAlign = "left";
    for (const y of ticks(this.y0, this.y1, this.height / 70)) {
      const [, top] = this.toScreen(0, y);
      if (top > 12 && top < this.height - 22) context.fillText(String(y), 5, top);
    }
  }

  drawGoal(context, x, y, colours) {
    const [left, top] = this.toScreen(x, y);
    context.strokeStyle = colours.ink;
    context.lineWidth = 1.5;
    context.beginPath();
    for (const [dx, dy] of [[6, 6], [6, -6]]) {
      context.moveTo(left - dx, top - dy);
      context.lineTo(left + dx, top + dy);
    }
    context.stroke();
  }
}

function rgb(colour) {
  return [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
}

function mix(from, to, share) {
  const a = rgb(from);
  return rgb(to).map((part, k) => Math.round(a[k] + (part - a[k]) * share));
}
