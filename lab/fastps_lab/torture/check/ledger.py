"""Accounts of requested, acknowledged, refused, doubtful and lost pushes: the bounds of every value."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from fastps.commands.kit.account import Account
from fastps_lab.torture.history import Event
from fastps_lab.torture.tensors import WORKERS

__all__ = ["Books", "Key", "Register", "WorkerAccount"]

#: A life, a tensor, and one of its slices.
Key = tuple[int, str, int]


@dataclass
class Register:
    """A tensor that only one client assigns: it holds the last value, or a later one that is in doubt.

    Attributes:
        applied: Acknowledged values, in order.
        open: Values in doubt or under way, later than the last acknowledged one.
        overwritten: Values in doubt that an acknowledged one overwrote; its loss brings them back.
    """

    applied: list[float] = field(default_factory=lambda: [0.0])
    open: list[float] = field(default_factory=list)
    overwritten: list[float] = field(default_factory=list)

    def settle(self, value: float) -> None:
        """Enters an acknowledged assignment, which overwrites earlier ones."""
        self.applied.append(value)
        self.overwritten += [earlier for earlier in self.open if earlier < value]
        self.open = [later for later in self.open if later > value]

    def refuse(self, value: float) -> None:
        """Enters an assignment that was not applied."""
        self.open = [other for other in self.open if other != value]
        self.overwritten = [other for other in self.overwritten if other != value]

    def lose(self, count: int) -> None:
        """Enters the loss of the last assignments."""
        count = min(count, len(self.applied) - 1)
        # One that is in doubt may be among them.
        self.open += self.applied[len(self.applied) - count :]
        self.applied = self.applied[: len(self.applied) - count]
        self.open += [value for value in self.overwritten if value > self.applied[-1]]
        self.overwritten = [value for value in self.overwritten if value < self.applied[-1]]

    @property
    def allowed(self) -> set[float]:
        """Values that a pull may find."""
        return {self.applied[-1], *self.open}

    @property
    def former(self) -> set[float]:
        """Values that a pull may also find after a crash whose loss is not reported yet."""
        return {*self.applied, *self.overwritten}


@dataclass
class WorkerAccount:
    """A worker's steps, by its own count."""

    steps: int = 0
    carried: int = 1
    uncertain: bool = False
    lost: dict[str, int] = field(default_factory=dict)
    #: Steps that an exception interrupted: each counts once or not at all.
    torn: int = 0
    tensors: tuple[str, ...] = WORKERS

    def bounds(self, tensor: str) -> tuple[float, float]:
        """Minimum (after a flush) and maximum of its column."""
        lost = self.lost.get(tensor, 0)
        least = 0.0 if self.uncertain else self.steps - self.torn - lost * self.carried
        return max(0.0, least), float(self.steps - lost)


class Books:
    """The accounts of all clients, up to the last event entered.

    Attributes:
        accounts: By life, tensor and slice.
        registers: By tensor.
        workers: By life.
        settled: Lives with nothing under way and all losses reported.
        reported: Number of a life's pushes reported lost; None if a server did not know it.
        unreported: Slices whose outcome a call did not report: (life, number of the call, slices).
    """

    def __init__(self) -> None:
        self.accounts: dict[Key, Account] = defaultdict(Account)
        self.registers: dict[str, Register] = defaultdict(Register)
        self.workers: dict[int, WorkerAccount] = {}
        self.settled: set[int] = set()
        self.reported: dict[int, int | None] = defaultdict(int)
        self.unreported: list[tuple[int, int, list[Any]]] = []
        self._layout: dict[str, list[int]] = {}
        self._calls: dict[tuple[int, int], dict[tuple[str, int], float]] = {}
        self._open: dict[tuple[int, int], tuple[str, int, float]] = {}

    def take(self, event: Event) -> None:
        """Enters an event."""
        enter = getattr(self, f"_on_{event['ev']}", None)
        if enter is not None and event.get("life", 0) is not None:
            enter(event)

    def _layout_of(self, tensor: str, shard: int) -> Iterator[tuple[int, bool]]:
        """Yields the slices of a tensor on a shard, each with whether it is the only one."""
        found = [k for k, where in enumerate(self._layout.get(tensor, [shard])) if where == shard]
        for k in found:
            yield k, len(found) == 1

    def _on_ask(self, event: Event) -> None:
        life = event["life"]
        parts = {(tensor, k): units for tensor, k, units in event["parts"]}
        self._calls[life, event["n"]] = parts
        for (tensor, k), units in parts.items():
            if tensor.startswith("assign/"):
                self.registers[tensor].open.append(units)
            else:
                self.accounts[life, tensor, k].ask(units)

    def _on_done(self, event: Event) -> None:
        life = event["life"]
        parts = self._calls.pop((life, event["n"]), {})
        for tensor, k in map(tuple, event["applied"]):
            units = parts.pop((tensor, k), 0.0)
            self._settle(life, tensor, k, units, "applied")
        for tensor, k in map(tuple, event["refused"]):
            units = parts.pop((tensor, k), 0.0)
            self._settle(life, tensor, k, units, "refused")
        for number, tensor, k in event["doubts"]:
            units = parts.pop((tensor, k), 0.0)
            self._open[life, number] = (tensor, k, units)
            if not tensor.startswith("assign/"):
                self.accounts[life, tensor, k].doubt(units)
        if parts:
            self.unreported.append((life, event["n"], sorted(parts)))
        for lost in event["lost"]:
            self._lose(life, *lost)

    def _settle(self, life: int, tensor: str, k: int, units: float, how: str) -> None:
        if tensor.startswith("assign/"):
            register = self.registers[tensor]
            register.settle(units) if how == "applied" else register.refuse(units)
        elif how == "applied":
            self.accounts[life, tensor, k].apply(units)
        else:
            self.accounts[life, tensor, k].refuse(units)

    def _on_fate(self, event: Event) -> None:
        life, fate = event["life"], event["fate"]
        tensor, k, units = self._open.pop((life, event["doubt"]), ("", 0, 0.0))
        if tensor.startswith("assign/"):
            if fate == "fenced":
                self.registers[tensor].refuse(units)
            elif fate == "applied" and units in self.registers[tensor].open:
                self.registers[tensor].settle(units)
        elif tensor:
            self.accounts[life, tensor, k].resolve(units, fate)

    def _lose(self, life: int, tensor: str, shard: int, own: int | None, seen: int, now: int) -> None:
        before = self.reported[life]
        self.reported[life] = None if own is None or before is None else before + own
        most = max(0, seen - now) if own is None else own
        if tensor.startswith("assign/"):
            self.registers[tensor].lose(most)
            return
        for k, is_only in self._layout_of(tensor, shard):
            self.accounts[life, tensor, k].lose(own if own is not None and is_only else 0, most)

    def _on_worker(self, event: Event) -> None:
        self.workers[event["life"]] = WorkerAccount(
            event["steps"],
            event["carried"],
            event["uncertain"],
            dict(event["lost"]),
            event.get("torn", 0),
            tuple(event.get("tensors", WORKERS)),
        )

    def _on_settled(self, event: Event) -> None:
        self.settled.add(event["life"])

    def _on_layout(self, event: Event) -> None:
        self._layout = dict(event["tensors"])
