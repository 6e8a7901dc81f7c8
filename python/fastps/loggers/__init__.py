"""Loggers of training: what each step did, in files, in TensorBoard, or as a line of the terminal.

``on_step=fastps.loggers.JSONL("steps.jsonl")`` of `fastps.Worker`, `fastps.jax.Worker` and
`fastps.torch.ParameterServerOptimizer`. A logger is called with each `fastps.Step`; close it after the last
one, or use it as a context manager.

>>> import tempfile
>>> path, store = tempfile.mkdtemp() + "/steps.jsonl", fastps.Store()
>>> store.register("w", np.zeros(2, np.float32), optimizer=fastps.SGD(lr=0.5))
>>> params, ones = {"w": np.zeros(2, np.float32)}, np.ones(2, np.float32)
>>> with fastps.loggers.JSONL(path) as logger:
...     with fastps.Worker(store, params, fastps.Async(), on_step=logger) as worker:
...         worker.step({"w": ones}, lr=0.25, loss=3.0)
>>> print(open(path).read().strip())
{"step": 1, "loss": 3.0, "staleness": 0.0, "bytes": 8.0, "scale": 1.0, "global_step": 1.0, "lr": 0.25}
"""

from fastps.loggers.console import Console
from fastps.loggers.logger import Collection, Logger
from fastps.loggers.targets import JSONL, TensorBoard, WandB

__all__ = ["JSONL", "Collection", "Console", "Logger", "TensorBoard", "WandB"]
