"""`Sync`: a version is made of the gradients of several workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from fastps._shared.checks import at_least, flag, given, invalid
from fastps.modes._mode import Binding, Mode

__all__ = ["Sync"]


@dataclass(frozen=True)
class Sync(Mode):
    """Synchronous training with backup workers (Chen et al., 2016): a version is one step by the mean of the
    first `workers` gradients that are based on the version before it.

    Each slice decides for itself. A step pushes, waits until the version is made that its gradient is part
    of, and fetches it. A gradient that comes when its version is made already is refused: `Worker` drops it,
    counts it (``stats()["rejected"]``), fetches, and goes on. The optimizer takes one step per version, with
    the smallest of the rates that the gradients came with.

    Until `workers` of them have joined, everybody waits. From then on a worker that is gone (closed, killed,
    stopped for a lease) is not waited for: a version is then made of as many gradients as there are workers,
    at most `workers`. With too few, a step fails at its deadline and says who is there.

    Binds its group: all workers have the same value, and there are at most `workers` + `backup` of them.
    Takes gradients of `exact` tensors, whole or `fastps.Sparse`: where all of a version are sparse, the step
    is of the rows that any of them names. All workers give gradients of the same tensors, be it of no rows.

    Args:
        workers: Gradients per version, 1 to 65,536.
        backup: Workers beyond those, 0 to 65,536: so many slow ones are not waited for.
        deterministic: True: a version sums its gradients in the order of their workers' ranks (`Worker`'s
            `rank`), so that the same gradients give the same bits. The servers keep all of them until then.
            False: in the order of arrival, kept as one sum.
        reduce: ``"mean"`` or ``"sum"``.

    Raises:
        ConfigError: An argument out of its range.

    >>> fastps.Sync(workers=4, backup=1)
    Sync(workers=4, backup=1, deterministic=False, reduce='mean')
    """

    workers: int
    backup: int = 0
    deterministic: bool = False
    reduce: Literal["mean", "sum"] = "mean"

    _together: ClassVar[bool] = True

    def __post_init__(self) -> None:
        given(self, "workers", at_least(1, "workers", self.workers, 65_536))
        given(self, "backup", at_least(0, "backup", self.backup, 65_536))
        flag("deterministic", self.deterministic)
        if self.reduce not in ("mean", "sum"):
            raise invalid("reduce", "'mean' or 'sum'", self.reduce)

    def _binding(self) -> Binding:
        return "sync", [self.workers, self.backup], [self.deterministic, self.reduce == "sum"]
