"""`WarmStart`: one worker trains first, before the others start."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fastps._shared.checks import as_seconds, at_least, given, invalid
from fastps.modes._mode import Mode

__all__ = ["WarmStart"]


@dataclass(frozen=True)
class WarmStart(Mode):
    """Warm start (Dean et al., NIPS 2012): only the first worker trains for some steps; the others wait and
    start from its values.

    The first worker trains as with `fastps.Async`; the others wait in `Worker`'s constructor. If it leaves
    before it has taken its steps, the next one continues from there. After those steps all continue with
    `then`; a worker that joins later starts with `then`.

    Args:
        steps: Steps that the first worker takes, >= 1.
        then: The mode after that; not another `WarmStart`.
        timeout: Maximum seconds that another worker waits, > 0.

    Raises:
        ConfigError: An argument is out of range.

    >>> fastps.WarmStart(steps=100, then=fastps.Bounded(staleness=3))
    WarmStart(steps=100, then=Bounded(staleness=3), timeout=86400.0)
    """

    steps: int
    then: Mode
    timeout: float = 86400.0

    _kind: ClassVar[str] = "warm_start"

    def __post_init__(self) -> None:
        given(self, "steps", at_least(1, "steps", self.steps))
        if not isinstance(self.then, Mode) or self.then.warm_up_steps:
            raise invalid("then", "a mode other than WarmStart", self.then)
        given(self, "timeout", as_seconds("timeout", self.timeout))

    @property
    def after_warm_up(self) -> Mode:
        return self.then

    @property
    def warm_up_steps(self) -> int:
        return self.steps

    @property
    def warm_up_timeout(self) -> float:
        return self.timeout
