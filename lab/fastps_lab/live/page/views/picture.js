// What every drawn view has: a canvas, what hovering tells, and a sentence where there is nothing to draw.

import { make } from "../draw.js";

export class Picture {
  /**
   * @param root where it goes
   * @param attributes of the canvas
   * @param tell what there is at a point of the canvas, as text; "" for nothing
   */
  constructor(root, attributes, tell) {
    this.tell = tell;
    this.at = null;
    this.canvas = make("canvas", attributes);
    this.tip = make("p", { class: "tip", "aria-hidden": "true", hidden: true });
    this.nothing = make("p", { class: "nothing", hidden: true });
    root.append(make("div", { class: "picture" }, this.canvas, this.nothing, this.tip));
    const point = ({ offsetX, offsetY }) => this.point([offsetX, offsetY]);
    this.canvas.addEventListener("pointermove", point);
    this.canvas.addEventListener("pointerdown", point);
    this.canvas.addEventListener("pointerleave", () => this.point(null));
  }

  /** Points at a place, or at none. */
  point(at) {
    this.at = at;
    this.show();
  }

  /** Shows what is there now; a view calls it after each drawing, for what is there may have moved. */
  show() {
    const text = this.at === null ? "" : this.tell(...this.at);
    this.tip.hidden = text === "";
    if (text === "") return;
    if (this.tip.textContent !== text) this.tip.textContent = text;
    const [x, y] = this.at;
    const late = x > this.canvas.width / (window.devicePixelRatio || 1) / 2; // then it stands on the left of the pointer
    this.tip.style.left = `${late ? x - 14 : x + 14}px`;
    this.tip.style.top = `${Math.max(0, y - 36)}px`;
    this.tip.style.transform = late ? "translateX(-100%)" : "";
  }

  /** Says why there is nothing in the picture, or that there is something: "". */
  lack(reason) {
    this.nothing.hidden = reason === "";
    if (this.nothing.textContent !== reason) this.nothing.textContent = reason;
  }
}
