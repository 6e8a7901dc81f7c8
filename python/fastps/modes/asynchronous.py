"""`Async`: gradients are applied when they arrive."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from fastps._shared.checks import at_least, flag, given, invalid
from fastps.modes._mode import Correction, Mode

__all__ = ["Async"]


@dataclass(frozen=True)
class Async(Mode):
    """Asynchronous training: each step pushes gradients, which are applied on arrival, and fetches values.

    Workers never wait for each other. Each push names the versions that its gradients were computed at, so
    its receipt has the staleness: the number of pushes by others in between. With one worker and without
    `overlap`, this is serial training by the server's optimizer, bit for bit.

    Args:
        max_staleness: Bound on the staleness tau, beyond which `on_stale` applies; None: no bound.
        on_stale: ``"scale"``: the gradient is scaled by max_staleness / tau. ``"reject"``: the server refuses
            it; `Worker` counts that (``stats()["rejected"]``), drops the gradient and continues.
        delay_adaptive: Scale a gradient by min(1, C / tau), where C is the number of workers that push to
            the slice (Koloskova et al. 2022, Mishchenko et al. 2022). This changes nothing for one worker or
            equally fast ones; a much slower worker does less harm.
        momentum_matching: Reduces the optimizer's momentum mu (of SGD and RMSprop; beta1 of Adam and AdamW,
            except for sparse gradients) by what asynchrony adds (Mitliagkas et al. 2016): with
            A = mu / (1 - mu) - s it is A / (1 + A), and 0 where A <= 0. A slice reads s from the staleness of
            its last 64 gradients, each weighted by its sender's share: C - 1 for equal workers, near 0 for a
            fast one beside others that seldom push, 0 for one worker. This keeps the rate that was chosen
            with one worker usable with more. With SGD at a much smaller rate, all momentum is gain: set False
            there.
        overlap: True: the fetch of step k is installed at the end of step k + 1, so push and fetch of a step
            run while the next gradient is computed; gradients are then computed at values one step old.
            False: the fetch is installed at the end of step k.

    Each slice applies this on its own when the push arrives; the receipt's `scale` and `momentum` are those
    that took effect.

    Raises:
        ConfigError: An argument is out of range.

    >>> fastps.Async(max_staleness=8)
    Async(max_staleness=8, on_stale='scale', delay_adaptive=True, momentum_matching=True, overlap=False)
    """

    max_staleness: int | None = None
    on_stale: Literal["scale", "reject"] = "scale"
    delay_adaptive: bool = True
    momentum_matching: bool = True
    overlap: bool = field(default=False, kw_only=True)

    exchanges: ClassVar[bool] = True

    def __post_init__(self) -> None:
        least = 0 if self.on_stale == "reject" else 1  # a factor of 0 would silently drop the gradient
        if self.max_staleness is not None:
            bound = at_least(least, "max_staleness", self.max_staleness, also=", or None")
            given(self, "max_staleness", bound)
        if self.on_stale not in ("scale", "reject"):
            raise invalid("on_stale", "'scale' or 'reject'", self.on_stale)
        if self.on_stale == "reject" and self.max_staleness is None:
            raise invalid("max_staleness", "an integer >= 0 with on_stale='reject'", None)
        for name in ("delay_adaptive", "momentum_matching", "overlap"):
            flag(name, getattr(self, name))

    @property
    def correction(self) -> Correction | None:
        asked = self.delay_adaptive, self.max_staleness, self.on_stale == "reject", self.momentum_matching
        return asked if self.delay_adaptive or self.momentum_matching or asked[1] is not None else None
