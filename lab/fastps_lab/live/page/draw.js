// What the pictures share: sharp canvases, colours of the theme, shapes of workers.

/** Okabe and Ito's colours, which colour-blind readers can tell apart. */
export const OKABE_ITO = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#999999"];

export function colourOf(worker) {
  return OKABE_ITO[worker % OKABE_ITO.length];
}

/** The colours of the page's theme. */
export function theme() {
  const style = getComputedStyle(document.documentElement);
  const of = (name) => style.getPropertyValue(`--${name}`).trim();
  return {
    ink: of("ink"),
    soft: of("soft"),
    line: of("line"),
    paper: of("paper"),
    low: of("low"),
    middle: of("middle"),
    high: of("high"),
    accent: of("accent"),
    compute: of("compute"),
    push: of("push"),
    wait: of("wait"),
    pull: of("pull"),
    a: of("a"),
    b: of("b"),
  };
}

/** Fits a canvas to its box and the screen; its context draws in CSS pixels. */
export function fit(canvas) {
  const scale = window.devicePixelRatio || 1;
  const { clientWidth: width, clientHeight: height } = canvas;
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
  }
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  context.font = "12px system-ui, sans-serif";
  context.textBaseline = "middle";
  return { context, width, height };
}

const SHAPES = [
  (c, r) => c.arc(0, 0, r, 0, 7),
  (c, r) => c.rect(-r * 0.9, -r * 0.9, r * 1.8, r * 1.8),
  (c, r) => polygon(c, [[0, -1.2], [1.1, 0.8], [-1.1, 0.8]], r),
  (c, r) => polygon(c, [[0, -1.3], [1.2, 0], [0, 1.3], [-1.2, 0]], r),
  (c, r) => polygon(c, [[0, 1.2], [1.1, -0.8], [-1.1, -0.8]], r),
  (c, r) => polygon(c, [[-0.45, -1.2], [0.45, -1.2], [0.45, -0.45], [1.2, -0.45], [1.2, 0.45], [0.45, 0.45], [0.45, 1.2], [-0.45, 1.2], [-0.45, 0.45], [-1.2, 0.45], [-1.2, -0.45], [-0.45, -0.45]], r),
  (c, r) => polygon(c, star(5), r * 1.25),
  (c, r) => polygon(c, [[-0.6, -1.1], [0.6, -1.1], [1.2, 0], [0.6, 1.1], [-0.6, 1.1], [-1.2, 0]], r),
];

function polygon(context, points, size) {
  points.forEach(([x, y], k) => (k === 0 ? context.moveTo(x * size, y * size) : context.lineTo(x * size, y * size)));
  context.closePath();
}

function star(points) {
  return Array.from({ length: 2 * points }, (_, k) => {
    const angle = (Math.PI * k) / points - Math.PI / 2;
    const length = k % 2 === 0 ? 1.1 : 0.5;
    return [Math.cos(angle) * length, Math.sin(angle) * length];
  });
}

/** The mark of a worker: a shape for the first eight, a number beyond. */
export function drawWorker(context, worker, x, y, size, colours, faded = false) {
  context.save();
  context.translate(x, y);
  context.globalAlpha = faded ? 0.45 : 1;
  context.beginPath();
  SHAPES[worker < SHAPES.length ? worker : 0](context, worker < SHAPES.length ? size : size * 1.35);
  context.fillStyle = colourOf(worker);
  context.fill();
  context.lineWidth = 1.5;
  context.strokeStyle = colours.ink;
  context.stroke();
  if (worker >= SHAPES.length) {
    context.fillStyle = "#000";
    context.font = `bold ${Math.round(size * 1.5)}px system-ui, sans-serif`;
    context.textAlign = "center";
    context.fillText(String(worker), 0, 0.5);
  }
  context.restore();
}

/** Round numbers between two ends, about so many. */
export function ticks(least, most, count) {
  const span = most - least;
  if (!(span > 0) || !Number.isFinite(span)) return [];
  const rough = span / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((k) => k * power).find((k) => k >= rough);
  const found = [];
  for (let k = Math.ceil(least / step); k * step <= most + step * 1e-9; k += 1) found.push(Number((k * step).toPrecision(12)));
  return found;
}

/** A number as people read it. */
export function plain(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(digits - 1).replace("e+", "e");
  if (Number.isInteger(value)) return value.toLocaleString("en-US");
  return Number(value.toPrecision(Math.max(digits, Math.ceil(Math.log10(size))))).toLocaleString("en-US", { maximumFractionDigits: 6 });
}

export function bytesText(value) {
  if (!Number.isFinite(value)) return "–";
  for (const [unit, size] of [["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) {
    if (value >= size) return `${(value / size).toPrecision(3)} ${unit}`;
  }
  return `${Math.round(value)} B`;
}

/** An element with attributes, properties and children. */
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== false && value !== undefined) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children);
  return element;
}
