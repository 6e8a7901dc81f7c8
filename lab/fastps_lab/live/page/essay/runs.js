// Runs of the core as the essay's figures need them.

import { DEFAULTS, startOf, vectorOf } from "../settings.js";
import { FIELD } from "../engine/journal.js";

/** Events that are handled between two looks at the clock. */
const PIECE = 40;

export function vector(core, settings, more = {}) {
  return vectorOf({ ...DEFAULTS, ...startOf(settings.problem, core), ...settings }, core, more);
}

/**
 * Advances a run in pieces, so that a page answers meanwhile.
 *
 * @param until time and updates at which it ends, and acts on the way: {time, act, worker}
 * @param read what is read at the end
 * @param partial what is drawn after a piece, if anything
 */
export function* runs(core, settings, { time = 1e6, updates = Infinity, acts = [], more = {}, piece = PIECE }, read, partial = () => null) {
  const run = core.make(vector(core, settings, more));
  let left = Number.isFinite(updates) ? 500 + 100 * updates : Infinity; // one that diverges makes no more updates
  try {
    for (const act of [...acts, null]) {
      const end = Math.min(time, act?.time ?? time);
      while (left > 0 && run.advance(end, updates, piece) === piece) {
        left -= piece;
        yield partial(run);
      }
      if (act !== null) run.act(act.act, act.worker, 0);
    }
    return read(run);
  } finally {
    run.destroy();
  }
}

/** What the workers did, as bars of lanes. */
export function barsOf(run, until) {
  const bars = [];
  const free = new Map();
  for (const row of run.steps(0)) {
    free.set(row[FIELD.worker], row[FIELD.ended]);
    bars.push({ worker: row[FIELD.worker], from: row[FIELD.began], to: row[FIELD.arrived], waits: false });
    if (row[FIELD.ended] > row[FIELD.arrived]) bars.push({ worker: row[FIELD.worker], from: row[FIELD.arrived], to: row[FIELD.ended], waits: true });
  }
  for (const { index, phase, since } of run.read().workers) {
    if (phase === "waits") bars.push({ worker: index, from: free.get(index) ?? 0, to: since, waits: false });
    if (phase === "computes" || phase === "waits") bars.push({ worker: index, from: since, to: until, waits: phase === "waits" });
  }
  return bars;
}

/** The updates of the server, in their order. */
export function updatesOf(run) {
  return run.steps(0).filter((row) => row[FIELD.updates] > 0).map((row) => ({
    worker: row[FIELD.worker],
    update: row[FIELD.updates],
    time: row[FIELD.arrived],
    from: [row[FIELD.atX], row[FIELD.atY]],
    to: [row[FIELD.toX], row[FIELD.toY]],
    staleness: row[FIELD.staleness],
    momentum: row[FIELD.momentum],
  }));
}

/** The loss over a run: updates, seconds, loss, test error in percent. */
export function lossOf(run) {
  return run.curve().map(([update, time, loss, error]) => ({ update, time, loss, error }));
}
