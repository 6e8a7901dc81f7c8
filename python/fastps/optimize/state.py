"""A coordinator's problem and limits, and the state that it stores for one that takes over."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from fastps.errors import ConfigError
from fastps.optimize.result import Iteration

__all__ = ["Limits", "Problem", "State"]

#: Maximum number of iterations stored for a coordinator that takes over.
_STORED = 400
#: Twice this number of iterations without visible progress end a run.
_STALLED = 25


@dataclass(frozen=True)
class Problem:
    """The problem: a function of samples.

    Attributes:
        samples: Number of samples.
        portions: Number of portions that they are cut into.
        l2: Factor of |w|^2 / 2.
        eps: Relative error of the function's values.
        size: Number of parameters.
    """

    samples: int
    portions: int
    l2: float
    eps: float
    size: int


@dataclass(frozen=True)
class Limits:
    """Limits of a run."""

    tol: float
    max_iterations: int
    max_evaluations: int


@dataclass
class State:
    """State after the last commit, for a coordinator that takes over; stored on shard 0.

    Attributes:
        number: Number of the commit's program.
        fun: The function at the committed point.
        square: The squared Euclidean length of its gradient.
        norm: The largest magnitude among its elements.
        nfev: Evaluations up to the commit.
        largest: The largest magnitude that slices expect which have only seen gradients of 0.
        memory: The method's.
        history: The committed points.
        settings: What `minimize` was called with, in words.
    """

    number: int
    fun: float
    square: float
    norm: float
    nfev: int
    largest: float
    memory: dict[str, Any]
    history: list[Iteration]
    settings: str

    @property
    def iteration(self) -> int:
        return self.history[-1].number

    def has_stalled(self, eps: float) -> bool:
        """Returns whether recent iterations moved by rounding only: neither function nor gradient fell.

        Args:
            eps: Relative error of the function's values.
        """
        former, latter = self.history[-2 * _STALLED : -_STALLED], self.history[-_STALLED:]
        if len(former) < _STALLED:
            return False
        fell = former[-1].fun - min(at.fun for at in latter) > eps * abs(former[-1].fun)
        return not fell and min(at.grad_norm for at in latter) >= min(at.grad_norm for at in former)

    def to_json(self) -> str:
        return json.dumps({**vars(self), "history": self.history[-_STORED:]})  # no copy of a long history

    @classmethod
    def from_json(cls, text: str) -> State:
        """Reads what `to_json` has written.

        Raises:
            ConfigError: Something else has written it.
        """
        try:
            fields = json.loads(text)
            state = cls(**{**fields, "history": [Iteration(*entry) for entry in fields["history"]]})
        except (ValueError, TypeError, KeyError):
            state = None
        if state is None or not state.history:
            raise ConfigError(
                "the stored state is not one of minimize", expected="its fields", got="another coordinator's"
            )
        return state
