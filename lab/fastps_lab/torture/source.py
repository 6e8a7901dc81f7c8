"""Sources of a run's actions: a plan, or the history of another run."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from typing import Protocol

from fastps_lab.torture.history import Event
from fastps_lab.torture.plan import Action, Plan

__all__ = ["Planned", "Recorded", "Source"]


class Source(Protocol):
    """Source of the actions."""

    lanes: tuple[str, ...]

    def next(self, lane: str, now: float) -> tuple[Action, float] | None:
        """Returns a lane's next action and the seconds to wait before it; None: no more."""


class Planned:
    """Actions of a plan, for some time."""

    def __init__(self, plan: Plan, seconds: float) -> None:
        self.lanes = plan.lanes
        self._plan, self._seconds = plan, seconds
        self._turns: Counter[str] = Counter()

    def next(self, lane: str, now: float) -> tuple[Action, float] | None:
        """As `Source`."""
        action = self._plan.action(self._plan.step(lane, self._turns[lane]))
        self._turns[lane] += 1
        # A client pauses between its calls instead.
        pause = 0.0 if lane.startswith("client") else float(action.args.get("pause", 0.0))
        return None if now + pause >= self._seconds else (action, pause)


class Recorded:
    """Actions of a history, each no earlier than in that run."""

    def __init__(self, events: Iterable[Event]) -> None:
        self._actions: dict[str, deque[tuple[float, Action]]] = {}
        for event in events:
            if event["ev"] == "action":
                action = Action(event["step"], event["lane"], event["kind"], event["args"])
                self._actions.setdefault(action.lane, deque()).append((event["t"], action))
        self.lanes = tuple(self._actions)

    def next(self, lane: str, now: float) -> tuple[Action, float] | None:
        """As `Source`."""
        if not self._actions[lane]:
            return None
        at, action = self._actions[lane].popleft()
        return action, max(0.0, at - now)
