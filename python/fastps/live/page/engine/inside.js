// The way "in the page": the core in WebAssembly, under a virtual clock that the page advances.

import { vectorOf } from "../settings.js";
import { Journal } from "./journal.js";

/** Events that a step handles at most, and milliseconds that a frame spends on events: the page never hangs. */
const MOST_EVENTS = 4000;
const BUDGET = 10;
/** Updates between two evaluations of the digits, which take long. */
const EVALUATE_EVERY = 25;
const ACTS = ["kill", "pause", "join", "nan"];

export class Inside {
  constructor(core) {
    this.core = core;
    this.journal = new Journal();
    this.run = null;
    this.furthest = 0;
  }

  get isReal() {
    return false;
  }

  /** Makes the run of a state: from its settings, through its events, to its time. */
  start(state) {
    this.run?.destroy();
    this.run = null;
    this.run = this.core.make(this.vector(state.settings));
    this.settings = { ...state.settings };
    for (const event of state.events) {
      this.run.advance(event.time, Infinity);
      try {
        this.apply(event);
      } catch {
        // A worker that is gone already: the core has said so.
      }
    }
    if (state.time > 0) this.run.advance(state.time, Infinity);
    this.furthest = state.time;
    this.refresh();
  }

  vector(settings) {
    return vectorOf(settings, this.core, this.core.problem(settings.problem).toy ? {} : { evaluate_every: EVALUATE_EVERY });
  }

  /** Carries out one event of a visitor at the present time. */
  apply(event) {
    if (event.act !== undefined) {
      this.run.act(ACTS.indexOf(event.act), Math.max(0, event.worker), event.seconds);
      return;
    }
    this.settings = { ...this.settings, [event.name]: event.value };
    this.run.set(this.vector(this.settings));
  }

  /** Reads everything again, as after a jump. */
  refresh() {
    this.journal.clear();
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
    if (state.steps > from) journal.addRows(this.run.steps(from), this.settings.codec);
    const said = before === null ? 0 : before.said;
    if (state.said > said) journal.addMessages(this.run.messages(said));
    journal.curve = this.run.curve();
    journal.noteResidual();
    this.furthest = Math.max(this.furthest, state.time);
  }

  /** Lets virtual time pass, or less of it where this browser is too slow. */
  pass(seconds) {
    const end = this.journal.state.time + seconds;
    const late = performance.now() + BUDGET;
    while (this.run.advance(end, Infinity, 32) === 32 && performance.now() < late);
    this.read();
  }

  /** Goes on to the next update, or further ones. */
  step(updates = 1) {
    const { time, updates: made } = this.journal.state;
    this.run.advance(time + 1000, made + updates, MOST_EVENTS);
    this.read();
  }

  /** Jumps to a time, also back. */
  jump(time) {
    const furthest = this.furthest;
    this.run.rewind(time);
    this.refresh();
    this.furthest = furthest;
  }
}
