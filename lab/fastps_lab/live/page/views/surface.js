// The ground of a race: heights of a function as bands of colour, their scale, its minima, and the plane's coordinates.

import { plain, ticks } from "../draw.js";

const BANDS = 18;
/** Pixels below a plane that its scale of heights takes. */
export const SCALE = 40;

/** Maps the plane of a problem to a box of the screen. */
export class Surface {
  constructor(core) {
    this.core = core;
    this.key = "";
    this.image = document.createElement("canvas");
  }

  /** Chooses problem, size and part of the plane; the picture of the ground is kept while they stay. */
  prepare(problem, width, height, colours, part = problem.view) {
    this.problem = problem;
    this.width = width;
    this.height = height;
    const [x0, x1, y0, y1] = part;
    Object.assign(this, { x0, x1, y0, y1 });
    const key = [problem.id, width, height, ...part, colours.low, colours.high].join();
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

  /** Heights are asked for at every second pixel, and lie on a plane in between. */
  paint(colours) {
    const scale = Math.min(2, window.devicePixelRatio || 1);
    const columns = Math.round(this.width * scale);
    const rows = Math.round(this.height * scale);
    const across = Math.ceil(columns / 2) + 1;
    const down = Math.ceil(rows / 2) + 1;
    const { x0, y1 } = this;
    const x1 = x0 + ((this.x1 - x0) * 2 * (across - 1)) / (columns - 1);
    const y0 = y1 - ((y1 - this.y0) * 2 * (down - 1)) / (rows - 1);
    const heights = this.core.contours(this.problem.id, [x0, x1, y0, y1], across, down);
    const bands = this.bandsOf(heights, across, down, columns, rows);
    const shades = shadesOf(colours);
    const edges = shades.map((shade) => shade.map((part, k) => Math.round(part * 0.8 + rgb(colours.soft)[k] * 0.2)));
    const [inside, border] = [shades, edges].map((all) => Uint32Array.from(all, packed));
    const image = new ImageData(columns, rows);
    const pixels = new Uint32Array(image.data.buffer);
    for (let at = 0; at < pixels.length; at += 1) {
      const band = bands[at];
      pixels[at] = (bands[at + 1] === band && (at + columns >= bands.length || bands[at + columns] === band) ? inside : border)[band];
    }
    this.image.width = columns;
    this.image.height = rows;
    this.image.getContext("2d").putImageData(image, 0, 0);
  }

  /** The band of each pixel. Low ground has as many bands as high ground: heights count by their logarithm above the least. */
  bandsOf(heights, across, down, columns, rows) {
    let [least, most] = [Infinity, -Infinity];
    for (const height of heights) {
      if (height < least) least = height;
      if (height > most) most = height;
    }
    const levels = Math.log1p((most - least) * 4);
    const borders = Array.from({ length: BANDS + 1 }, (_, k) => least + Math.expm1((levels * k) / BANDS) / 4);
    this.borders = borders;
    const bands = new Uint8Array(columns * rows);
    const line = new Float64Array(across);
    let [band, at] = [0, 0];
    for (let row = 0; row < rows; row += 1) {
      const low = (down - 1 - (row >> 1)) * across; // rows of heights go up
      const next = row % 2 === 0 ? low : low - across;
      for (let k = 0; k < across; k += 1) line[k] = (heights[low + k] + heights[next + k]) / 2;
      for (let column = 0; column < columns; column += 1, at += 1) {
        const k = column >> 1;
        const height = column % 2 === 0 ? line[k] : (line[k] + line[k + 1]) / 2;
        while (band < BANDS - 1 && height >= borders[band + 1]) band += 1;
        while (band > 0 && height < borders[band]) band -= 1;
        bands[at] = band;
      }
    }
    return bands;
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

  /** What the scale says, for those who do not see it. */
  get heights() {
    return `heights from ${plain(this.borders[0], 2)} to ${plain(this.borders[BANDS], 2)}`;
  }

  /** The scale: each band of heights, and the values at some of its borders. */
  drawScale(context, colours, top) {
    const [left, right] = [8, this.width - 8];
    const edge = (k) => Math.round(left + ((right - left) * k) / BANDS);
    shadesOf(colours).forEach((shade, k) => {
      context.fillStyle = `rgb(${shade.join()})`;
      context.fillRect(edge(k), top + 6, edge(k + 1) - edge(k), 10);
    });
    context.strokeStyle = colours.soft;
    context.lineWidth = 1;
    context.strokeRect(left, top + 6, right - left, 10);
    context.fillStyle = colours.soft;
    const every = this.width < 520 ? 6 : 3;
    for (let k = 0; k <= BANDS; k += every) {
      context.textAlign = k === 0 ? "left" : k === BANDS ? "right" : "center";
      context.fillText(k === 0 ? `height ${plain(this.borders[k], 2)}` : plain(this.borders[k], 2), edge(k), top + 27);
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

/** From low to high over a middle of another hue, so that lightness and hue both tell the height. */
function shadesOf({ low, middle, high }) {
  return Array.from({ length: BANDS }, (_, k) => {
    const share = (2 * k) / (BANDS - 1);
    return share <= 1 ? mix(low, middle, share) : mix(middle, high, share - 1);
  });
}

/** A colour as four bytes of an image. */
function packed([red, green, blue]) {
  return (255 << 24) | (blue << 16) | (green << 8) | red;
}

function rgb(colour) {
  return [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
}

function mix(from, to, share) {
  const a = rgb(from);
  return rgb(to).map((part, k) => Math.round(a[k] + (part - a[k]) * share));
}
