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
    this.chart.draw([journal.residuals.map(([time]) => time), journal.residuals.map(([, norm]) => norm)], ["norm"]);
    const ratio = state.bytes > 0 ? state.bytesPlain / state.bytes : NaN;
    this.caption.textContent =
      `${bytesText(state.bytes)} were pushed, ${comparison(ratio)} Float32 would have taken. ` +
      `A worker still owes a gradient of norm ${plain(state.residual)}.`;
  }

  table(journal) {
    const names = new Map(choices("codec", this.app.core));
    const rows = [...journal.codecs].map(([codec, { bytes, pushes }]) => [names.get(codec), pushes, bytes, plain(bytes / pushes)]);
    return { head: ["codec", "pushes", "bytes", "bytes per push"], rows };
  }
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
