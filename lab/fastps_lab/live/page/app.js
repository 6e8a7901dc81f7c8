// The page: joins state, engine, controls and views.

import { SPEEDS, VIEWS, fragmentOf, freshState, stateOfFragment } from "./address.js";
import { Controls } from "./controls.js";
import { bytesText, make, plain } from "./draw.js";
import { Inside } from "./engine/inside.js";
import { LessonBar } from "./lessonbar.js";
import { programOf, startOf } from "./settings.js";
import { BreakView } from "./views/break.js";
import { BytesView } from "./views/bytes.js";
import { LanesView } from "./views/lanes.js";
import { LossView } from "./views/loss.js";
import { OptimizersView } from "./views/optimizers.js";
import { RaceView } from "./views/race.js";
import { StalenessView, meanOf } from "./views/staleness.js";

const KINDS = { race: RaceView, lanes: LanesView, loss: LossView, staleness: StalenessView, bytes: BytesView, optimizers: OptimizersView, break: BreakView };
const TITLES = { race: "Race", lanes: "Lanes", loss: "Loss", staleness: "Staleness", bytes: "Bytes", optimizers: "Optimizers", break: "Break it" };

/** What makes another run instead of changing the one that goes on. */
const STARTS_OVER = ["problem", "x", "y", "seed"];
const MOST_EVENTS = 64;
/** Real seconds between two pictures when motion is unwanted. */
const SLOW = 2;

const $ = (id) => document.getElementById(id);

export class App {
  constructor(core, module, real) {
    this.core = core;
    this.inside = new Inside(core);
    this.real = real;
    real?.follow(() => this.onReal(), (text) => this.onRestart(text));
    this.still = matchMedia("(prefers-reduced-motion: reduce)");
    this.lessons = new LessonBar(this, module);
    this.controls = new Controls($("controls"), $("main-controls"), core, (patch, problem) => this.change(patch, problem));
    this.state = freshState(core);
    this.drawn = 0;
    this.buildTabs();
    this.buildTransport();
    this.buildButtons();
    addEventListener("popstate", () => {
      if (!location.hash.startsWith("#essay.")) this.load();
    });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.redraw());
    this.still.addEventListener("change", () => this.redraw());
    new ResizeObserver(() => this.redraw()).observe($("panel"));
    this.narrow = matchMedia("(max-width: 60rem)");
    this.narrow.addEventListener("change", () => this.arrange());
    this.arrange();
    $("page").hidden = false;
    this.load(this.real !== null && !/(?:^#|&)way=/.test(location.hash));
    requestAnimationFrame((now) => this.frame(now));
  }

  get isReal() {
    return this.state.way === "real" && this.real !== null;
  }

  get engine() {
    return this.isReal ? this.real : this.inside;
  }

  /** The settings in force at the moment that is shown. */
  get settings() {
    return this.isReal ? this.state.settings : (this.inside.settings ?? this.state.settings);
  }

  get mayChange() {
    return !this.isReal || (this.real.connected && this.real.controls);
  }

  // -- the address -------------------------------------------------------------------------------------------

  /** Takes on the state of the address. */
  load(chooseReal = false) {
    const text = location.hash.slice(1);
    const { state, changed } = stateOfFragment(text, this.core);
    this.state = state;
    if (chooseReal) state.way = "real";
    if (state.way === "real" && this.real === null) {
      state.way = "page";
      changed.push("it runs in the page, for fastps-lab live did not open it");
    }
    if (this.still.matches) state.paused = true;
    this.notice(changed.length > 0 ? `Changed: ${changed.join("; ")}.` : "");
    // An address without settings takes on those of the servers.
    this.adopts = this.isReal && !/(?:^|&)(?!way=|view=|lesson=|speed=|token=)\w+=/.test(text);
    this.sends = this.isReal && !this.adopts;
    this.sendIfConnected();
    this.begin();
    if (chooseReal || changed.length > 0) this.replace();
  }

  /** Starts the run of the present state. */
  begin() {
    if (!this.isReal) this.attempt(() => this.inside.start(this.state));
    this.lessons.show(this.state.lesson);
    this.openView();
    this.showAll();
  }

  link(state) {
    return `#${fragmentOf(state, this.core)}`;
  }

  replace() {
    history.replaceState(null, "", this.link(this.state));
  }

  /** A new entry in the history; the present one gets its time, so that the way back leads there. */
  push(next) {
    this.keepTime();
    this.replace();
    this.state = { ...this.state, ...next };
    history.pushState(null, "", this.link(this.state));
  }

  keepTime() {
    if (!this.isReal && this.inside.journal.state !== null) this.state.time = this.inside.journal.state.time;
  }

  // -- what a visitor does -----------------------------------------------------------------------------------

  /** Continues with other settings. */
  change(patch, problem = "") {
    if (problem !== "") this.notice(problem);
    if (Object.keys(patch).length === 0 || !this.mayChange) {
      this.showAll();
      return;
    }
    this.notice("");
    const settings = { ...this.settings, ...(patch.problem === undefined ? {} : startOf(patch.problem, this.core)), ...patch };
    if (this.isReal) {
      this.push({ settings, events: [], lesson: "" });
      this.send();
    } else if (STARTS_OVER.some((name) => name in patch) || this.state.events.length >= MOST_EVENTS) {
      this.push({ settings, events: [], time: 0, lesson: "" });
      this.begin();
    } else {
      this.happen(Object.entries(patch).map(([name, value]) => ({ name, value })));
    }
    this.showAll();
  }

  /** Sends the settings of the address as soon as the servers can be reached; a page that watches takes on theirs. */
  sendIfConnected() {
    if (!this.sends || !this.real.connected) return;
    this.sends = false;
    if (this.mayChange) this.send();
    else this.adopts = true;
  }

  /** If the settings are refused, those of the servers are shown again. */
  send() {
    this.real.set(this.state.settings).catch((error) => {
      this.adopts = true;
      this.notice(error.message);
    });
  }

  /** Kills, pauses, and so on. */
  act(what, number) {
    if (this.isReal) {
      this.real.act(what, number).catch((error) => this.notice(error.message));
      return;
    }
    if (this.state.events.length >= MOST_EVENTS) this.notice(`At most ${MOST_EVENTS} events fit into one run: begin from the start.`);
    else this.happen([{ act: what, worker: number, seconds: what === "pause" ? 5 : 0 }]);
  }

  /** Carries out events now, and notes them in the address. */
  happen(events) {
    const { time } = this.inside.journal.state;
    const earlier = this.state.events.filter((event) => event.time <= time);
    const all = events.map((event) => ({ time, ...event }));
    this.push({ events: [...earlier, ...all], time, lesson: "" });
    this.attempt(() => {
      if (this.inside.happen(this.state.events)) this.onRestart("the workers were restarted from the present point");
    });
    this.showAll();
  }

  /** Does something; an error is shown in its own words, and the page lives on. */
  attempt(action) {
    try {
      action();
    } catch (error) {
      this.notice(error.message);
    }
  }

  restart() {
    if (this.isReal) {
      this.act("restart", -1);
      return;
    }
    this.push({ settings: this.settings, events: [], time: 0 });
    this.begin();
  }

  pause(paused) {
    this.state.paused = paused;
    this.keepTime();
    this.replace();
    this.showAll();
  }

  step(updates) {
    this.attempt(() => this.inside.step(updates));
    this.pause(true);
    this.say(`update ${plain(this.inside.journal.state.updates)}, loss ${plain(this.inside.journal.state.loss)}`);
  }

  scrub(time) {
    this.attempt(() => this.inside.jump(time));
    this.pause(true);
  }

  choose(view) {
    this.push({ view });
    this.openView();
    this.showAll();
  }

  go(way) {
    if (way === "real") this.push({ way, settings: this.settings, events: [], time: 0, lesson: "" });
    else this.push({ way });
    this.load();
  }

  onRestart(text) {
    if (this.mayChange) this.notice(`${text[0].toUpperCase()}${text.slice(1)}.`);
  }

  say(text) {
    $("said").textContent = text;
  }

  notice(text) {
    $("notice").textContent = text;
    $("notice").hidden = text === "";
  }

  onReal() {
    if (!this.isReal) {
      this.showWay();
      return;
    }
    if (this.real.trouble !== "") this.notice(`fastps-lab live: ${this.real.trouble}`);
    else if (this.real.connected && !this.real.controls) this.notice("Another tab has the controls; this one watches.");
    else this.notice("");
    this.sendIfConnected();
    this.showAll();
  }

  // -- what is shown -----------------------------------------------------------------------------------------

  buildTabs() {
    $("tabs").append(...VIEWS.map((view) =>
      make("button", { type: "button", role: "tab", id: `tab-${view}`, "aria-controls": "panel", onclick: () => this.choose(view) }, TITLES[view])));
    $("tabs").addEventListener("keydown", (event) => {
      const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (move === undefined) return;
      const next = VIEWS[(VIEWS.indexOf(this.state.view) + move + VIEWS.length) % VIEWS.length];
      this.choose(next);
      $(`tab-${next}`).focus();
    });
    $("skip").addEventListener("click", (event) => {
      event.preventDefault();
      $("view").focus();
    });
  }

  /** On a narrow screen the picture comes first, and under it the controls that matter; elsewhere they stand beside it. */
  arrange() {
    if (this.narrow.matches) {
      $("panel").after($("main-controls"));
      $("page").after($("lessons-nav"), $("lesson"));
    } else {
      $("controls").before($("main-controls"));
      $("page").before($("lessons-nav"), $("lesson"));
    }
  }

  /** Shows all of a function, or the part of it where the run is. */
  showWhole(whole) {
    this.state.whole = whole;
    this.keepTime();
    this.replace();
    this.redraw();
  }

  openView() {
    const key = `${this.state.view} ${this.isReal}`;
    if (key === this.opened) return;
    this.opened = key;
    for (const view of VIEWS) {
      const tab = $(`tab-${view}`);
      tab.setAttribute("aria-selected", String(view === this.state.view));
      tab.tabIndex = view === this.state.view ? 0 : -1;
    }
    $("panel").replaceChildren();
    $("waits").hidden = this.engine.journal.state !== null;
    $("panel").setAttribute("aria-labelledby", `tab-${this.state.view}`);
    this.view = new KINDS[this.state.view]($("panel"), this);
  }

  buildTransport() {
    const button = (id, text, action) => make("button", { type: "button", id, onclick: action }, text);
    this.play = button("play", "Pause", () => this.pause(!this.state.paused));
    this.range = make("input", { type: "range", id: "scrub", min: 0, max: 1, step: "any", "aria-label": "Virtual time", oninput: () => this.scrub(Number(this.range.value)) });
    this.speed = make("select", { id: "speed", onchange: () => {
      this.state.speed = Number(this.speed.value);
      this.replace();
    } }, ...SPEEDS.map((speed) => make("option", { value: speed }, `${speed} ×`)));
    this.inPage = [this.play, button("step", "Step", () => this.step(1)), button("step10", "Step 10", () => this.step(10)), this.range, make("label", {}, "Speed", this.speed)];
    this.clock = make("p", { class: "caption" }, "Real time passes by itself: it cannot be paused, stepped or scrubbed.");
    $("transport").append(button("restart", "From the start", () => this.restart()), ...this.inPage, this.clock);
    this.cells = new Map(["Updates", "Time", "Loss", "Staleness", "Waiting", "Pushed"].map((name) => [name, make("dd", {}, "–")]));
    $("strip").append(...[...this.cells].map(([name, cell]) => make("div", {}, make("dt", {}, name), cell)));
    $("numbers").addEventListener("toggle", () => this.redraw());
  }

  buildButtons() {
    const copy = (text, what) => navigator.clipboard?.writeText(text).then(() => this.say(`${what} is copied`), () => this.say("the browser does not allow to copy"));
    $("program").addEventListener("click", () => {
      $("dialog").querySelector("pre").textContent = this.program();
      $("dialog").showModal();
    });
    $("close").addEventListener("click", () => $("dialog").close());
    $("take").addEventListener("click", () => copy($("dialog").querySelector("pre").textContent, "the program"));
    $("copy").addEventListener("click", () => {
      this.keepTime();
      this.replace();
      copy(location.href, "the link");
    });
  }

  program() {
    const updates = Math.max(1, this.engine.journal.state?.updates ?? 1);
    const events = this.isReal ? [] : this.state.events.slice(0, this.inside.done);
    const code = programOf(this.settings, this.core, updates, events);
    const command = `fastps-lab live --workers ${this.settings.workers}`;
    return this.isReal ? `# On real servers and workers:\n#   ${command}\n# In virtual time:\n${code}` : code;
  }

  showWay() {
    const badge = $("way");
    badge.textContent = this.isReal ? "For real: servers and workers of this machine" : "In the page: virtual time";
    badge.classList.toggle("real", this.isReal);
    if (this.real === null) return;
    const button = (way, text) => make("button", { type: "button", "aria-pressed": String(this.state.way === way), onclick: () => this.go(way) }, text);
    $("ways").replaceChildren(button("page", "In the page"), button("real", "For real"));
  }

  showAll() {
    this.showWay();
    this.shown = this.settings;
    this.controls.show(this.shown, this);
    for (const element of this.inPage) element.hidden = this.isReal;
    this.play.hidden = this.isReal || this.still.matches;
    this.clock.hidden = !this.isReal;
    $("restart").disabled = !this.mayChange;
    this.play.textContent = this.state.paused ? "Play" : "Pause";
    this.speed.value = String(this.state.speed);
    this.redraw();
  }

  redraw() {
    this.stale = true;
  }

  // -- frames ------------------------------------------------------------------------------------------------

  frame(now) {
    requestAnimationFrame((next) => this.frame(next));
    const passed = Math.min(0.1, (now - (this.before ?? now)) / 1000);
    this.before = now;
    const { journal } = this.engine;
    if (!this.isReal && !this.state.paused && journal.state !== null && passed > 0) {
      this.attempt(() => this.inside.pass(passed * this.state.speed));
      this.stale = true;
      if (this.settings !== this.shown) this.showAll(); // an event of the address has changed them
    }
    if (this.isReal && journal.state !== null && (!this.still.matches || now - this.drawn > 1000 * SLOW)) {
      this.adopt();
      this.stale = true;
    }
    if (!this.stale || journal.state === null) return;
    this.stale = false;
    this.drawn = now;
    $("waits").hidden = true;
    this.view.draw(journal);
    this.showNumbers(journal, now);
    this.watch(journal.state);
  }

  /** Takes on the settings of the servers, once. */
  adopt() {
    if (!this.adopts && this.mayChange) return;
    const { settings } = this.real.journal;
    const next = { ...this.state.settings, ...settings };
    this.adopts = false;
    if (JSON.stringify(next) === JSON.stringify(this.state.settings)) return;
    this.state.settings = next;
    this.replace();
    this.showAll();
  }

  showNumbers(journal, now) {
    const { state, histogram } = journal;
    const put = (name, text) => {
      const cell = this.cells.get(name);
      if (cell.textContent !== text) cell.textContent = text;
    };
    put("Updates", plain(state.updates));
    put("Time", `${plain(Number(state.time.toFixed(1)), 4)} s`);
    put("Loss", plain(state.loss));
    put("Staleness", plain(meanOf(histogram)));
    put("Waiting", `${Math.round(100 * state.waiting)} %`);
    put("Pushed", bytesText(state.bytes));
    if (!this.isReal) {
      this.range.max = String(Math.max(this.inside.furthest, 1e-9));
      this.range.value = String(state.time);
      this.range.setAttribute("aria-valuetext", `${plain(state.time)} seconds, ${plain(state.updates)} updates`);
    }
    if ($("numbers").open && (this.state.paused || now - (this.tabled ?? 0) > 1000)) {
      this.tabled = now;
      this.showTable(this.view.table(journal));
    }
  }

  showTable({ head, rows }) {
    const cells = (tag, row) => row.map((one, k) => make(tag, tag === "th" ? { scope: "col" } : { "data-column": head[k] }, String(one)));
    $("numbers").querySelector("div").replaceChildren(
      make("table", {}, make("thead", {}, make("tr", {}, ...cells("th", head))), make("tbody", {}, ...rows.map((row) => make("tr", {}, ...cells("td", row))))));
  }

  /** Tells a divergence, once. */
  watch(state) {
    if (state.diverged > 0 && this.diverged !== state.diverged) this.say(`diverged at update ${plain(state.diverged)}`);
    this.diverged = state.diverged;
  }
}
