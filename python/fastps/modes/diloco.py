"""`DiLoCo`: local steps of any optimizer, whose results an outer optimizer on the servers joins."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from fastps._shared.checks import at_least, flag, given, invalid, number
from fastps.modes._mode import Mode, as_quorum, as_reduce
from fastps.optim import SGD, Optimizer

__all__ = ["DiLoCo"]


@dataclass(frozen=True)
class DiLoCo(Mode):
    """Low-communication training (Douillard et al., 2023, arXiv:2311.08105): each worker takes `every` local
    steps with any optimizer of its own, and only the difference goes to the servers.

    A worker begins from the servers' values. After `every` local steps it sends *begin minus now*, which the
    servers take for its gradient: a version is one step of their optimizer, the outer one, by the mean of the
    workers' differences. Then each worker goes on from the new values. Local steps are taken by
    `fastps.torch.LocalOptimizer`, or by the caller of `fastps.Worker.step` and `fastps.jax.Worker.step`, who
    gives the `values` that a step has reached.

    A version is made when all present workers have contributed, or `grace` seconds after `quorum` of them
    have. A worker that still computes hears of a quorum, and contributes at the end of its local step what it
    has (``stats()["samples_partial"]``). What comes after the version is refused and dropped: its worker
    counts it (``stats()["samples_lost"]``), fetches, and continues. A worker that joins counts from the next
    version on, and one that is closed, killed or misses its lease is no longer waited for. All workers of a
    group must use the same value; only `partial` and `alpha` are each worker's own.

    With `fragments` (Douillard et al., 2025, arXiv:2501.18512) the tensors are shared out among so many
    groups of about equal size, which are exchanged in turn, each once in `every` steps: the peak of the bytes
    falls to that share. With `overlap` a worker goes on computing while a difference, and the version that it
    leads to, are on their way, and installs that version so many local steps later.

    The outer optimizer is that of the registered tensors; `DiLoCo.outer` is the paper's. Without a quorum
    there is no asynchronous form: `fastps.Async` on this optimizer destroys the model.

    Args:
        every: Local steps of a round, >= 1.
        workers: Workers that must be present before the first version, and the most that a group has, 1 to
            65,536. None: any number; the first one begins alone.
        quorum: Contributions after which a version waits for `grace`, 1 to `workers`. None: it waits for all.
        grace: Seconds, >= 0; only with `quorum`. None: 0. Servers look ten times a second.
        deterministic: True: a version sums its differences in the order of the workers' ranks, so the same
            differences give the same bits; the servers hold all of them until then.
        reduce: ``"weighted"``: the mean by the samples behind each difference (``step(samples=...)``; where
            none are given, by the share of `every` steps that were taken). With the others
            samples are only counted: ``"mean"``, and ``"median"`` and ``"trimmed_mean"`` as for
            `fastps.Sync`, which need `workers`.
        partial: True: a worker that still computes when a quorum is in sends what it has, if `reduce` can
            weigh it. False: it computes to the end of its round, and may come too late. Servers look ten
            times a second, so `grace` should be longer than that and a local step.
        trim: As for `fastps.Sync`.
        fragments: Groups of tensors that are exchanged in turn, 1 to `every`, and at most as many as there
            are tensors.
        overlap: Local steps between a difference and the installation of its version, >= 0, and less than
            the ``every // fragments`` between two differences. 0: a worker waits for the version.
        alpha: With `overlap`, what is left of the local steps that were taken meanwhile, 0 to 1: a value
            becomes ``alpha * local + (1 - alpha) * received``. The next difference has that part.

    Raises:
        ConfigError: An argument is out of range, or (from a worker) there are fewer tensors than fragments.

    >>> store, mode = fastps.Store(), fastps.DiLoCo(every=2)
    >>> store.register("w", np.zeros(2, np.float32), optimizer=fastps.SGD(lr=0.5))
    >>> with fastps.Worker(store, {"w": np.zeros(2, np.float32)}, mode=mode) as worker:
    ...     for _ in range(2):
    ...         worker.step(values={"w": worker.params["w"] + 1}, samples=8)
    ...     worker.params["w"]
    array([1., 1.], dtype=float32)
    """

    every: int
    workers: int | None = None
    quorum: int | None = None
    grace: float | None = None
    deterministic: bool = False
    reduce: Literal["weighted", "mean", "median", "trimmed_mean"] = "weighted"
    partial: bool = True
    trim: int | None = None
    fragments: int = 1
    overlap: int = 0
    alpha: float = 0.5

    #: The paper's outer optimizer.
    outer: ClassVar[Optimizer] = SGD(lr=0.7, momentum=0.9, nesterov=True)

    waits_for_others: ClassVar[bool] = True
    shares_versions: ClassVar[bool] = True
    takes_values: ClassVar[bool] = True
    _kind: ClassVar[str] = "diloco"

    def __post_init__(self) -> None:
        given(self, "every", at_least(1, "every", self.every, 2**63))
        if self.workers is not None:
            given(self, "workers", at_least(1, "workers", self.workers, 65_536))
        as_quorum(self, self.workers or 65_536)
        for name in ("deterministic", "partial"):
            given(self, name, flag(name, getattr(self, name)))
        as_reduce(self, ("weighted", "mean", "median", "trimmed_mean"), self.workers)
        given(self, "fragments", at_least(1, "fragments", self.fragments, min(self.every, 2**32 - 1)))
        given(self, "overlap", at_least(0, "overlap", self.overlap))
        if self.overlap >= (turn := self.every // self.fragments) and self.overlap:
            expected = f"less than the {turn} local steps between two differences (every // fragments)"
            raise invalid("overlap", expected, self.overlap)
        alpha = number("alpha", self.alpha)
        if not 0 <= alpha <= 1:
            raise invalid("alpha", "0 to 1", self.alpha)
        given(self, "alpha", alpha)

    @property
    def push_every(self) -> int:  # type: ignore[override]
        return self.every

    @property
    def pull_every(self) -> int:  # type: ignore[override]
        return self.every

    @property
    def weighs(self) -> bool:
        return self.reduce == "weighted"

    @property
    def sends_parts(self) -> bool:
        return self.partial and self.weighs and self.quorum is not None and self.every > 1

    @property
    def grace_seconds(self) -> float | None:
        return self.grace

    @property
    def least_workers(self) -> int:
        return self.workers or 1

    @property
    def most_workers(self) -> int | None:
        return self.workers
