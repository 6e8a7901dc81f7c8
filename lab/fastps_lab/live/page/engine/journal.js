// What the views draw: steps, losses, messages, sums and the present state, from either way to run.

/** Rows that are kept. Sums come from the run itself, which counts all steps. */
const MOST = 16384;

export const FIELD = {
  number: 0, worker: 1, step: 2, pulled: 3, began: 4, pushed: 5, arrived: 6, ended: 7, atX: 8, atY: 9, toX: 10, toY: 11,
  status: 12, updates: 13, staleness: 14, scale: 15, bytes: 16, loss: 17, momentum: 18, lr: 19,
};

export const APPLIED = 0;

export class Journal {
  constructor() {
    this.clear();
  }

  clear() {
    this.rows = [];
    this.curve = [];
    this.messages = [];
    this.residuals = [];
    this.histogram = new Array(256).fill(0);
    this.codecs = new Map();
    this.last = new Map();
    this.state = null;
    this.servers = [];
    this.settings = null;
  }

  /** Takes in finished steps. */
  addRows(rows) {
    for (const row of rows) {
      this.rows.push(row);
      this.last.set(row[FIELD.worker], row);
    }
    if (this.rows.length > MOST) this.rows.splice(0, this.rows.length - MOST);
  }

  addMessages(messages) {
    this.messages.push(...messages);
    if (this.messages.length > 400) this.messages.splice(0, this.messages.length - 400);
  }

  /** Takes pushes and bytes of the codecs that were used. */
  setCodecs(sums) {
    this.codecs = new Map(sums.filter(([, [pushes]]) => pushes > 0).map(([codec, [pushes, bytes]]) => [codec, { pushes, bytes }]));
  }

  /** Notes the residual norm for its curve. */
  noteResidual() {
    const { time, residual } = this.state;
    if (!Number.isFinite(residual)) return;
    this.residuals.push([time, residual]);
    if (this.residuals.length > 2000) this.residuals = this.residuals.filter((_, k) => k % 2 === 0);
  }

  /** The last rows whose step ended after a time. */
  since(time) {
    let first = this.rows.length;
    while (first > 0 && this.rows[first - 1][FIELD.ended] >= time) first -= 1;
    return this.rows.slice(first);
  }
}

/** How long a worker has been there. */
export function presenceOf(worker, time) {
  return Math.max(0, Math.min(time, worker.left) - worker.born);
}
