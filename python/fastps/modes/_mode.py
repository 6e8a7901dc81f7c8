"""The base of the modes: the interface that `Worker` and the simulator read."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, ClassVar

from fastps._shared.checks import at_least, given, invalid, number
from fastps.errors import ConfigError

__all__ = ["Correction", "Mode", "as_quorum", "as_reduce"]

#: Workers whose gradients a median or a trimmed mean can have at most.
_MOST_SORTED = 32
#: Seconds that a grace may last: ten years.
_LONGEST_GRACE = 3.2e8

#: Handling of stale gradients; see `fastps.Async`: delay_adaptive, max_staleness, whether to reject them,
#: momentum_matching.
Correction = tuple[bool, int | None, bool, bool]


class _Checked(type):
    """Classes whose call names the arguments that it lacks."""

    if not TYPE_CHECKING:  # which sees the arguments of each class

        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            try:
                return super().__call__(*args, **kwargs)
            except TypeError:
                own = list(inspect.signature(cls.__init__).parameters.values())[1:]
                given = {*kwargs, *(one.name for one in own[: len(args)])}
                lacking = [one.name for one in own if one.default is one.empty and one.name not in given]
                if not lacking:
                    raise
            name, arguments = f"fastps.{cls.__name__}", ", ".join(f"{one}=..." for one in lacking)
            raise ConfigError(
                f"{name} needs {' and '.join(lacking)}",
                expected=f"{name}({arguments})",
                got="no value",
                advice=f"help({name}) describes it",
            )


class Mode(metaclass=_Checked):
    """Mode in which a worker keeps pace with the other workers; a value.

    `Worker` reads these properties and knows none of the modes. A mode overrides those in which it differs
    from the defaults: push and fetch at every step, and never wait.

    Attributes:
        push_every: Steps between pushes.
        pull_every: Steps between fetches.
        overlap: Fetched values are installed later, while the worker computes: True, `pull_every` steps; with
            `takes_values`, so many steps after the push.
        alpha: The share of a worker's own values where such values are installed.
        fragments: Groups of tensors that are pushed in turn, all within `push_every` steps.
        waits_for_others: Workers or their pushes wait for each other; a fetch follows that wait.
        shares_versions: A version is one step by the gradients of several workers. A refused gradient is
            dropped: the next one is of another version.
        takes_values: A step gives the values that it has reached; their distance from those that the worker
            began from is its gradient.
        lock_free: Needs tensors that were registered with ``apply="hogwild"``.
        exchanges: A step may push and fetch in one call.
        join_every: Updates of the run between the beginnings of two workers; None: all begin at once.
    """

    push_every: int = 1
    pull_every: int = 1
    overlap: int = False
    alpha: float = 0.0
    fragments: int = 1
    join_every: int | None = None
    waits_for_others: ClassVar[bool] = False
    shares_versions: ClassVar[bool] = False
    takes_values: ClassVar[bool] = False
    lock_free: ClassVar[bool] = False
    exchanges: ClassVar[bool] = False

    #: What binds the workers of a group, as the extension module calls it; it reads the settings by name.
    _kind: ClassVar[str] = "free"

    @property
    def after_warm_up(self) -> Mode:
        """The mode after a warm start; without one, the mode itself."""
        return self

    @property
    def warm_up_steps(self) -> int:
        """Steps that one worker takes before the others start; 0 without a warm start."""
        return 0

    @property
    def warm_up_timeout(self) -> float:
        """Maximum seconds that another worker waits for the end of a warm start."""
        return 0.0

    @property
    def joins_in_turn(self) -> bool:
        """True if a worker may wait in its constructor for updates by others."""
        return self.warm_up_steps > 0 or self.after_warm_up.join_every is not None

    @property
    def local_lr(self) -> float | None:
        """Learning rate of local steps; None if steps are not local."""
        return None

    @property
    def weighs(self) -> bool:
        """True if a gradient counts by the samples behind it."""
        return False

    @property
    def sends_parts(self) -> bool:
        """True if a worker that still computes when a quorum is in sends what it has."""
        return False

    @property
    def grace_seconds(self) -> float | None:
        """Seconds that a version waits after its quorum; None: it has none, or waits for all."""
        return None

    @property
    def least_workers(self) -> int:
        """Workers that a step waits for."""
        return 1

    @property
    def most_workers(self) -> int | None:
        """Workers that a group has at most; None: no limit."""
        return None

    @property
    def correction(self) -> Correction | None:
        """How servers handle stale gradients; None: as any other."""
        return None


def as_quorum(mode: Any, workers: int) -> None:
    """Checks `quorum` and `grace` of a mode with at most so many workers."""
    if mode.quorum is not None:
        given(mode, "quorum", at_least(1, "quorum", mode.quorum, workers))
    if mode.grace is None:
        return
    if mode.quorum is None:
        raise invalid("grace", "a quorum, after which it begins", f"grace={mode.grace!r} without quorum")
    seconds = number("grace", mode.grace)
    if not 0 <= seconds <= _LONGEST_GRACE:
        raise invalid("grace", "seconds >= 0", mode.grace)
    given(mode, "grace", seconds)


def as_reduce(mode: Any, known: tuple[str, ...], workers: int | None) -> None:
    """Checks `reduce` and `trim` of a mode with at most so many workers, one of these ways."""
    if mode.reduce not in known:
        raise invalid("reduce", f"{', '.join(map(repr, known[:-1]))} or {known[-1]!r}", mode.reduce)
    sorts = mode.reduce in ("median", "trimmed_mean")
    if sorts and (workers is None or workers > _MOST_SORTED):
        raise invalid("workers", f"1 to {_MOST_SORTED}, for reduce={mode.reduce!r}", workers)
    if (mode.trim is None) != (mode.reduce != "trimmed_mean"):
        raise invalid("trim", 'a number with reduce="trimmed_mean", and only there', mode.trim)
    if mode.trim is not None:
        given(mode, "trim", at_least(1, "trim", mode.trim, 65_536))
        fewest = mode.quorum or mode.least_workers
        if 2 * mode.trim >= fewest:
            raise invalid("trim", f"less than half of the {fewest} contributions of a version", mode.trim)
