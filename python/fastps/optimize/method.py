"""Base class of the methods, the interface that the coordinator of `minimize` uses.

A method chooses directions only from inner products; the vectors stay on the shards. They are: ``w``, the
tensors; ``g``, the gradient there; ``p``, the direction; ``t``, the trial point ``w + step p``; ``h``, the
gradient there; and those of the method. Everything but ``w`` can be computed again from what the last commit
left, so a coordinator that takes over repeats at most one search.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

from fastps.optimize.vectors import Operation, Vectors

__all__ = ["COMMON", "Accepted", "Directions", "Method"]

#: The vectors of every method, besides `w`.
COMMON = ("g", "p", "t", "h")


class Accepted(NamedTuple):
    """The accepted step and the products that its trial computed.

    Attributes:
        step: How far along the direction.
        slope: g'p, at the former point.
        new_slope: h'p, at the new one.
        old: g'g.
        new: h'h.
        mixed: g'h.
    """

    step: float
    slope: float
    new_slope: float
    old: float
    new: float
    mixed: float


class Directions(Protocol):
    """The directions of one run.

    Attributes:
        memory: State to store so that another coordinator can continue; JSON.
    """

    memory: dict[str, Any]

    def accept(self, accepted: Accepted) -> None:
        """Notes an accepted step. Call it before the commit's program, and store `memory` in between."""

    def commit(self, v: Vectors) -> list[Operation]:
        """Operations that the method adds to the commit's program, before ``g`` and ``w`` change."""

    def products(self, v: Vectors, again: bool = False) -> Operation | None:
        """The operation whose results `direction` needs. It changes nothing.

        Args:
            v: The vectors.
            again: Ask for all products, since those of former iterations are not known here.
        """

    def direction(self, products: Sequence[float]) -> dict[str, float]:
        """The next direction, as factors of vectors."""

    def first_step(self, norm: float) -> float:
        """The first step to try. `norm` is the Euclidean length of the gradient."""

    def restart(self) -> None:
        """Forgets former directions, so that the next one is that of steepest descent."""

    @property
    def is_restarted(self) -> bool:
        """True if the direction is that of steepest descent."""


class Method:
    """Method by which `minimize` chooses directions; a value. See `LBFGS`, `CG` and `GradientDescent`."""

    #: Default of `StrongWolfe`'s c2.
    c2: ClassVar[float] = 0.9

    @property
    def _vectors(self) -> tuple[str, ...]:
        """The vectors that the method needs besides those of `COMMON`."""
        raise NotImplementedError

    def _begin(self, memory: dict[str, Any] | None = None, *, size: int) -> Directions:
        """Begins a run, or continues a stored one.

        Args:
            memory: The stored `Directions.memory`; None: begin.
            size: Number of parameters.
        """
        raise NotImplementedError
