"""The checker's findings."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Violation"]


@dataclass(frozen=True)
class Violation:
    """An invariant that does not hold."""

    invariant: str
    step: int | None
    evidence: str

    def __str__(self) -> str:
        where = "" if self.step is None else f" (step {self.step})"
        return f"{self.invariant}{where}: {self.evidence}"
