// What each setting may be, and what it usually is: for the page, the core and the real workers, whose program
// reads the list as JSON. The core has the words of a setting in this order; `page`: real workers have no such one.

export const TABLE = [
  {"name": "problem", "kind": "word", "usual": "beale"},
  {"name": "x", "kind": "number", "usual": 1, "least": -100, "most": 100},
  {"name": "y", "kind": "number", "usual": 1, "least": -100, "most": 100},
  {"name": "workers", "kind": "whole", "usual": 8, "least": 1, "most": 64},
  {"name": "durations", "kind": "word", "usual": "exponential", "words": ["constant", "exponential", "pareto"]},
  {"name": "spread", "kind": "number", "usual": 1, "least": 1, "most": 20},
  {"name": "straggler", "kind": "number", "usual": 1, "least": 1, "most": 20},
  {"name": "delay", "kind": "number", "usual": 0, "least": 0, "most": 10},
  {"name": "seed", "kind": "whole", "usual": 1, "least": 0, "most": 4294967295},
  {"name": "mode", "kind": "word", "usual": "async", "words": ["async", "local", "bounded", "sync", "warm"]},
  {"name": "push_every", "kind": "whole", "usual": 5, "least": 1, "most": 100},
  {"name": "pull_every", "kind": "whole", "usual": 5, "least": 1, "most": 100},
  {"name": "local_lr", "kind": "number", "usual": 0.001, "least": 0, "most": 100},
  {"name": "bound", "kind": "whole", "usual": 3, "least": 0, "most": 64},
  {"name": "backup", "kind": "whole", "usual": 1, "least": 0, "most": 63},
  {"name": "warm_steps", "kind": "whole", "usual": 20, "least": 1, "most": 1000},
  {"name": "max_staleness", "kind": "whole", "usual": -1, "least": -1, "most": 64},
  {"name": "on_stale", "kind": "word", "usual": "scale", "words": ["scale", "reject"]},
  {"name": "delay_adaptive", "kind": "flag", "usual": true},
  {"name": "momentum_matching", "kind": "flag", "usual": false},
  {"name": "optimizer", "kind": "word", "usual": "sgd"},
  {"name": "lr", "kind": "number", "usual": 0.01, "least": 0, "most": 100},
  {"name": "momentum", "kind": "number", "usual": 0, "least": 0, "most": 0.99},
  {"name": "nesterov", "kind": "flag", "usual": false},
  {"name": "codec", "kind": "word", "usual": "float32", "words": ["float32", "bfloat16", "int8", "stochastic", "onebit"]},
  {"name": "error_feedback", "kind": "flag", "usual": true, "page": true}
];
