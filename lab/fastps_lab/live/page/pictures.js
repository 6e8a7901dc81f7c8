// What a browser without WebAssembly shows: a stored picture of each lesson.

import { make } from "./draw.js";
import { LESSONS } from "./lessons.js";

export function showPictures(reason) {
  document.getElementById("laboratory").hidden = true;
  const notice = document.getElementById("trouble");
  notice.textContent = reason;
  notice.hidden = false;
  const without = document.getElementById("without");
  without.hidden = false;
  without.append(...LESSONS.map((lesson) => {
    const stored = document.getElementById(`picture-${lesson.id}`);
    const picture = make("img", { src: stored?.textContent ?? `lessons/${lesson.id}.png`, alt: lesson.sentence });
    return make("figure", {}, make("h2", {}, lesson.title), picture, make("figcaption", {}, lesson.sentence));
  }));
}
