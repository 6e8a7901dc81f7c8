// The frame of the essay: blocks of text with controls in it, a figure that answers to them, one sentence of
// insight, a table of the figure's numbers, and the link that restores all of it.

import { make, plain, theme } from "../draw.js";

/** Milliseconds of a frame that computing may take. */
const BUDGET = 2.5;

/** A number in a sentence; tests compare its full value with the table. */
export function number(name, value, text = plain(value)) {
  return `<b data-name="${name}" data-value="${value}">${text}</b>`;
}

/** What a block's id and control are called in the address. */
export function isEssayPart(part) {
  return /^(?:essay|[a-z]+)\.[a-z]*(?:=|$)/.test(part);
}

export class Essay {
  /**
   * @param root where it goes
   * @param sections each with id, question and blocks
   * @param core the core in WebAssembly
   * @param real connection to the servers of this machine, or null
   */
  constructor(root, sections, core, real) {
    this.core = core;
    this.blocks = new Map();
    this.jobs = new Set();
    this.at = "";
    const given = new Map(location.hash.slice(1, 8193).split("&").filter(isEssayPart).map((part) => part.split("=")));
    const seen = new IntersectionObserver((entries) => {
      for (const { isIntersecting, target } of entries) if (isIntersecting) this.blocks.get(target.id.slice(6)).appear();
    }, { rootMargin: "40% 0px" });
    sections.forEach((section, k) => {
      const id = `essay.${section.id}`;
      const box = make("section", { class: "section", id, "aria-labelledby": `${id}-title` },
        make("h2", { id: `${id}-title` }, make("span", { class: "count" }, String(k + 1)), section.question));
      root.append(box);
      for (const spec of section.blocks) {
        const block = new Block(this, spec, given, real);
        this.blocks.set(spec.id, block);
        box.append(block.root);
        seen.observe(block.root);
      }
      document.getElementById("contents").append(make("li", {}, make("a", { href: `#${id}`, onclick: (event) => this.go(event, section.id) }, section.short)));
    });
    const again = () => this.blocks.forEach((block) => block.draw());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
    document.fonts.ready.then(again);
    const chosen = [...given.keys()].find((key) => key.startsWith("essay."));
    if (chosen !== undefined) {
      this.at = chosen.slice(6);
      document.getElementById(chosen)?.scrollIntoView();
    }
  }

  go(event, id) {
    event.preventDefault();
    this.at = id;
    const box = document.getElementById(`essay.${id}`);
    box.scrollIntoView();
    box.querySelector("input, select, button")?.focus({ preventScroll: true });
    this.keep();
  }

  /** Writes the state into the address. */
  keep() {
    const parts = [...this.blocks.values()].flatMap((block) => block.parts());
    history.replaceState(null, "", `#${[`essay.${this.at}`, ...parts].join("&")}`);
  }

  /** Lets a block compute in the next frames. */
  work(block) {
    if (this.jobs.size === 0) requestAnimationFrame(() => this.frame());
    this.jobs.add(block);
  }

  frame() {
    const late = performance.now() + BUDGET;
    for (const block of this.jobs) {
      if (block.advance(late)) this.jobs.delete(block);
      if (performance.now() >= late) break;
    }
    if (this.jobs.size > 0) requestAnimationFrame(() => this.frame());
  }
}

/** One figure beside its text. */
class Block {
  constructor(essay, spec, given, real) {
    this.essay = essay;
    this.spec = spec;
    this.real = real;
    this.values = {};
    this.shown = [];
    for (const [name, control] of Object.entries(spec.controls)) {
      if (control.kind !== "action") this.values[name] = valueOf(control, given.get(`${spec.id}.${name}`));
    }
    this.canvas = make("canvas", { class: `drawing ${spec.shape ?? ""}`, role: "img", "aria-label": spec.title });
    this.insight = make("p", { class: "insight", "aria-live": "polite" });
    this.numbers = make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": `Numbers: ${spec.title}` });
    this.more = make("details", { class: "behind", ontoggle: () => this.showTable() }, make("summary", {}, "Numbers of this figure"), this.numbers);
    const words = make("div", { class: "words" });
    const text = typeof spec.text === "string" ? spec.text : spec.text(real);
    words.innerHTML = text.replace(/\{(\w+)\}([.,;]?)/g, '<span class="glued"><span data-control="$1"></span>$2</span>');
    for (const place of words.querySelectorAll("[data-control]")) place.replaceWith(this.control(place.dataset.control));
    words.append(this.insight);
    this.caption = make("figcaption", {}, spec.caption);
    this.root = make("div", { class: "block", id: `block-${spec.id}` }, words, make("figure", {}, this.canvas, this.caption, this.more));
    new ResizeObserver(() => this.draw()).observe(this.canvas);
    if (spec.drag !== undefined) this.drag();
    if (Object.values(spec.controls).some(({ kind }) => kind === "action")) this.follow();
  }

  /** A block with actions follows the servers, if there are any: it reads them again twice a second while it is seen. */
  follow() {
    const { real } = this;
    if (real === null) return;
    let read = 0;
    real.follow(() => this.show(), () => {}, () => {
      if (this.job === undefined || performance.now() - read < 500) return;
      read = performance.now();
      this.begin();
    });
  }

  show() {
    for (const show of this.shown) show();
  }

  control(name) {
    const control = this.spec.controls[name];
    const id = `${this.spec.id}-${name}`;
    const shape = { slide, choice, flag, action }[control.kind](id, control, (value) => this.set({ [name]: value }), this);
    this.shown.push(() => shape.show(this.values[name]));
    shape.show(this.values[name]);
    return shape.element;
  }

  /** What of the state is not as at the beginning. */
  parts() {
    return Object.entries(this.spec.controls)
      .filter(([name, control]) => control.kind !== "action" && this.values[name] !== control.start)
      .map(([name]) => `${this.spec.id}.${name}=${encodeURIComponent(this.values[name])}`);
  }

  set(values) {
    Object.assign(this.values, values);
    this.show();
    this.begin();
    this.essay.at = this.root.parentElement.id.slice(6);
    this.essay.keep();
  }

  /** Is about to be seen: only then it computes. */
  appear() {
    if (this.job === undefined) this.begin();
  }

  begin() {
    this.job?.return(); // frees what the last one holds
    this.job = this.spec.compute(this.essay.core, { ...this.values }, this);
    this.root.dataset.state = "computes";
    this.essay.work(this);
  }

  /** Computes until a time; whether it is done. */
  advance(late) {
    let partial;
    try {
      do {
        const { done, value } = this.job.next();
        if (done) {
          this.take(value);
          return true;
        }
        partial = value ?? partial;
      } while (performance.now() < late);
    } catch (error) {
      this.insight.textContent = `It could not be computed: ${error.message}`;
      this.root.dataset.state = "failed";
      return true;
    }
    if (partial !== undefined) {
      this.data = partial;
      this.draw();
    }
    return false;
  }

  take(data) {
    this.data = data;
    this.insight.innerHTML = this.spec.insight(data);
    this.canvas.setAttribute("aria-label", `${this.spec.title}. ${this.insight.textContent}`);
    this.draw();
    this.showTable();
    this.root.dataset.state = "done";
  }

  draw() {
    if (this.data === undefined || this.canvas.clientWidth < 20) return;
    this.spec.draw(penOf(this.canvas, this.essay.core), this.data, this);
  }

  showTable() {
    if (!this.more.open || this.data === undefined) return;
    const { head, rows } = this.spec.table(this.data);
    const cell = (one) => make("td", { "data-value": String(one) }, typeof one === "number" ? plain(one, 4) : String(one));
    this.numbers.replaceChildren(make("table", {},
      make("thead", {}, make("tr", {}, ...head.map((one) => make("th", { scope: "col" }, one)))),
      make("tbody", {}, ...rows.map((row) => make("tr", {}, ...row.map(cell))))));
  }

  /** A point of the plane follows the pointer; its sliders do the same from the keyboard. */
  drag() {
    const move = (event) => {
      if (this.toPlane === undefined) return;
      const box = this.canvas.getBoundingClientRect();
      const point = this.toPlane(event.clientX - box.left, event.clientY - box.top);
      if (point === null) return;
      const [x, y] = this.spec.drag;
      this.set({ [x]: nearest(this.spec.controls[x], point[0]), [y]: nearest(this.spec.controls[y], point[1]) });
    };
    this.canvas.classList.add("drags");
    this.canvas.addEventListener("pointerdown", (event) => {
      this.canvas.setPointerCapture(event.pointerId);
      move(event);
    });
    this.canvas.addEventListener("pointermove", (event) => {
      if (event.buttons === 1) move(event);
    });
  }
}

/** A context in CSS pixels, and the colours. */
function penOf(canvas, core) {
  const scale = window.devicePixelRatio || 1;
  const { clientWidth: width, clientHeight: height } = canvas;
  const [columns, rows] = [Math.round(width * scale), Math.round(height * scale)];
  if (canvas.width !== columns || canvas.height !== rows) Object.assign(canvas, { width: columns, height: rows });
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  context.textBaseline = "middle";
  context.lineJoin = "round";
  context.font = font();
  return { context, width, height, core, colours: theme() };
}

export function font(weight = 400, size = 13) {
  return `${weight} ${size}px "Source Sans 3", system-ui, sans-serif`;
}

// -- controls ------------------------------------------------------------------------------------------------

function nearest({ least, most, step }, value) {
  const on = least + Math.round((value - least) / step) * step;
  return Number(Math.min(most, Math.max(least, on)).toFixed(6));
}

/** The valid value that a text of the address means. */
function valueOf(control, text) {
  if (text === undefined) return control.start;
  const given = /%(?![\da-f]{2})/i.test(text) ? "" : decodeURIComponent(text);
  if (control.kind === "flag") return given === "true";
  const options = control.options?.map(([value]) => value);
  if (options !== undefined) return options.find((value) => String(value) === given) ?? control.start;
  return given === "" || Number.isNaN(Number(given)) ? control.start : nearest(control, Number(given));
}

/** A slider in the sentence, with its value; `options` are the places where it stops, if they are not even. */
function slide(id, control, onChange) {
  const { options } = control;
  const range = options === undefined ? control : { least: 0, most: options.length - 1, step: 1 };
  const output = make("output", { for: id });
  const input = make("input", { type: "range", id, min: range.least, max: range.most, step: range.step, "aria-label": control.label,
    oninput: () => onChange(options === undefined ? Number(input.value) : options[Number(input.value)][0]) });
  const text = (value) => (control.text ?? plain)(value);
  return {
    element: make("span", { class: "knob" }, input, output),
    show(value) {
      input.value = String(options === undefined ? value : options.findIndex(([one]) => one === value));
      input.setAttribute("aria-valuetext", text(value));
      output.textContent = text(value);
    },
  };
}

function choice(id, control, onChange) {
  const select = make("select", { id, "aria-label": control.label, onchange: () => onChange(control.options[select.selectedIndex][0]) },
    ...control.options.map(([value, text]) => make("option", { value: String(value) }, text)));
  return { element: select, show: (value) => { select.value = String(value); } };
}

function flag(id, control, onChange) {
  const button = make("button", { type: "button", id, onclick: () => onChange(button.getAttribute("aria-pressed") !== "true") });
  return {
    element: button,
    show(value) {
      button.setAttribute("aria-pressed", String(value));
      button.textContent = value ? control.undo : control.label;
    },
  };
}

/** Something that is done to the servers of this machine; there is no button without them. */
function action(id, control, onChange, block) {
  const { real } = block;
  const button = make("button", { type: "button", id, onclick: () => control.act(real).catch((error) => { block.caption.textContent = error.message; }) }, control.label);
  return {
    element: button,
    show() {
      button.hidden = real === null;
      button.disabled = real === null || !real.connected || !real.controls;
    },
  };
}
