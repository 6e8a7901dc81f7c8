"""`OptimizeResult`: what `minimize` returns."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import NamedTuple

__all__ = ["Iteration", "OptimizeResult", "Status"]


class Status(enum.IntEnum):
    """Why a run ended; see `OptimizeResult.status`."""

    RUNNING = -1
    CONVERGED = 0
    ITERATIONS = 1
    EVALUATIONS = 2
    NO_LOWER = 3
    CALLBACK = 4
    ROUNDING = 5


class Iteration(NamedTuple):
    """An accepted point.

    Attributes:
        number: Number of the iteration; 0 is the point that `minimize` started from.
        fun: The function there.
        grad_norm: The largest magnitude among the elements of the gradient.
        step: How far along the direction; 0 for the start.
        nfev: Evaluations so far.
    """

    number: int
    fun: float
    grad_norm: float
    step: float
    nfev: int


@dataclass(frozen=True)
class OptimizeResult:
    """The outcome of `minimize`, under scipy's names. The point itself is in the tensors: pull it.

    Attributes:
        success: Whether the gradient is within `tol`, or rounding hides whatever is lower.
        status: 0: the gradient is within `tol`; 1: `max_iterations`; 2: `max_evaluations`; 3: no lower point
            was found; 4: the callback stopped it; 5: rounding hides any lower point, so the last searches
            found none, or the last 50 iterations lowered neither the function nor the gradient; -1: in a
            callback, that the run continues.
        message: The same in words, and what to do.
        fun: The function at the point in the tensors.
        grad_norm: The largest magnitude among the elements of its gradient.
        nit: Number of iterations.
        nfev: Number of evaluations of function and gradient; what was repeated after a failure counts once.
        seconds: How long this call took.
        rounds: Rounds of commands to the shards that this call made.
        backups_issued: Copies of slow portions that replicas computed.
        backups_won: Copies that were ready before the original.
        history: The accepted points, from the start on. A call with ``resume=True`` knows the last 400 of
            those before it.
        replicas: Portions that each replica computed, by name.
    """

    success: bool
    status: int
    message: str
    fun: float
    grad_norm: float
    nit: int
    nfev: int
    seconds: float
    rounds: int
    backups_issued: int = 0
    backups_won: int = 0
    history: tuple[Iteration, ...] = field(default=(), repr=False)
    replicas: dict[str, int] = field(default_factory=dict)
