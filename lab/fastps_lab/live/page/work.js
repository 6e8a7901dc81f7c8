// A Web Worker: computes a lesson's number while the page stays alive.

import { coreOf } from "./engine/core.js";
import { LESSONS } from "./lessons.js";

onmessage = async ({ data }) => {
  try {
    const core = await coreOf(data.module);
    const lesson = LESSONS.find((one) => one.id === data.lesson);
    let done = 0;
    const result = lesson.run(core, lesson, () => {
      done += 1;
      postMessage({ done });
    });
    postMessage({ result });
  } catch (error) {
    postMessage({ error: String(error.message ?? error) });
  }
};
