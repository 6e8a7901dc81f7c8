// Bytes: what gradients cost on the wire, by codec, and what a codec still owes.

import { bytesText, make, plain } from "../draw.js";
import { choices } from "../settings.js";
import { Chart } from "./chart.js";

export class BytesView {
  constructor(root, app) {
    this.app = app;
    const pair = make("div", { class: "pair" });
    this.bars = make("div", { class: "bars" });
    this.caption = make("p", { class: "caption" });
    pair.append(make("div", { class: "panel" }, make("h3", {}, "Bytes pushed in this run"), this.bars));
    root.append(pair, this.caption);
    this.chart = new Chart(pair, { title: "Residual norm, mean of the workers", x: app.isReal ? "seconds" : "virtual seconds", y: "norm" });
  }

  draw(journal) {
    const { codecs, state } = journal;
    const names = new Map(choices("codec", this.app.core));
    const entries = [...codecs].map(([codec, { bytes, pushes }]) => [names.get(codec), bytes, pushes]);
    if (entries.length > 0) entries.push(["all, had they been Float32", state.bytesPlain, state.pushes]);
    const most = Math.max(1, ...entries.map(([, bytes]) => bytes));
    this.bars.replaceChildren(...entries.map(([name, bytes, pushes]) => barOf(name, bytes, pushes, most)));
    if (entries.length === 0) this.bars.append(make("p", {}, "Nothing has been pushed yet: press Play or Step."));
    const lack = lackOf(journal);
    const residuals = lack === "" ? journal.residuals : [];
    this.chart.draw([residuals.map(([time]) => time), residuals.map(([, norm]) => norm)], ["norm"], lack);
    const ratio = state.bytes > 0 ? state.bytesPlain / state.bytes : NaN;
    const owes = state.residual > 0 ? ` A worker still owes a gradient of norm ${plain(state.residual)}.` : "";
    this.caption.textContent = state.bytes > 0 ? `${bytesText(state.bytes)} were pushed, ${comparison(ratio)} Float32 would have taken.${owes}` : "";
  }

  table(journal) {
    const names = new Map(choices("codec", this.app.core));
    const rows = [...journal.codecs].map(([codec, { bytes, pushes }]) => [names.get(codec), pushes, bytes, plain(bytes / pushes)]);
    return { head: ["codec", "pushes", "bytes", "bytes per push"], rows };
  }
}

/** Why no residual is drawn. */
function lackOf({ settings, state, residuals }) {
  if (residuals.some(([, norm]) => norm > 0)) return "";
  if (settings.codec === "float32") return "Float32 drops nothing, so no worker owes anything: choose another codec to see what it drops.";
  if (!settings.error_feedback) return "Without error feedback nobody keeps what the codec drops.";
  return state.bytes > 0 ? "So far the codec has dropped nothing." : "Nothing has been pushed yet: press Play or Step.";
}

function comparison(ratio) {
  if (!(ratio >= 1)) return ratio > 0 ? `${plain(1 / ratio)} times as many as` : "as many as";
  return ratio === 1 ? "as many as" : `${plain(ratio)} times fewer than`;
}

function barOf(name, bytes, pushes, most) {
  const bar = make("span", { class: "bar" });
  bar.style.width = `${Math.max(0.5, (100 * bytes) / most)}%`;
  const text = make("span", {}, `${name}: ${bytesText(bytes)}, ${bytesText(bytes / Math.max(1, pushes))} a push`);
  return make("div", { class: "barline" }, text, bar);
}
