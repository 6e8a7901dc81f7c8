// Where the page begins: the essay at once, the laboratory when it is opened.

import { App } from "./app.js";
import { coreOf, loadModule } from "./engine/core.js";
import { Real, takeToken } from "./engine/real.js";
import { openEssay } from "./essay/essay.js";
import { isEssayPart } from "./essay/frame.js";
import { showPictures } from "./pictures.js";

async function begin() {
  const token = takeToken();
  if (typeof WebAssembly === "undefined") {
    showPictures("This browser has no WebAssembly, so the page cannot run the parameter server: here is what each lesson shows.");
    return;
  }
  try {
    const module = await loadModule();
    const core = await coreOf(module);
    const real = token === null ? null : new Real(token);
    openEssay(document.getElementById("essay"), core, real);
    openLaboratory(() => new App(core, module, real));
  } catch (error) {
    showPictures(`The parameter server could not be started in this browser (${error.message}): here is what each lesson shows.`);
  }
}

/** It starts when it is unfolded, or when the address has one of its settings. */
function openLaboratory(make) {
  const box = document.getElementById("laboratory");
  let app = null;
  box.addEventListener("toggle", () => {
    if (box.open) app ??= make();
  });
  const look = () => {
    if (box.open || !location.hash.slice(1).split("&").some((part) => part !== "" && !isEssayPart(part))) return;
    box.open = true;
    app ??= make();
    box.scrollIntoView();
  };
  addEventListener("popstate", look);
  look();
}

begin();
