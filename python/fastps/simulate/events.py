"""Events of a simulated run: workers that are killed, that pause, and that join late."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fastps._shared.checks import as_moment, as_seconds, at_least, given, invalid

__all__ = ["Event", "Join", "Kill", "Pause", "check_events"]


@dataclass(frozen=True)
class Kill:
    """Kills a worker. It keeps its place until its lease ends; gradients that it has not pushed are lost.

    Args:
        worker: Index of the worker.
        at: Virtual seconds, >= 0.

    >>> fastps.simulate.Kill(3, at=10)
    Kill(worker=3, at=10.0)
    """

    worker: int
    at: float

    def __post_init__(self) -> None:
        given(self, "worker", at_least(0, "worker", self.worker))
        given(self, "at", as_moment("at", self.at))


@dataclass(frozen=True)
class Pause:
    """Stops a worker for some time. If that is longer than the lease, the worker loses its place.

    A worker that has lost its place joins again as a new one when it continues; a gradient that it has not
    pushed is dropped, and so are its residual and its local steps.

    Args:
        worker: Index of the worker.
        at: Virtual seconds, >= 0.
        seconds: How long, in virtual seconds, > 0.

    >>> fastps.simulate.Pause(5, at=8, seconds=4)
    Pause(worker=5, at=8.0, seconds=4.0)
    """

    worker: int
    at: float
    seconds: float

    def __post_init__(self) -> None:
        given(self, "worker", at_least(0, "worker", self.worker))
        given(self, "at", as_moment("at", self.at))
        given(self, "seconds", as_seconds("seconds", self.seconds))


@dataclass(frozen=True)
class Join:
    """Lets one more worker join. Its index follows those of all earlier ones.

    Args:
        at: Virtual seconds, >= 0.

    >>> fastps.simulate.Join(at=20)
    Join(at=20.0)
    """

    at: float

    def __post_init__(self) -> None:
        given(self, "at", as_moment("at", self.at))


Event = Kill | Pause | Join


def check_events(events: Iterable[object], workers: int) -> list[Event]:
    """The events; raises `ConfigError` if one is none, or names a worker that never exists."""
    known: list[Event] = []
    if not isinstance(events, Iterable):
        raise invalid("events", "a list of Kill, Pause and Join", events)
    for event in events:
        if not isinstance(event, (Kill, Pause, Join)):
            raise invalid("events", "Kill, Pause and Join", event)
        known.append(event)
    most = workers + sum(isinstance(event, Join) for event in known)
    for event in known:
        if not isinstance(event, Join) and event.worker >= most:
            raise invalid("events", f"workers from 0 to {most - 1}", event)
    return known
