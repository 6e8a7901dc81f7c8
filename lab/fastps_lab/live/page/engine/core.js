// The core in WebAssembly. What the calls mean stands in rust/live/README.md.

const ROW = 20;
const STATE = 24;
const WORKER = 14;

export class CoreError extends Error {}

/** One instance of the module. */
export class Core {
  constructor(instance) {
    this.exports = instance.exports;
    this.ask("describe");
    this.about = JSON.parse(this.text());
    this.fields = new Map(this.about.fields.map(({ index, name }) => [name, index]));
  }

  bytes() {
    const e = this.exports;
    return new Uint8Array(e.memory.buffer, e.output(), e.output_len());
  }

  text() {
    return new TextDecoder().decode(this.bytes());
  }

  numbers() {
    const e = this.exports;
    return new Float64Array(e.memory.buffer, e.output(), e.output_len() / 8).slice();
  }

  /** Calls an export; throws its own error text. */
  ask(name, ...args) {
    const result = this.exports[name](...args);
    if (result < 0) throw new CoreError(this.text());
    return result;
  }

  give(vector) {
    const at = this.exports.input(8 * vector.length);
    new Float64Array(this.exports.memory.buffer, at, vector.length).set(vector);
  }

  /** The problem of this name in the fragment. */
  problem(slug) {
    return this.about.problems.find((one) => slugOf(one.name) === slug);
  }

  optimizer(slug) {
    return this.about.optimizers.find((one) => slugOf(one.name) === slug);
  }

  /** Heights on a grid. */
  contours(problem, [x0, x1, y0, y1], columns, rows) {
    this.ask("contours", problem, x0, x1, columns, y0, y1, rows);
    return this.numbers();
  }

  make(vector) {
    this.give(vector);
    return new Run(this, this.ask("make"));
  }
}

export function slugOf(name) {
  return name.toLowerCase().replace(/[^a-z0-9]/g, "");
}

/** One simulation. */
export class Run {
  constructor(core, handle) {
    this.core = core;
    this.handle = handle;
  }

  ask(name, ...args) {
    return this.core.ask(name, this.handle, ...args);
  }

  destroy() {
    this.ask("destroy");
  }

  set(vector) {
    this.core.give(vector);
    return this.ask("set");
  }

  /** Goes on to a time or a number of updates, whichever comes first; in pieces, for one call is bounded. */
  advance(time, updates, most = Infinity) {
    let handled = 0;
    for (;;) {
      const piece = Math.min(most - handled, 20000);
      const did = this.ask("advance", time, updates, piece);
      handled += did;
      if (did < piece || handled >= most) return handled;
    }
  }

  rewind(time) {
    this.ask("rewind", time);
  }

  act(what, worker, seconds) {
    this.ask("act", what, worker, seconds);
  }

  read() {
    this.ask("read");
    return stateOf(this.core.numbers());
  }

  steps(from) {
    const rows = this.ask("steps", from);
    const numbers = this.core.numbers();
    return Array.from({ length: rows }, (_, k) => numbers.subarray(k * ROW, (k + 1) * ROW));
  }

  curve() {
    const rows = this.ask("curve");
    const numbers = this.core.numbers();
    return Array.from({ length: rows }, (_, k) => numbers.subarray(k * 4, k * 4 + 4));
  }

  /** Pushes by their staleness. */
  staleness() {
    this.ask("staleness");
    return Array.from(this.core.numbers());
  }

  /** Pushes and bytes by codec. */
  bytes() {
    const rows = this.ask("bytes");
    const numbers = this.core.numbers();
    return Array.from({ length: rows }, (_, k) => [numbers[2 * k], numbers[2 * k + 1]]);
  }

  messages(from) {
    this.ask("messages", from);
    const lines = this.core.text().split("\n").filter(Boolean);
    return lines.map((line) => {
      const [number, time, kind, worker, text] = line.split("\t");
      return [Number(number), Number(time), kind, Number(worker), text];
    });
  }

  evaluate() {
    this.ask("evaluate");
    return this.core.numbers();
  }

  values() {
    this.ask("values");
    return this.core.numbers();
  }
}

const PHASES = ["pulls", "computes", "pushes", "waits", "paused", "gone"];

function stateOf(n) {
  const workers = [];
  for (let at = STATE; at + WORKER <= n.length; at += WORKER) {
    workers.push({
      index: n[at],
      phase: PHASES[n[at + 1]],
      x: n[at + 2],
      y: n[at + 3],
      version: n[at + 4],
      step: n[at + 5],
      since: n[at + 6],
      until: n[at + 7],
      applied: n[at + 8],
      waited: n[at + 9],
      staleness: n[at + 10],
      residual: n[at + 11],
      born: n[at + 12],
      left: n[at + 13],
    });
  }
  return {
    time: n[0],
    updates: n[1],
    version: n[2],
    x: n[3],
    y: n[4],
    loss: n[5],
    bytes: n[7],
    bytesPlain: n[8],
    pushes: n[9],
    refused: n[10],
    residual: n[11],
    momentum: n[12],
    waiting: n[13],
    diverged: n[14],
    steps: n[15],
    said: n[16],
    error: n[17],
    fit: n[18],
    fitRate: n[19],
    still: n[20] === 1,
    lost: 0,
    workers,
  };
}

/** Where the module is: in the page itself, or beside it. */
export async function loadModule() {
  const inlined = document.getElementById("wasm");
  if (inlined === null) {
    const answer = await fetch("fastps.wasm");
    if (!answer.ok) throw new CoreError(`fastps.wasm: ${answer.status}`);
    return WebAssembly.compile(await answer.arrayBuffer());
  }
  const text = atob(inlined.textContent.trim());
  const packed = new Blob([Uint8Array.from(text, (character) => character.charCodeAt(0))]);
  const bytes = new Response(packed.stream().pipeThrough(new DecompressionStream("gzip")));
  return WebAssembly.compile(await bytes.arrayBuffer());
}

export async function coreOf(module) {
  return new Core(await WebAssembly.instantiate(module, {}));
}
