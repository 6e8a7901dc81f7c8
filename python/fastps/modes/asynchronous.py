"""`Async`: every gradient is applied when it arrives."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from fastps._shared.checks import at_least, flag, given, invalid
from fastps.modes._mode import Mode

__all__ = ["Async"]


@dataclass(frozen=True)
class Async(Mode):
    """Asynchronous training: each step pushes gradients, applied when they arrive, and fetches values.

    Nobody waits for anybody. Each push says the versions that its gradients were computed at, so that its
    receipt tells the staleness: how many pushes of others came in between. With one worker, and without
    `overlap`, this is serial training by the server's optimizer, bit for bit.

    Args:
        max_staleness: The staleness tau beyond which `on_stale` says what to do; None: no bound.
        on_stale: ``"scale"``: the gradient counts by max_staleness / tau. ``"reject"``: the server refuses
            it; `Worker` counts that (``stats()["rejected"]``), drops the gradient and goes on.
        delay_adaptive: A gradient counts by min(1, C / tau), where C is the number of workers that push to
            the slice (Koloskova et al. 2022, Mishchenko et al. 2022). A single worker and equal workers are
            untouched; one that is much slower than the others does less harm.
        momentum_matching: The optimizer's momentum (SGD's, RMSprop's) gives way to what asynchrony adds
            (Mitliagkas et al. 2016): with A = mu / (1 - mu) - (C - 1) it is A / (1 + A), and 0 where A <= 0.
        overlap: True: the fetch of step k is installed at the end of step k + 1, so that push and fetch of a
            step travel while the next gradient is computed; gradients are then one step of this worker old.
            False: at the end of step k.

    Each slice decides for itself when the push arrives; the receipt's `scale` is what took effect.

    Raises:
        ConfigError: An argument out of its range.

    >>> fastps.Async(max_staleness=8)
    Async(max_staleness=8, on_stale='scale', delay_adaptive=True, momentum_matching=False, overlap=False)
    """

    max_staleness: int | None = None
    on_stale: Literal["scale", "reject"] = "scale"
    delay_adaptive: bool = True
    momentum_matching: bool = False
    overlap: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        least = 0 if self.on_stale == "reject" else 1  # times 0 would be a refusal that nobody is told
        if self.max_staleness is not None:
            bound = at_least(least, "max_staleness", self.max_staleness, also=", or None")
            given(self, "max_staleness", bound)
        if self.on_stale not in ("scale", "reject"):
            raise invalid("on_stale", "'scale' or 'reject'", self.on_stale)
        if self.on_stale == "reject" and self.max_staleness is None:
            raise invalid("max_staleness", "an integer >= 0 with on_stale='reject'", None)
        for name in ("delay_adaptive", "momentum_matching", "overlap"):
            flag(name, getattr(self, name))

    def _correction(self) -> tuple[bool, int | None, bool, bool] | None:
        asked = self.delay_adaptive, self.max_staleness, self.on_stale == "reject", self.momentum_matching
        return asked if self.delay_adaptive or self.momentum_matching or asked[1] is not None else None
