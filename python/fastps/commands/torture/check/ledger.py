"""Books of what was asked, acknowledged, refused, in doubt and told lost: the bounds of every value."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from fastps.commands.torture.history import Event
from fastps.commands.torture.tensors import WORKERS

__all__ = ["Account", "Books", "Key", "Register", "WorkerAccount"]

Key = tuple[int, str, int]
"""A life, a tensor, and a slice of it."""


@dataclass
class Account:
    """What one client pushed to one slice, in units of its column."""

    asked: float = 0.0
    applied: float = 0.0
    refused: float = 0.0
    doubted: float = 0.0
    """In doubt when the call ended, whatever became of it."""
    told_applied: float = 0.0
    """Of those, what was then said to be applied, or fenced."""
    told_fenced: float = 0.0
    lost_least: float = 0.0
    lost_most: float = 0.0
    open_doubts: int = 0
    units: tuple[float, float] = (1.0, 1.0)
    """The fewest and the most of one push."""

    def ask(self, units: float) -> None:
        """A push was begun."""
        self.asked += units
        self.units = (min(self.units[0], units), max(self.units[1], units))

    def apply(self, units: float) -> None:
        """It was acknowledged."""
        self.applied += units

    def refuse(self, units: float) -> None:
        """It was refused."""
        self.refused += units

    def doubt(self, units: float) -> None:
        """The call ended without an answer."""
        self.doubted += units
        self.open_doubts += 1

    def resolve(self, units: float, fate: str) -> None:
        """It was told what became of a doubt."""
        self.open_doubts -= 1
        self.told_applied += units if fate == "applied" else 0.0
        self.told_fenced += units if fate == "fenced" else 0.0

    def lose(self, least: int, most: int) -> None:
        """So many pushes were told lost. One in doubt may be among them, and be fenced later."""
        self.lost_least += max(0, least - self.open_doubts) * self.units[0]
        self.lost_most += most * self.units[1]

    @property
    def bounds(self) -> tuple[float, float]:
        """The least and the most that the value may be, by what was told."""
        least = self.applied + self.told_applied - self.lost_most
        return max(0.0, least), self.asked - self.refused - self.told_fenced - self.lost_least

    @property
    def bounds_without_fates(self) -> tuple[float, float]:
        """The same if nothing that was said about doubts is believed."""
        return max(0.0, self.applied - self.lost_most), self.asked - self.refused - self.lost_least


@dataclass
class Register:
    """A tensor that one client alone assigns: it holds the last value, or one that is in doubt behind it."""

    applied: list[float] = field(default_factory=lambda: [0.0])
    open: list[float] = field(default_factory=list)

    def settle(self, value: float) -> None:
        """An assignment was acknowledged; those before it are overwritten."""
        self.applied.append(value)
        self.open = [later for later in self.open if later > value]

    def refuse(self, value: float) -> None:
        """One is known not to be there."""
        self.open = [other for other in self.open if other != value]

    def lose(self, count: int) -> None:
        """The last ones were told lost."""
        count = min(count, len(self.applied) - 1)
        # One that is in doubt may be among them.
        self.open += self.applied[len(self.applied) - count :]
        self.applied = self.applied[: len(self.applied) - count]

    @property
    def allowed(self) -> set[float]:
        """What a pull may find."""
        return {self.applied[-1], *self.open}


@dataclass
class WorkerAccount:
    """What a worker's steps were, by its own count."""

    steps: int = 0
    carried: int = 1
    uncertain: bool = False
    lost: dict[str, int] = field(default_factory=dict)
    torn: int = 0
    """Steps that an exception interrupted: each counts once or not at all."""
    tensors: tuple[str, ...] = WORKERS

    def bounds(self, tensor: str) -> tuple[float, float]:
        """The least, once it has flushed, and the most that its column may be."""
        lost = self.lost.get(tensor, 0)
        least = 0.0 if self.uncertain else self.steps - self.torn - lost * self.carried
        return max(0.0, least), float(self.steps - lost)


class Books:
    """The accounts of all clients, as of the last event that was taken.

    Attributes:
        accounts: By life, tensor and slice.
        registers: By tensor.
        workers: By life.
        settled: Lives that have nothing under way and were told all.
        told: Own pushes told lost, by life; None where a server had forgotten it.
        untold: Slices of which a call said nothing: (life, number of the call, slices).
    """

    def __init__(self) -> None:
        self.accounts: dict[Key, Account] = defaultdict(Account)
        self.registers: dict[str, Register] = defaultdict(Register)
        self.workers: dict[int, WorkerAccount] = {}
        self.settled: set[int] = set()
        self.told: dict[int, int | None] = defaultdict(int)
        self.untold: list[tuple[int, int, list[Any]]] = []
        self._layout: dict[str, list[int]] = {}
        self._calls: dict[tuple[int, int], dict[tuple[str, int], float]] = {}
        self._open: dict[tuple[int, int], tuple[str, int, float]] = {}

    def take(self, event: Event) -> None:
        """Enters an event."""
        enter = getattr(self, f"_on_{event['ev']}", None)
        if enter is not None and event.get("life", 0) is not None:
            enter(event)

    def _layout_of(self, tensor: str, shard: int) -> Iterator[tuple[int, bool]]:
        """The slices of a tensor on a shard, and whether there is but one."""
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
            self.untold.append((life, event["n"], sorted(parts)))
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
        before = self.told[life]
        self.told[life] = None if own is None or before is None else before + own
        most = max(0, seen - now) if own is None else own
        if tensor.startswith("assign/"):
            self.registers[tensor].lose(most)
            return
        for k, alone in self._layout_of(tensor, shard):
            self.accounts[life, tensor, k].lose(own if own is not None and alone else 0, most)

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
