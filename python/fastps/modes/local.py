"""`Local`: Downpour SGD's client."""

from __future__ import annotations

from dataclasses import dataclass, field

from fastps._shared.checks import as_rate, at_least, given
from fastps.modes._mode import Mode

__all__ = ["Local"]


@dataclass(frozen=True)
class Local(Mode):
    """Downpour SGD's client (Dean et al., NIPS 2012): local steps between pushes and pulls.

    Steps count from 1. Step k takes a local step; if k is a multiple of `push_every`, it pushes the sum of
    the gradients since the last push, so that every push holds `push_every` of them; after that, if k is a
    multiple of `pull_every`, it starts a fetch. (The paper's listing counts from 0, with the same fetches;
    its pushes come one step later in the count, so the very first push has one gradient.)

    Args:
        push_every: The paper's n_push, >= 1.
        pull_every: The paper's n_fetch, >= 1.
        lr: Learning rate of the local steps ``W <- W - lr * g``, finite and >= 0; the shards' optimizers
            have their own.
        overlap: True: the fetch that follows step k is installed at the end of step k + `pull_every`, which
            waits for it if necessary. False: at the end of step k.

    Raises:
        ConfigError: An argument is out of range.

    >>> fastps.Local(push_every=5, pull_every=5, lr=0.05)
    Local(push_every=5, pull_every=5, lr=0.05, overlap=True)
    """

    push_every: int = 1
    pull_every: int = 1
    lr: float = field(kw_only=True)
    overlap: bool = True

    def __post_init__(self) -> None:
        for name in ("push_every", "pull_every"):
            given(self, name, at_least(1, name, getattr(self, name)))
        given(self, "lr", as_rate("lr", self.lr))

    @property
    def local_lr(self) -> float:
        return self.lr
