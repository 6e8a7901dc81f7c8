// Break it: what a visitor does to workers and servers, and what the product answers.

import { make, plain } from "../draw.js";

export class BreakView {
  constructor(root, app) {
    this.app = app;
    this.workers = make("div", { class: "actors" });
    this.servers = make("div", { class: "actors" });
    this.join = make("button", { type: "button", onclick: () => app.act("join", -1) }, "Let one more worker join");
    this.log = make("ol", { class: "log", tabindex: "0", "aria-label": "What happened" });
    this.counts = make("p", { class: "caption" });
    root.append(
      make("h3", {}, "Workers"), this.workers, make("p", {}, this.join),
      make("h3", {}, "Servers"), this.servers,
      make("h3", {}, "What happened"), this.counts, this.log,
    );
    this.key = "";
  }

  draw(journal) {
    const { state } = journal;
    const key = JSON.stringify([state.workers.map((one) => [one.index, one.pid, isUp(one) || one.phase]), journal.servers, this.app.mayChange]);
    if (key !== this.key) this.build(journal);
    this.key = key;
    this.counts.textContent =
      `${plain(state.pushes)} pushes acknowledged, ${plain(state.refused)} refused` +
      `${this.app.isReal ? `, ${plain(state.lost)} lost with a server (VersionsLost)` : ""}; ${plain(state.updates)} updates.`;
    const said = journal.messages.slice(-60).reverse();
    if (said.length === 0) this.log.replaceChildren(make("li", {}, "Nothing yet: kill, pause or break a worker above."));
    else if (this.said !== said[0] || this.log.children.length !== said.length) {
      this.said = said[0];
      this.log.replaceChildren(...said.map(([, time, kind, , text]) =>
        make("li", { class: kind }, make("span", { class: "time" }, `${plain(time, 4)} s`), ` ${text}`)));
    }
  }

  build(journal) {
    // A button that had the focus keeps it.
    const focused = document.activeElement?.dataset?.key;
    const off = !this.app.mayChange;
    this.join.disabled = off;
    const button = (text, what, number, disabled, about) =>
      make("button", { type: "button", disabled: disabled || off, "data-key": `${what}${number}`, "aria-label": `${text} ${about}`,
        onclick: () => this.app.act(what, number) }, text);
    this.workers.replaceChildren(...journal.state.workers.map((worker) => {
      const name = `worker ${worker.index}`;
      const down = !isUp(worker);
      const process = worker.pid === undefined ? "" : `, process ${worker.pid}`;
      return make("div", { class: "actor" }, make("span", {}, `${name}${process}${down ? `: ${worker.phase}` : ""}`),
        button("Kill", "kill", worker.index, worker.phase === "gone", name),
        button("Pause", "pause", worker.index, down, name),
        button("NaN gradient", "nan", worker.index, down, `of ${name}`));
    }));
    if (this.app.isReal) {
      this.servers.replaceChildren(...journal.servers.map((server) =>
        make("div", { class: "actor" },
          make("span", {}, `shard ${server.shard}, process ${server.pid}${server.up ? "" : ": starting"}${server.starts > 1 ? `, start ${server.starts}` : ""}`),
          button("Kill", "kill_server", server.shard, !server.up, `the server of shard ${server.shard}`))));
    } else {
      this.servers.replaceChildren(make("p", {}, "There is no server process in a page. To kill one, run ", make("code", {}, "fastps-lab live"), "."));
    }
    if (focused) this.workers.parentElement.querySelector(`[data-key="${focused}"]`)?.focus();
  }

  table(journal) {
    return { head: ["time", "kind", "worker", "what"], rows: journal.messages.slice(-100).reverse().map(([, time, kind, worker, text]) => [plain(time, 4), kind, worker < 0 ? "" : worker, text]) };
  }
}

function isUp(worker) {
  return worker.phase !== "gone" && worker.phase !== "paused";
}
