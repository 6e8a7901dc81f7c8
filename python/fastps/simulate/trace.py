"""`Trace`: what a simulated run did."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fastps.simulate.events import Event

__all__ = ["Evaluation", "EventRecord", "Row", "Trace"]


class EventRecord(NamedTuple):
    """Outcome of an event.

    Attributes:
        time: Virtual seconds.
        event: The `Kill`, `Pause` or `Join`.
        effect: Its effect, in words.
    """

    time: float
    event: Event
    effect: str


class Evaluation(NamedTuple):
    """Result of `evaluate`.

    Attributes:
        updates: Updates that the values contain.
        time: Virtual seconds.
        value: As returned.
    """

    updates: int
    time: float
    value: Any


class Row(NamedTuple):
    """One step of one worker."""

    time: float
    worker: int
    step: int
    version: int
    staleness: int
    scale: float
    loss: float
    bytes: int


@dataclass(frozen=True, eq=False)
class Trace:
    """Trace of a simulated run. The arrays have one entry for each finished step, in the order of time.

    Attributes:
        times: Virtual seconds at which the step ended, float64.
        worker: Index of the worker, int64.
        step: The worker's step, from 1, int64.
        version: Updates of the store since the run began, this push's included; 0 if the push was refused, if
            there was none, or if the worker lost its place in this step, int64.
        loss: As returned by the gradient function; NaN if it returned none.
        staleness: Changes by others since the values that the gradient was computed at; -1 if unknown. The
            receipt tells this and the next two: with ``overlap`` it comes with the worker's next step.
        scale: Factor that the store put on the gradient; NaN without a receipt.
        bytes: Bytes of the encoded gradients.
        waiting: For each worker, the virtual seconds that it waited for others.
        present: For each worker, the virtual seconds from its start to its end.
        events: Outcomes of the events.
        evaluations: Results of `evaluate`.
        updates: Updates that the store made.
        seconds: Virtual seconds of the whole run.
        complete: Whether the store made as many updates as were asked for. If not, `run` has warned.
        ended: Why the run ended.
        settings: The arguments of `run` in words, by name.
    """

    times: NDArray[np.float64]
    worker: NDArray[np.int64]
    step: NDArray[np.int64]
    version: NDArray[np.int64]
    staleness: NDArray[np.int64]
    scale: NDArray[np.float64]
    loss: NDArray[np.float64]
    bytes: NDArray[np.int64]
    waiting: NDArray[np.float64]
    present: NDArray[np.float64]
    events: list[EventRecord]
    evaluations: list[Evaluation]
    updates: int
    seconds: float
    complete: bool
    ended: str
    settings: dict[str, str] = field(default_factory=dict)

    @property
    def waiting_share(self) -> float:
        """The share of all workers' time that they waited, 0 to 1."""
        present = float(self.present.sum())
        return float(self.waiting.sum()) / present if present else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Converts the trace to lists, numbers and strings for JSON; non-finite numbers become None."""
        events = [{"time": t, "event": repr(event), "effect": effect} for t, event, effect in self.events]
        return {
            "settings": self.settings,
            "updates": self.updates,
            "seconds": self.seconds,
            "complete": self.complete,
            "ended": self.ended,
            **{name: _plain(getattr(self, name)) for name in _ARRAYS},
            "events": events,
            "evaluations": [_plain(evaluation._asdict()) for evaluation in self.evaluations],
        }

    def plot(self) -> Any:
        """A matplotlib figure of loss, staleness and waiting (extra ``repro``); save it with ``savefig``."""
        from fastps.simulate import plot

        return plot.figure(self)


_ARRAYS = ("times", "worker", "step", "version", "staleness", "scale", "loss", "bytes", "waiting", "present")


def _plain(value: Any) -> Any:
    """A value as JSON has it, if it is one of NumPy or made of such."""
    if isinstance(value, (np.ndarray, np.generic)):
        value = value.tolist()
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def columns(rows: list[Row]) -> dict[str, NDArray[Any]]:
    """The rows as arrays by the names that `Trace` has."""
    table = list(zip(*rows, strict=True)) or [()] * len(Row._fields)
    kinds = [np.float64 if name in ("time", "scale", "loss") else np.int64 for name in Row._fields]
    names = ["times" if name == "time" else name for name in Row._fields]
    return {name: np.array(column, kind) for name, column, kind in zip(names, table, kinds, strict=True)}
