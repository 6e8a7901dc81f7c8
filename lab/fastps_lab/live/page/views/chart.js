// A curve in uPlot, in the colours of the theme.

import { make, plain, theme } from "../draw.js";

export class Chart {
  /**
   * @param root where it goes
   * @param options title, names of the axes, whether y is logarithmic, whether points are bars
   */
  constructor(root, { title, x, y, log = false, bars = false }) {
    this.options = { title, x, y, log, bars };
    this.box = make("div", { class: "chart", role: "img", "aria-label": `${title}; the table has the numbers.` });
    root.append(make("div", { class: "panel" }, make("h3", {}, title), this.box));
    this.key = "";
  }

  /** Shows columns of numbers. */
  draw(columns, series) {
    const colours = theme();
    const width = this.box.clientWidth;
    const key = [width, colours.ink, colours.paper, ...series].join();
    if (width < 20) return;
    if (key !== this.key) this.build(width, colours, series);
    this.key = key;
    this.plot.setData(columns);
  }

  build(width, colours, series) {
    this.plot?.destroy();
    this.box.replaceChildren();
    const { x, y, log, bars } = this.options;
    const axis = (label, size) => ({
      label,
      labelSize: 18,
      labelFont: "12px system-ui, sans-serif",
      font: "12px system-ui, sans-serif",
      size,
      stroke: colours.soft,
      grid: { stroke: colours.line, width: 0.5 },
      ticks: { stroke: colours.line, width: 0.5 },
      values: (_, values) => values.map((value) => (value === null ? "" : plain(value))),
    });
    const lines = series.map((label, k) => ({
      label,
      stroke: [colours.compute, colours.wait, colours.pull][k % 3],
      fill: bars ? colours.compute : undefined,
      width: 2,
      dash: k === 1 ? [6, 4] : undefined,
      points: { show: (plot) => plot.data[0].length === 1 }, // one point has no line
      paths: bars ? globalThis.uPlot.paths.bars({ size: [0.9, 60] }) : undefined,
    }));
    this.plot = new globalThis.uPlot(
      {
        width,
        height: 300,
        legend: { show: series.length > 1 },
        cursor: { show: false },
        scales: { x: { time: false }, y: log ? { distr: 3 } : { range: (_, least, most) => [Math.min(0, least), most > 0 ? most * 1.05 : 1] } },
        axes: [axis(x, 36), axis(y, 68)],
        series: [{}, ...lines],
      },
      [[], ...series.map(() => [])],
      this.box,
    );
  }
}
