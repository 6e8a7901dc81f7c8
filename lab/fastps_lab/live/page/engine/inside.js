// The way "in the page": the core in WebAssembly, under a virtual clock that the page advances.

import { CODECS, vectorOf } from "../settings.js";
import { Journal } from "./journal.js";

/** Events that a step handles at most, and milliseconds that a frame spends on events: the page never hangs. */
const MOST_EVENTS = 4000;
const BUDGET = 3;
/** Events between two looks at the clock, on functions of two numbers and on the net. */
const PIECE = 32;
const PIECE_NET = 2;
/** Moments of a jump at which the residual is noted for its curve. */
const NOTED = 40;
/** Updates between two evaluations of the digits, which take long. */
const EVALUATE_EVERY = 25;
const ACTS = ["kill", "pause", "join", "nan"];

export class Inside {
  constructor(core) {
    this.core = core;
    this.journal = new Journal();
    this.run = null;
    this.furthest = 0;
    this.events = []; // what a visitor does, in the order of time; the first `done` of them have happened
    this.done = 0;
    this.first = null;
    this.settings = null; // those in force at the present moment
  }

  get isReal() {
    return false;
  }

  /** Makes the run of a state: from its settings, through its events, to its time. */
  start({ settings, events, time }) {
    const run = this.core.make(this.vector(settings));
    this.run?.destroy();
    this.run = run;
    this.first = this.settings = { ...settings };
    this.events = events;
    this.done = 0;
    const residuals = this.travelTo(time);
    this.furthest = Math.max(time, events.at(-1)?.time ?? 0);
    this.refresh(residuals);
  }

  vector(settings) {
    return vectorOf(settings, this.core, this.core.problem(settings.problem).toy ? {} : { evaluate_every: EVALUATE_EVERY });
  }

  /** Does what is due at the present moment: further events replace those that were to come. */
  happen(events) {
    this.events = events;
    const { time } = this.journal.state;
    const restarted = this.goOnTo(time);
    this.furthest = time;
    this.read();
    return restarted;
  }

  /** Goes on to a time, with the events until then; whether one of them restarted the workers. */
  goOnTo(time) {
    let restarted = false;
    while (this.due <= time) {
      this.run.advance(this.due, Infinity);
      restarted = this.applyNext() || restarted;
    }
    this.run.advance(time, Infinity);
    return restarted;
  }

  /** The time of the next event of the visitor. */
  get due() {
    return this.events[this.done]?.time ?? Infinity;
  }

  /** Carries out the next event; whether it restarted the workers. */
  applyNext() {
    const event = this.events[this.done];
    this.done += 1;
    if (event.act !== undefined) {
      this.run.act(ACTS.indexOf(event.act), Math.max(0, event.worker), event.seconds);
      return false;
    }
    const settings = { ...this.settings, [event.name]: event.value };
    const restarted = this.run.set(this.vector(settings)) === 1;
    this.settings = settings;
    return restarted;
  }

  /** Goes on to a time as `goOnTo` does; the residuals on the way. */
  travelTo(time) {
    const from = this.run.read().time;
    const residuals = [];
    for (let k = 1; k < NOTED; k += 1) {
      this.goOnTo(from + ((time - from) * k) / NOTED);
      if (this.settings.codec === "float32") continue;
      const state = this.run.read();
      if (Number.isFinite(state.residual)) residuals.push([state.time, state.residual]);
    }
    this.goOnTo(time);
    return residuals;
  }

  /** Reads everything again, as after a jump; the residuals until then are known. */
  refresh(residuals) {
    this.journal.clear();
    this.journal.residuals = residuals;
    this.read();
  }

  /** Reads what is new. */
  read() {
    const journal = this.journal;
    const before = journal.state;
    const state = this.run.read();
    journal.state = state;
    journal.settings = this.settings;
    const from = before === null ? Math.max(0, state.steps - 16384) : before.steps;
    if (state.steps > from) journal.addRows(this.run.steps(from));
    const said = before === null ? 0 : before.said;
    if (state.said > said) journal.addMessages(this.run.messages(said));
    journal.curve = this.run.curve();
    journal.histogram = this.run.staleness();
    journal.setCodecs(this.run.bytes().map((sums, k) => [CODECS[k], sums]));
    journal.noteResidual();
    this.furthest = Math.max(this.furthest, state.time);
  }

  /** Lets virtual time pass, or less of it where this browser is too slow. */
  pass(seconds) {
    const end = this.journal.state.time + seconds;
    const late = performance.now() + BUDGET;
    const piece = this.core.problem(this.settings.problem).toy ? PIECE : PIECE_NET;
    do {
      const { due } = this;
      if (this.run.advance(Math.min(end, due), Infinity, piece) < piece) {
        if (due > end) break;
        this.applyNext();
      }
    } while (performance.now() < late);
    this.finishMoment();
  }

  /** Goes on to the next update, or further ones. */
  step(updates = 1) {
    const { time, updates: made } = this.journal.state;
    const end = time + 1000;
    for (;;) {
      const { due } = this;
      this.run.advance(Math.min(end, due), made + updates, MOST_EVENTS);
      const now = this.run.read();
      if (due > end || now.time < due || now.updates >= made + updates) break;
      this.applyNext();
    }
    this.finishMoment();
  }

  /** Does all that happens at the present time, so that the time in an address says which moment it is. */
  finishMoment() {
    this.goOnTo(this.run.read().time);
    this.read();
  }

  /** Jumps to a time, also back. */
  jump(time) {
    const { furthest } = this;
    let { residuals } = this.journal;
    if (time < this.journal.state.time) {
      this.goBackTo(time);
      residuals = residuals.filter(([noted]) => noted <= time);
    } else {
      residuals = [...residuals, ...this.travelTo(time)];
    }
    this.refresh(residuals);
    this.furthest = furthest;
  }

  /** The core repeats what happened until then; what comes later happens again when its time comes. */
  goBackTo(time) {
    this.run.rewind(time);
    this.done = this.events.filter((event) => event.time <= time).length;
    const set = this.events.slice(0, this.done).filter((event) => event.name !== undefined);
    this.settings = set.reduce((all, { name, value }) => ({ ...all, [name]: value }), this.first);
  }
}
