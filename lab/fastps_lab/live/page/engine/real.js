// The way "for real": servers and workers of `fastps-lab live` on this machine.

import { forReal } from "../settings.js";
import { Journal, presenceOf } from "./journal.js";

const KEY = "fastps-live-token";

/** Takes the token out of the address, at once; later only this tab knows it. */
export function takeToken() {
  const found = /(?:^#|&)token=([\w-]+)/.exec(location.hash);
  if (found !== null) {
    history.replaceState(null, "", location.pathname + location.search + location.hash.replace(/token=[\w-]+&?/, ""));
    try {
      sessionStorage.setItem(KEY, found[1]);
    } catch {
      return found[1]; // storage is off: the token lasts until the tab is loaded again
    }
  }
  try {
    return sessionStorage.getItem(KEY);
  } catch {
    return null;
  }
}

export class Real {
  /**
   * @param token of the link
   */
  constructor(token) {
    this.token = token;
    this.followers = [];
    this.journal = new Journal();
    this.connected = false;
    this.controls = false;
    this.trouble = "";
    this.visit = 0;
    this.listen();
  }

  get isReal() {
    return true;
  }

  /**
   * @param onChange called when the connection or the controls come or go
   * @param onRestart called with a text when the workers were restarted
   * @param onFrame called with each frame that has come
   */
  follow(onChange, onRestart = () => {}, onFrame = () => {}) {
    this.followers.push({ onChange, onRestart, onFrame });
  }

  onChange() {
    for (const one of this.followers) one.onChange();
  }

  /** Reads the stream of frames, and comes back when it breaks. */
  async listen() {
    for (;;) {
      try {
        await this.read();
        this.trouble = "fastps-lab live has closed the stream";
      } catch (error) {
        this.trouble = error.message;
      }
      this.connected = false;
      this.onChange();
      if (this.refused) return;
      await new Promise((resolve) => setTimeout(resolve, 1000));
    }
  }

  async read() {
    const answer = await fetch("events", { headers: { "X-Fastps-Token": this.token } });
    if (!answer.ok) {
      this.refused = answer.status === 401;
      throw new Error((await answer.text()).trim());
    }
    this.connected = true;
    const decoder = new TextDecoder();
    let text = "";
    for await (const chunk of piecesOf(answer.body)) {
      text += decoder.decode(chunk, { stream: true });
      const lines = text.split("\n");
      text = lines.pop();
      for (const line of lines) if (line !== "") this.take(JSON.parse(line));
    }
  }

  take(frame) {
    const { journal } = this;
    const before = [this.controls, this.visit, this.trouble];
    if (frame.you !== undefined) this.number = frame.you;
    this.controls = frame.control === this.number;
    this.trouble = "";
    if (frame.visit !== this.visit || frame.points !== undefined) {
      this.visit = frame.visit;
      journal.clear();
      if (frame.points !== undefined) journal.curve = frame.points.map(numbersOf);
    }
    journal.settings = frame.settings;
    journal.servers = frame.servers;
    const goesOn = journal.state !== null;
    const heard = journal.messages.at(-1)?.[0] ?? 0;
    const messages = frame.messages.filter(([number]) => number > heard);
    journal.addRows(frame.rows.map(numbersOf));
    journal.addMessages(messages);
    journal.histogram = frame.state.staleness;
    journal.setCodecs(Object.entries(frame.state.codecs));
    journal.state = this.stateOf(frame);
    journal.noteResidual();
    const last = journal.curve.at(-1);
    if (last === undefined || last[0] !== journal.state.updates || journal.state.time - last[1] > 1) {
      journal.curve.push([journal.state.updates, journal.state.time, journal.state.loss, NaN]);
      if (journal.curve.length > 4096) journal.curve = journal.curve.filter((_, k) => k % 2 === 0);
    }
    if (String(before) !== String([this.controls, this.visit, this.trouble])) this.onChange();
    const restart = messages.findLast(([, , kind]) => kind === "set");
    for (const one of this.followers) {
      if (goesOn && restart !== undefined) one.onRestart(restart[4]);
      one.onFrame(frame);
    }
  }

  /** The state in the form that simulated ones have. */
  stateOf(frame) {
    const { last, rows } = this.journal;
    const { state, settings } = frame;
    const workers = frame.workers.map(({ index, pid, state: doing, at, applied, waited, residual, born, left }) => {
      const row = last.get(index);
      const phase = { running: "computes", paused: "paused", starting: "pulls" }[doing] ?? "gone";
      return {
        index,
        pid,
        phase,
        x: at[0] ?? NaN,
        y: at[1] ?? NaN,
        version: row === undefined ? 1 : Math.max(row[13], 0) + 1,
        step: row === undefined ? 0 : row[2] + 1,
        since: row?.[7] ?? 0,
        until: Infinity,
        applied,
        waited,
        staleness: row?.[14] ?? -1,
        residual: residual ?? 0,
        born: born ?? Infinity, // it is starting
        left: left ?? Infinity,
      };
    });
    const sum = (of) => workers.reduce((all, worker) => all + of(worker), 0);
    const present = sum((worker) => presenceOf(worker, state.time));
    return {
      time: state.time,
      updates: state.updates,
      version: state.updates + 1,
      x: state.x ?? NaN,
      y: state.y ?? NaN,
      loss: state.loss ?? NaN,
      bytes: state.bytes,
      bytesPlain: state.pushes * 4 * (settings.problem === "digits" ? 2410 : 2),
      pushes: state.pushes,
      refused: state.refused,
      residual: state.residual ?? 0,
      momentum: rows.at(-1)?.[18] ?? NaN,
      waiting: present > 0 ? Math.min(1, sum((worker) => worker.waited) / present) : 0,
      diverged: state.diverged,
      steps: state.steps,
      error: NaN,
      fit: state.fit ?? NaN,
      fitRate: state.fit_rate ?? NaN,
      still: false,
      lost: state.lost,
      workers,
    };
  }

  set(settings) {
    return this.post("set", forReal(settings));
  }

  act(what, number = -1) {
    return this.post("act", { what, number });
  }

  async post(call, body) {
    const answer = await fetch(call, {
      method: "POST",
      headers: { "X-Fastps-Token": this.token, "X-Fastps-Tab": String(this.number) },
      body: JSON.stringify(body),
    });
    if (!answer.ok) throw new Error((await answer.text()).trim());
  }
}

async function* piecesOf(body) {
  const reader = body.getReader();
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    yield value;
  }
}

function numbersOf(row) {
  return row.map((one) => one ?? NaN);
}
