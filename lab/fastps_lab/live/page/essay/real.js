// 7: servers and workers of this machine, or the recording of a run of them.

import { number } from "./frame.js";
import { curves } from "./plot.js";
import { REAL } from "./recorded.js";
import { DEFAULTS } from "../settings.js";

/** Seconds before and after a kill that are compared. */
const AROUND = 2;
/** Seconds of the recording. */
const LENGTH = Math.floor(REAL.points.at(-1)[0]);
/** What the run trains: it has something to learn for a minute. */
const SETTINGS = { ...DEFAULTS, problem: "digits", x: 0, y: 0, workers: 4, optimizer: "adagrad", lr: 0.05 };

export const machines = {
  id: "real",
  title: "Updates of real servers over time, with what was killed",
  controls: {
    start: { kind: "action", label: "Start the run", act: (way) => way.set(SETTINGS).then(() => way.act("restart")) },
    worker: { kind: "action", label: "kill −9 a worker", act: (way) => way.act("kill", way.journal.state.workers.find(({ phase }) => phase === "computes")?.index ?? 0) },
    server: { kind: "action", label: "kill −9 a server", act: (way) => way.act("kill_server", 0) },
    until: { kind: "slide", label: "Seconds of the recording", least: 1, most: LENGTH, step: 1, start: LENGTH, text: (value) => `${value} s` },
  },
  text: (way) => `<p>Until here one page did it all, in time that it made up. The same code runs on machines. <code>fastps-lab live</code> starts two servers
    and some workers as processes of yours, and this section then has buttons that kill them${way === null ? ". This is the recording of such a run, up to {until}.</p>" : `:</p>
    <p class="buttons">{start} {worker} {server}</p>`}
    <p>A worker that dies takes the gradient with it that it was computing, and nothing else. A server that dies starts again from its data
    directory. The ledger is what tells: each push that a worker was told is applied has a version, and a server that came back counts which of them it lacks.</p>`,
  caption: "Applied updates over seconds; dashed lines are kills.",
  /** A block that follows the servers reads them again with each frame. */
  *compute(core, { until }, { real: way }) {
    if (way === null) {
      const [points, messages] = [REAL.points, REAL.messages].map((rows) => rows.filter(([time]) => until === LENGTH || time <= until));
      return { ...REAL, points, messages, recorded: true, end: until };
    }
    const { state, curve, messages } = way.journal;
    return {
      recorded: false,
      end: Infinity,
      points: curve.map(([updates, time, loss]) => [time, updates, loss]),
      messages: messages.map(([, time, ...rest]) => [time, ...rest]),
      pushes: state?.pushes ?? 0,
      lost: state?.lost ?? 0,
    };
  },
  insight(data) {
    const { recorded, points, pushes, lost, end } = data;
    const begin = recorded ? `In ${end} second${end === 1 ? "" : "s"} the servers make ${number("made", points.at(-1)[1])} updates. ` : "";
    if (points.length < 2) return "The servers are up. Start the run.";
    const kills = killsOf(data).map((kill) => {
      const { time, worker, before, after, gap } = kill;
      if (worker >= 0) {
        return `Worker ${worker + 1} is killed at ${number("workerAt", time, time.toFixed(1))} s: the servers make ${number("before", before)} updates in the ` +
          `${AROUND} s before and ${number("after", after)} in the ${AROUND} s after, for nobody waits for it. `;
      }
      return `A server is killed at ${number("serverAt", time, time.toFixed(1))} s: for ${number("gap", gap, gap.toFixed(1))} s there is no update, then all go on. `;
    });
    if (end < LENGTH) return `${begin}${kills.join("")}`;
    return `${begin}${kills.join("")}Of ${number("pushes", pushes)} pushes that workers were told are applied until the run was stopped, ${number("lost", lost)} ${lost === 1 ? "is" : "are"} lost.`;
  },
  draw(pen, data) {
    const { points } = data;
    const whole = (data.recorded ? REAL.points : points).at(-1) ?? [1, 1];
    const events = killsOf(data, 0).map(({ time, worker }) => ({ at: time, text: worker >= 0 ? `worker ${worker + 1} killed` : "server killed" }));
    curves(pen, { left: 0, top: 0, width: pen.width, height: pen.height }, {
      x: { label: "seconds", least: 0, most: Math.max(10, whole[0]) },
      y: { label: "updates", least: 0, most: Math.max(10, whole[1] * 1.05) },
      series: [{ letter: "A", name: data.recorded ? "recorded" : "this machine", points }],
      events,
    });
  },
  table(data) {
    const { points, messages, pushes, lost, end } = data;
    return {
      head: ["what", "second", "updates", "loss"],
      rows: [
        ...points.map(([time, updates, loss]) => ["update", time, updates, loss ?? ""]),
        ...messages.filter(([, kind]) => kind === "killed").map(([time, , worker]) => [worker >= 0 ? `worker ${worker + 1} killed` : "server killed", time, "", ""]),
        ...(end < LENGTH ? [] : [["pushes acknowledged", "", pushes, ""], ["of them lost", "", lost, ""]]),
      ],
    };
  },
};

/** The last kill of a worker and of a server that are long enough ago, and what they cost. */
function killsOf({ points, messages, end }, ago = AROUND) {
  const killed = messages.filter(([time, kind]) => kind === "killed" && time + ago <= end);
  const last = [killed.findLast(([, , worker]) => worker >= 0), killed.findLast(([, , worker]) => worker < 0)];
  return last.filter((one) => one !== undefined).sort((a, b) => a[0] - b[0]).map(([time, , worker]) => {
    const at = (second) => points.findLast(([when]) => when <= second)?.[1] ?? 0;
    const next = points.filter(([when]) => when > time - 1 && when <= time + 8);
    const gap = next.slice(1).reduce((most, [when], k) => Math.max(most, when - next[k][0]), 0);
    return { time, worker, before: at(time) - at(time - AROUND), after: at(time + AROUND) - at(time), gap };
  });
}
