"""Simulated runs: many workers under a virtual clock, in one thread, on a real `fastps.Store`.

`run` gives every logical worker a real `fastps.Worker`, a separate client. Only time is simulated: when a
gradient is ready, when a worker is killed, and when its lease ends. Modes, codecs, staleness corrections and
optimizers are those of the store.

>>> from fastps import simulate
>>> store, params = fastps.Store(), {"w": np.ones(2, np.float32)}
>>> store.register("w", params["w"], optimizer=fastps.SGD(lr=0.05))
>>> def gradient(params, worker, step, rng):
...     return {"w": params["w"]}, float(np.square(params["w"]).sum() / 2)
>>> trace = simulate.run(store, params, gradient, workers=8, updates=100, seed=1)
>>> trace.updates, int(trace.staleness.max()) > 0, bool(trace.loss[-1] < 0.1)
(100, True, True)
"""

from __future__ import annotations

from fastps.simulate.durations import Constant, Duration, Exponential, Pareto
from fastps.simulate.errors import DeadlockError, GradientError
from fastps.simulate.events import Event, Join, Kill, Pause
from fastps.simulate.run import run
from fastps.simulate.trace import Evaluation, EventRecord, Trace

__all__ = [
    "Constant",
    "DeadlockError",
    "Duration",
    "Evaluation",
    "Event",
    "EventRecord",
    "Exponential",
    "GradientError",
    "Join",
    "Kill",
    "Pareto",
    "Pause",
    "Trace",
    "run",
]
