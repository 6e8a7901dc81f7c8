"""`WarmStart`: one worker trains alone first."""

from __future__ import annotations

from dataclasses import dataclass

from fastps._shared.checks import as_seconds, at_least, given, invalid
from fastps.modes._mode import Binding, Mode

__all__ = ["WarmStart"]


@dataclass(frozen=True)
class WarmStart(Mode):
    """Warm start (Dean et al., NIPS 2012): the first worker that comes trains alone for some steps; the
    others wait, and begin with its values.

    The first one trains as with `fastps.Async`. The others wait in `Worker`'s constructor. If it is gone
    before its steps are taken, the next one goes on where it was. When they are taken, all go on with `then`.
    Whoever comes while others train already begins with `then`.

    Args:
        steps: Steps that are taken alone, >= 1.
        then: The mode after that; not another `WarmStart`.
        timeout: The longest that another worker waits, in seconds, > 0.

    Raises:
        ConfigError: An argument out of its range.

    >>> fastps.WarmStart(steps=100, then=fastps.Bounded(staleness=3))
    WarmStart(steps=100, then=Bounded(staleness=3), timeout=86400.0)
    """

    steps: int
    then: Mode
    timeout: float = 86400.0

    def __post_init__(self) -> None:
        given(self, "steps", at_least(1, "steps", self.steps))
        if not isinstance(self.then, Mode) or isinstance(self.then, WarmStart):
            raise invalid("then", "a mode, and not WarmStart", self.then)
        given(self, "timeout", as_seconds("timeout", self.timeout))

    def _binding(self) -> Binding:
        return "warm_start", [self.steps], []
