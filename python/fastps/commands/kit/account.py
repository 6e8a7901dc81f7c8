"""The account of one client's pushes to one slice: asked, acknowledged, refused, doubtful and lost ones."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Account"]


@dataclass
class Account:
    """One client's pushes to one slice, in units of its column."""

    asked: float = 0.0
    applied: float = 0.0
    refused: float = 0.0
    #: In doubt when the call ended, whatever the outcome.
    doubted: float = 0.0
    #: Of those, the units later reported as applied, or as fenced.
    reported_applied: float = 0.0
    reported_fenced: float = 0.0
    lost_least: float = 0.0
    lost_most: float = 0.0
    open_doubts: int = 0
    #: Minimum and maximum of one push.
    units: tuple[float, float] = (1.0, 1.0)

    def ask(self, units: float) -> None:
        """Enters a push that begins."""
        self.asked += units
        self.units = (min(self.units[0], units), max(self.units[1], units))

    def apply(self, units: float) -> None:
        """Enters an acknowledged push."""
        self.applied += units

    def refuse(self, units: float) -> None:
        """Enters a refused push."""
        self.refused += units

    def doubt(self, units: float) -> None:
        """Enters a push without an answer."""
        self.doubted += units
        self.open_doubts += 1

    def resolve(self, units: float, fate: str) -> None:
        """Enters the reported outcome of a doubt."""
        self.open_doubts -= 1
        self.reported_applied += units if fate == "applied" else 0.0
        self.reported_fenced += units if fate == "fenced" else 0.0

    def lose(self, least: int, most: int) -> None:
        """Enters lost pushes. One in doubt may be among them, and be fenced later."""
        self.lost_least += max(0, least - self.open_doubts) * self.units[0]
        self.lost_most += most * self.units[1]

    @property
    def bounds(self) -> tuple[float, float]:
        """Minimum and maximum of the value, from all reports."""
        least = self.applied + self.reported_applied - self.lost_most
        return max(0.0, least), self.asked - self.refused - self.reported_fenced - self.lost_least

    @property
    def bounds_without_fates(self) -> tuple[float, float]:
        """Minimum and maximum of the value, without the reported outcomes of doubts."""
        return max(0.0, self.applied - self.lost_most), self.asked - self.refused - self.lost_least
