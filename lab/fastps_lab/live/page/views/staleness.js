// Staleness: how old gradients are, and the momentum that they make.

import { make, plain } from "../draw.js";
import { Chart } from "./chart.js";

export class StalenessView {
  constructor(root, app) {
    this.app = app;
    const pair = make("div", { class: "pair" });
    this.numbers = make("dl", { class: "numbers" });
    root.append(pair);
    this.chart = new Chart(pair, { title: "Staleness of the applied gradients", x: "changes by others since the values were pulled", y: "pushes", bars: true });
    pair.append(make("div", { class: "panel" }, make("h3", {}, "Momentum"), this.numbers));
  }

  draw(journal) {
    const { histogram, state, settings } = journal;
    let most = histogram.length - 1;
    while (most > 0 && histogram[most] === 0) most -= 1;
    const shown = Math.max(8, most + 2);
    this.chart.draw([Array.from({ length: shown }, (_, k) => k), histogram.slice(0, shown)], ["pushes"]);
    const entries = [
      ["Mean staleness", plain(meanOf(histogram))],
      ["Largest staleness", plain(most)],
      ["Momentum of one worker that asynchrony amounts to, 1 − 1/M", plain(1 - 1 / settings.workers)],
      ["Momentum fitted to this path", plain(state.fit)],
      ["Rate fitted to this path", plain(state.fitRate)],
      ["Momentum in force on the server", plain(state.momentum)],
      ["Pushes refused as too stale or late", plain(state.refused)],
    ];
    this.numbers.replaceChildren(...entries.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]));
  }

  table(journal) {
    const rows = journal.histogram.map((pushes, staleness) => [staleness === 255 ? "255 and more" : staleness, pushes]);
    return { head: ["staleness", "pushes"], rows: rows.filter(([, pushes]) => pushes > 0) };
  }
}

export function meanOf(histogram) {
  const pushes = histogram.reduce((sum, count) => sum + count, 0);
  return pushes === 0 ? NaN : histogram.reduce((sum, count, staleness) => sum + count * staleness, 0) / pushes;
}
