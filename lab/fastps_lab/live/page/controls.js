// The forms of controls, made from the table of settings: three stand open, the others are folded in groups.

import { make, plain } from "./draw.js";
import { CONTROLS, DEFAULTS, choices, startOf } from "./settings.js";

/** Those that stand open, for they change most of what there is to see. */
const MAIN = ["workers", "mode", "lr"];

export class Controls {
  /**
   * @param form where the groups go
   * @param main where those that stand open go
   * @param core names problems and optimizers
   * @param onChange called with the settings that a visitor has changed
   */
  constructor(form, main, core, onChange) {
    this.onChange = onChange;
    this.core = core;
    this.inputs = new Map();
    this.groups = new Map();
    for (const one of [form, main]) one.addEventListener("submit", (event) => event.preventDefault());
    for (const control of CONTROLS) {
      const row = this.row(control, core);
      if (MAIN.includes(control.name)) main.append(row);
      else this.group(control.group, form).append(row);
    }
  }

  /** The folded group of a name, whose summary says what is chosen in it. */
  group(name, form) {
    if (!this.groups.has(name)) {
      const chosen = make("span", {});
      const box = make("details", { class: "group" }, make("summary", {}, name, " ", chosen));
      this.groups.set(name, { box, chosen });
      form.append(box);
    }
    return this.groups.get(name).box;
  }

  row(control, core) {
    const id = `control-${control.name}`;
    const input = this.input(control, id, core);
    const row = make("div", { class: "control" }, make("label", { for: id }, control.label));
    if (input.type === "range") {
      const output = make("output", { for: id });
      row.append(make("div", { class: "slide" }, input, output));
      input.addEventListener("input", () => this.label(control, input, output));
      this.inputs.set(control.name, { control, input, output, row });
    } else {
      row.append(input);
      this.inputs.set(control.name, { control, input, row });
    }
    input.addEventListener("change", () => this.changed(control, input));
    if (control.page) row.append(make("span", { class: "refusal", id: `${id}-refused`, hidden: true }, "Off: the product refuses this."));
    return row;
  }

  input(control, id, core) {
    const { name, kind, least, most } = control;
    if (kind === "word") {
      const options = choices(name, core).map(([word, label]) => make("option", { value: word }, label));
      return make("select", { id, name }, ...options);
    }
    if (kind === "flag") return make("input", { id, name, type: "checkbox" });
    if (kind === "slide" || (kind === "whole" && !control.plain)) {
      return make("input", { id, name, type: "range", min: least, max: most, step: control.step ?? 1 });
    }
    return make("input", { id, name, type: "number", min: least, max: most, step: kind === "whole" ? 1 : "any" });
  }

  changed(control, input) {
    if (control.kind === "flag") this.onChange({ [control.name]: input.checked });
    else if (control.kind === "word") this.onChange({ [control.name]: input.value });
    else if (input.value !== "" && input.validity.valid) this.onChange({ [control.name]: Number(input.value) });
    else this.onChange({}, `${control.label}: expected a number from ${control.least} to ${control.most}`);
  }

  label(control, input, output) {
    const value = Number(input.value);
    output.textContent = value === control.none ? "none" : `${plain(value)} ${control.unit ?? ""}`;
  }

  /** Shows settings. */
  show(settings, { isReal, mayChange }) {
    for (const [name, { control, input, output, row }] of this.inputs) {
      const value = settings[name];
      row.hidden = control.when !== undefined && !control.when(settings);
      input.disabled = !mayChange || (control.page === true && isReal);
      if (control.kind === "flag") input.checked = value;
      else if (document.activeElement !== input || input.type !== "number") input.value = String(value);
      if (output !== undefined) this.label(control, input, output);
      if (control.page) row.querySelector(".refusal").hidden = value && !isReal;
    }
    for (const [name, { chosen }] of this.groups) chosen.textContent = this.chosenIn(name, settings);
    const refused = this.inputs.get("error_feedback").row.querySelector(".refusal");
    refused.textContent = isReal ? "The product refuses to go without it." : "Off: the product refuses this.";
  }

  /** What is chosen in a group: its words, the start, and what else is not as usual. */
  chosenIn(group, settings) {
    const usual = { ...DEFAULTS, ...startOf(settings.problem, this.core), x: NaN, y: NaN };
    const shown = CONTROLS.filter((control) => control.group === group && !MAIN.includes(control.name) && !this.inputs.get(control.name).row.hidden);
    return shown.map(({ name, label, kind, unit }) => {
      const value = settings[name];
      if (kind === "word") return choices(name, this.core).find(([word]) => word === value)[1];
      if (value === usual[name]) return "";
      return kind === "flag" ? `${label}: ${value ? "yes" : "no"}` : `${label} ${plain(value)}${unit ? ` ${unit}` : ""}`;
    }).filter(Boolean).join(", ") || "as usual";
  }
}
