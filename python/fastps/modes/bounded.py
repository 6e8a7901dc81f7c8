"""`Bounded`: no worker runs far ahead of the slowest one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fastps._shared.checks import at_least, given
from fastps.modes._mode import Mode

__all__ = ["Bounded"]


@dataclass(frozen=True)
class Bounded(Mode):
    """Stale synchronous parallel (Ho et al., NIPS 2013): every gradient is applied when it arrives, and no
    worker is more than `staleness` steps ahead of the slowest live one.

    A worker's clock counts its steps and starts at the slowest worker's clock. At the end of a step, when its
    push is applied, it waits until the slowest clock is at most `staleness` behind; then it fetches. Its
    values therefore contain all pushes except those of the last `staleness` steps of others. A worker that
    is closed, killed or misses its lease is dropped; if it returns, it joins as a new one.

    All workers of a group must use the same value.

    Args:
        staleness: Steps, >= 0; with 0, all workers take each step together.

    Raises:
        ConfigError: An argument is out of range.

    >>> fastps.Bounded(staleness=3)
    Bounded(staleness=3)
    """

    staleness: int

    waits_for_others: ClassVar[bool] = True
    exchanges: ClassVar[bool] = True
    _kind: ClassVar[str] = "bounded"

    def __post_init__(self) -> None:
        given(self, "staleness", at_least(0, "staleness", self.staleness))
