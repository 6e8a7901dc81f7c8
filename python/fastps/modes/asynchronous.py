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

    No step waits for another worker. Each push names the versions that its gradients were computed at, so its
    receipt has the staleness: the number of pushes by others in between. With one worker and without
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
        join_every: Workers begin one by one: the k-th of those present waits in `Worker`'s constructor until
            the run has taken ``join_every * (k - 1)`` updates, so that its first ones, which form the model,
            are not computed at old values. The ninth and all after it begin together. In a run that has taken
            as many, nobody waits, and a wait ends after 60 s without an update. None or 0: all begin at once.

    Old gradients cost accuracy while a run is short: several workers learn less than one from as many samples
    until a small net has taken some hundred updates, or a deep one more than a thousand. In a shorter run,
    workers of equal speed use ``Sync(workers=n)``, with 1 to sqrt(n) times the rate.

    Each slice applies this on its own when the push arrives; the receipt's `scale` and `momentum` are those
    that took effect.

    Raises:
        ConfigError: An argument is out of range.

    >>> fastps.Async(max_staleness=8) == fastps.Async(8, "scale", join_every=0)
    True
    """

    max_staleness: int | None = None
    on_stale: Literal["scale", "reject"] = "scale"
    delay_adaptive: bool = True
    momentum_matching: bool = True
    overlap: bool = field(default=False, kw_only=True)
    join_every: int | None = field(default=None, kw_only=True)

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
        if self.join_every is not None:
            every = at_least(0, "join_every", self.join_every, also=", or None")
            given(self, "join_every", every or None)
        for name in ("delay_adaptive", "momentum_matching", "overlap"):
            given(self, name, flag(name, getattr(self, name)))

    @property
    def correction(self) -> Correction | None:
        asked = self.delay_adaptive, self.max_staleness, self.on_stale == "reject", self.momentum_matching
        return asked if self.delay_adaptive or self.momentum_matching or asked[1] is not None else None
