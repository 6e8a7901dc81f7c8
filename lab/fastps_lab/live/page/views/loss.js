// Loss: against updates, and against time.

import { make, plain } from "../draw.js";
import { Chart } from "./chart.js";

export class LossView {
  constructor(root, app) {
    this.app = app;
    const pair = make("div", { class: "pair" });
    this.caption = make("p", { class: "caption" });
    root.append(pair, this.caption);
    this.charts = [
      new Chart(pair, { title: "Loss against updates", x: "updates", y: "loss above the least", log: true }),
      new Chart(pair, { title: "Loss against time", x: app.isReal ? "seconds" : "virtual seconds", y: "loss above the least", log: true }),
    ];
  }

  draw(journal) {
    const least = this.app.core.problem(journal.settings.problem).least;
    const rows = journal.curve.filter((row) => Number.isFinite(row[2]));
    const loss = rows.map((row) => Math.max(row[2] - least, 1e-12));
    const first = rows.length > 1 ? "" : journal.state.updates === 0 ? "No update yet: press Play or Step." : "The loss is not computed at every update: let it go on.";
    this.charts.forEach((chart, k) => chart.draw([rows.map((row) => row[k]), loss], ["loss above the least"], first));
    const last = rows.at(-1);
    this.caption.textContent = last === undefined ? "" : `Loss ${plain(last[2], 4)} after ${plain(last[0])} updates; the least there is: ${plain(least, 4)}.`;
  }

  table(journal) {
    const rows = journal.curve.slice(-40).map((row) => [row[0], plain(row[1], 5), row[2], Number.isFinite(row[3]) ? row[3] : ""]);
    return { head: ["updates", "time", "loss", "test error %"], rows: rows.reverse() };
  }
}
