// Where the page begins.

import { App } from "./app.js";
import { coreOf, loadModule } from "./engine/core.js";
import { takeToken } from "./engine/real.js";
import { showPictures } from "./pictures.js";

async function begin() {
  const token = takeToken();
  if (typeof WebAssembly === "undefined") {
    showPictures("This browser has no WebAssembly, so the page cannot run the parameter server: here is what each lesson shows.");
    return;
  }
  try {
    const module = await loadModule();
    new App(await coreOf(module), module, token);
  } catch (error) {
    showPictures(`The parameter server could not be started in this browser (${error.message}): here is what each lesson shows.`);
  }
}

begin();
