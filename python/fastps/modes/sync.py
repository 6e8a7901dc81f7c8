"""`Sync`: each version is one step by the gradients of several workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from fastps._shared.checks import at_least, flag, given, invalid
from fastps.modes._mode import Mode, as_quorum, as_reduce

__all__ = ["Sync"]


@dataclass(frozen=True)
class Sync(Mode):
    """Synchronous training with backup workers (Chen et al., 2016): each version is one step by the mean of
    the first `workers` gradients that are based on the previous version.

    Each slice decides on its own. A step pushes, waits for the version that its gradient is part of, and
    fetches it. A gradient that arrives after its version is complete is refused: `Worker` drops it, counts it
    (``stats()["rejected"]``), fetches, and continues. The optimizer takes one step per version, with the
    smallest learning rate among the gradients.

    All workers wait until `workers` of them have joined. From then on, a worker that is closed, killed or
    misses its lease is dropped, and a version needs as many gradients as there are workers, at most
    `workers`; one that joins counts from the next version on. If too few are present, a step fails at its
    deadline and names the workers that are present.

    All workers of a group must use the same value, and there are at most `workers` + `backup` of them. Works
    with `exact` tensors and with whole or `fastps.Sparse` gradients: if all gradients of a version are
    sparse, the step updates the rows that any of them names. All workers must push gradients of the same
    tensors, even if they name no rows.

    Args:
        workers: Gradients per version, 1 to 65,536.
        backup: Additional workers, 0 to 65,536: a version does not wait for this many slow ones.
        deterministic: True: a version sums its gradients in the order of the workers' ranks (`Worker`'s
            `rank`), so the same gradients give the same bits; the servers hold all of them until then.
            False: gradients are summed in the order of arrival.
        reduce: ``"mean"``, ``"sum"``, or ``"weighted"``: the mean by the samples behind each gradient
            (``step(samples=...)``; 1 where none are given). ``"median"`` and ``"trimmed_mean"`` are those of
            each element (Yin et al., 2018), so that a few bad gradients do no harm: of at most 32 workers,
            `backup` included, and whole gradients, which the servers hold until the version is made. The
            same gradients give the same bits in any order.
        quorum: Gradients after which a version waits for `grace`, 1 to `workers`; not with `backup`. None: it
            waits for all workers.
        grace: Seconds, >= 0; only with `quorum`. None: 0. Servers look ten times a second.
        trim: With ``"trimmed_mean"``, how many of the smallest and of the largest values of each element are
            left out, >= 1 and less than half of the gradients of a version. Of those that are left when
            workers have gone, at least one stays.

    Raises:
        ConfigError: An argument is out of range.

    >>> fastps.Sync(workers=4, backup=1)
    Sync(workers=4, backup=1, deterministic=False, reduce='mean', quorum=None, grace=None, trim=None)
    """

    workers: int
    backup: int = 0
    deterministic: bool = False
    reduce: Literal["mean", "sum", "weighted", "median", "trimmed_mean"] = "mean"
    quorum: int | None = None
    grace: float | None = None
    trim: int | None = None

    waits_for_others: ClassVar[bool] = True
    exchanges: ClassVar[bool] = True
    shares_versions: ClassVar[bool] = True
    _kind: ClassVar[str] = "sync"

    def __post_init__(self) -> None:
        given(self, "workers", at_least(1, "workers", self.workers, 65_536))
        given(self, "backup", at_least(0, "backup", self.backup, 65_536))
        given(self, "deterministic", flag("deterministic", self.deterministic))
        as_quorum(self, self.workers)
        as_reduce(self, ("mean", "sum", "weighted", "median", "trimmed_mean"), self.workers + self.backup)
        if self.quorum is not None and self.backup:
            raise invalid("quorum", "a quorum or backup workers", f"both, quorum={self.quorum}")

    @property
    def weighs(self) -> bool:
        return self.reduce == "weighted"

    @property
    def grace_seconds(self) -> float | None:
        return self.grace

    @property
    def least_workers(self) -> int:
        return self.workers

    @property
    def most_workers(self) -> int:
        return self.workers + self.backup
