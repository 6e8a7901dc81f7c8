// A curve in uPlot, in the colours of the theme.

import { make, plain, theme } from "../draw.js";

export class Chart {
  /**
   * @param root where it goes
   * @param options title, names of the axes, whether y is logarithmic, whether points are bars, its height,
   * and what x is called where its value is told
   */
  constructor(root, { title, x, y, log = false, bars = false, height = 300, told = x }) {
    this.options = { title, x, y, log, bars, height, told };
    this.nothing = make("p", { class: "nothing", hidden: true });
    this.box = make("div", { class: "chart", role: "img", "aria-label": `${title}; the table has the numbers.` });
    root.append(make("div", { class: "panel picture" }, make("h3", {}, title), this.box, this.nothing));
    this.key = "";
  }

  /** Shows columns of numbers, or says why there are none; a series is a name, or a name with colour and dashes. */
  draw(columns, series, lack = "") {
    this.nothing.hidden = lack === "";
    if (this.nothing.textContent !== lack) this.nothing.textContent = lack;
    const colours = theme();
    const width = this.box.clientWidth;
    const key = [width, colours.ink, colours.paper, JSON.stringify(series)].join();
    if (width < 20) return;
    if (key !== this.key) this.build(width, colours, series);
    this.key = key;
    this.plot.setData(columns);
  }

  build(width, colours, series) {
    this.plot?.destroy();
    this.box.replaceChildren();
    const { x, y, log, bars, height, told } = this.options;
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
    const value = (_, number) => plain(number);
    const lines = series.map((one) => (typeof one === "string" ? { label: one } : one)).map(({ label, colour, dash }) => ({
      label,
      value,
      stroke: colour ?? colours.compute,
      fill: bars ? colours.compute : undefined,
      width: 2,
      dash,
      points: { show: (plot) => plot.data[0].length === 1 }, // one point has no line
      paths: bars ? globalThis.uPlot.paths.bars({ size: [0.9, 60] }) : undefined,
    }));
    this.plot = new globalThis.uPlot(
      {
        width,
        height,
        cursor: { drag: { x: false, y: false }, points: { show: !bars } },
        scales: { x: { time: false }, y: log ? { distr: 3 } : { range: (_, least, most) => [Math.min(0, least), most > 0 ? most * 1.05 : 1] } },
        axes: [axis(x, 36), axis(y, 68)],
        series: [{ label: told, value }, ...lines],
      },
      [[], ...series.map(() => [])],
      this.box,
    );
  }
}
