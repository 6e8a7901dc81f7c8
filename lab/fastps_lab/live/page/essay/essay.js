// The seven sections, in their order.

import { Essay } from "./frame.js";
import { bits, local } from "./bytes.js";
import { momentum } from "./momentum.js";
import { race } from "./race.js";
import { machines } from "./real.js";
import { slow, survives } from "./slow.js";
import { step } from "./step.js";
import { wait } from "./wait.js";

const SECTIONS = [
  { id: "step", short: "A step", question: "What does one gradient do?", blocks: [step] },
  { id: "race", short: "The race", question: "Who is first at the lowest point?", blocks: [race] },
  { id: "wait", short: "Waiting", question: "What if one of two workers is slow?", blocks: [wait] },
  { id: "momentum", short: "Momentum", question: "Why do many workers overshoot?", blocks: [momentum] },
  { id: "slow", short: "Slow and dead", question: "Who pays for the slow and the dead?", blocks: [slow, survives] },
  { id: "bytes", short: "Fewer bytes", question: "How little can a worker send?", blocks: [bits, local] },
  { id: "real", short: "For real", question: "What does kill −9 cost?", blocks: [machines] },
];

export function openEssay(root, core, real) {
  return new Essay(root, SECTIONS, core, real);
}
