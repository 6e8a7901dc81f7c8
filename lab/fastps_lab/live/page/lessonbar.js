// The links of the lessons, and the one that is open: its sentence and its number.

import { freshState } from "./address.js";
import { make } from "./draw.js";
import { LESSONS, settingsOf } from "./lessons.js";

const $ = (id) => document.getElementById(id);

export class LessonBar {
  constructor(app, module) {
    this.app = app;
    this.module = module;
    this.results = new Map();
    this.links = new Map(LESSONS.map((lesson) => {
      const state = { ...freshState(app.core), settings: settingsOf(lesson, app.core), view: lesson.view, lesson: lesson.id, speed: 8 };
      return [lesson.id, make("a", { href: app.link(state) }, lesson.title)];
    }));
    $("lessons").append(...[...this.links.values()].map((link) => make("li", {}, link)));
  }

  /** Opens a lesson; "" closes it. */
  show(id) {
    const lesson = LESSONS.find((one) => one.id === id);
    for (const [name, link] of this.links) {
      if (name === id) link.setAttribute("aria-current", "true");
      else link.removeAttribute("aria-current");
    }
    $("lesson").hidden = lesson === undefined;
    if (this.open === id) return;
    this.open = id;
    this.worker?.terminate();
    this.worker = null;
    if (lesson === undefined) return;
    this.figure = make("p", { class: "result" });
    $("lesson").replaceChildren(make("h2", {}, lesson.title), make("p", {}, lesson.sentence), this.figure);
    if (this.results.has(id)) this.tell(this.results.get(id));
    else this.compute(lesson);
  }

  compute(lesson) {
    const progress = make("progress", { "aria-label": "Computing the number" });
    this.figure.replaceChildren(progress, " computing it now");
    const worker = newWorker();
    this.worker = worker;
    worker.onmessage = ({ data }) => {
      if (data.result !== undefined) {
        this.results.set(lesson.id, data.result);
        worker.terminate();
        if (this.open === lesson.id) this.tell(data.result);
      } else if (data.error !== undefined) {
        this.figure.textContent = `It could not be computed: ${data.error}`;
      }
    };
    worker.onerror = (event) => {
      this.figure.textContent = `It could not be computed: ${event.message ?? "the browser refuses a worker"}`;
    };
    worker.postMessage({ module: this.module, lesson: lesson.id });
  }

  tell(result) {
    this.figure.textContent = `${result.good ? "✓" : "✗"} ${result.text}`;
    this.figure.className = `result ${result.good ? "good" : "bad"}`;
    const head = make("tr", {}, ...result.head.map((one) => make("th", { scope: "col" }, String(one))));
    const rows = result.rows.map((row) => make("tr", {}, ...row.map((one) => make("td", {}, String(one)))));
    const table = make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Numbers of the lesson" }, make("table", {}, make("thead", {}, head), make("tbody", {}, ...rows)));
    $("lesson").querySelector("details")?.remove();
    $("lesson").append(make("details", {}, make("summary", {}, "Numbers behind it"), table));
    this.app.say(result.text);
  }
}

/** The worker lies beside the page, or in it. */
function newWorker() {
  const inlined = document.getElementById("work");
  if (inlined === null) return new Worker("work.js", { type: "module" });
  return new Worker(URL.createObjectURL(new Blob([inlined.textContent], { type: "text/javascript" })));
}
