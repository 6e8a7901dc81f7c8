// Staleness: how old gradients are, and the momentum that they make.

import { make, plain } from "../draw.js";
import { Chart } from "./chart.js";

export class StalenessView {
  constructor(root, app) {
    this.app = app;
    const pair = make("div", { class: "pair" });
    this.numbers = make("dl", { class: "numbers" });
    this.caption = make("p", { class: "caption" });
    root.append(pair, this.caption);
    this.chart = new Chart(pair, { title: "Staleness of the applied gradients", x: "changes by others since the values were pulled", y: "pushes", bars: true, told: "staleness" });
    pair.append(make("div", { class: "panel" }, make("h3", {}, "Momentum"), this.numbers));
  }

  draw(journal) {
    const { histogram, state, settings } = journal;
    let most = histogram.length - 1;
    while (most > 0 && histogram[most] === 0) most -= 1;
    const shown = Math.max(8, most + 2);
    const none = histogram.every((pushes) => pushes === 0) ? "No gradient has been applied yet: press Play or Step." : "";
    this.chart.draw([Array.from({ length: shown }, (_, k) => k), histogram.slice(0, shown)], ["pushes"], none);
    const entries = [
      ["Mean staleness", plain(meanOf(histogram))],
      ["Largest staleness", plain(most)],
      ["Momentum that asynchrony amounts to on average, 1 − 1/M", settings.mode === "async" ? plain(1 - 1 / settings.workers) : "–"],
      ["Momentum fitted to this path", plain(state.fit)],
      ["Rate fitted to this path", plain(state.fitRate)],
      ["Momentum in force on the server", plain(state.momentum)],
      ["Pushes refused as too stale or late", plain(state.refused)],
    ];
    this.numbers.replaceChildren(...entries.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]));
    this.caption.textContent = [freshOf(settings), fitOf(state, settings)].join(" ");
  }

  table(journal) {
    const rows = journal.histogram.map((pushes, staleness) => [staleness === 255 ? "255 and more" : staleness, pushes]);
    return { head: ["staleness", "pushes"], rows: rows.filter(([, pushes]) => pushes > 0) };
  }
}

/** Why gradients are fresh or not in this mode. */
function freshOf({ mode, workers, bound }) {
  if (workers === 1) return "One worker alone has nobody whose changes its gradients could miss.";
  if (mode === "sync") return "Sync computes every version from gradients of the version before: none is stale.";
  if (mode === "bounded") return `Bounded keeps workers within ${bound} steps of each other, which bounds the staleness, too.`;
  return "While a worker computes, others push: so many changes its gradient does not know of.";
}

/** Why two numbers that mean the same differ, or one is missing. */
function fitOf({ fit }, { mode, problem }) {
  if (problem === "digits") return "No momentum is fitted to the net: the fit needs a path in a plane.";
  if (!Number.isFinite(fit)) return "The fit needs a longer path.";
  if (mode !== "async") return "1 − 1/M is for workers that do not wait.";
  return "The fitted momentum is that of this one noisy path; 1 − 1/M is the mean over many, for a rate that stays and times that are exponential.";
}

export function meanOf(histogram) {
  const pushes = histogram.reduce((sum, count) => sum + count, 0);
  return pushes === 0 ? NaN : histogram.reduce((sum, count, staleness) => sum + count * staleness, 0) / pushes;
}
