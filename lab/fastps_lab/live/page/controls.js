// The form of controls, made from the table of settings.

import { make, plain } from "./draw.js";
import { CONTROLS, choices } from "./settings.js";

export class Controls {
  /**
   * @param form where they go
   * @param core names problems and optimizers
   * @param onChange called with the settings that a visitor has changed
   */
  constructor(form, core, onChange) {
    this.onChange = onChange;
    this.inputs = new Map();
    const groups = new Map();
    form.addEventListener("submit", (event) => event.preventDefault());
    for (const control of CONTROLS) {
      if (!groups.has(control.group)) {
        groups.set(control.group, make("fieldset", {}, make("legend", {}, control.group)));
        form.append(groups.get(control.group));
      }
      groups.get(control.group).append(this.row(control, core));
    }
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
    const refused = this.inputs.get("error_feedback").row.querySelector(".refusal");
    refused.textContent = isReal ? "The product refuses to go without it." : "Off: the product refuses this.";
  }
}
