"""Base class of this package's algorithms."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar

from torch import nn

from fastps._shared.checks import invalid
from fastps.modes import Mode
from fastps.optim import Optimizer
from fastps.parameter_server import ParameterServer
from fastps.rl.playing.models import ActorCritic

__all__ = ["Algorithm", "in_range"]


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """The base of the algorithms: settings, which are equal for all workers of a run."""

    #: Name in the command line and in the settings of a run.
    name: ClassVar[str] = ""
    #: Whether the model estimates values beside the policy.
    estimates_values: ClassVar[bool] = True
    #: Maximum number of elements of a tensor: larger parameters are kept in several. None: no limit.
    largest_tensor: ClassVar[int | None] = None

    #: Tensors that `register` adds and a resumed run continues with.
    kept: ClassVar[tuple[str, ...]] = ()
    #: Whether noise and episodes are drawn by the model's version, so that a resumed run repeats none.
    draws_by_version: ClassVar[bool] = False

    #: Whether observations are normalized.
    normalize = False

    @property
    def untrained_frames(self) -> int:
        """Internal: frames of all workers that are played before the first update of the model."""
        return 0

    def optimizer(self) -> Optimizer:
        """Internal: the optimizer of the model's tensors."""
        raise NotImplementedError

    def mode(self, ps: ParameterServer) -> Mode:
        """Internal: returns the workers' mode; raises `ConfigError` if `ps` does not support it."""
        raise NotImplementedError

    def network(self, space: Any, actions: Any) -> nn.Module:
        """Internal: the model for these observations and actions if the user gives none."""
        return ActorCritic(space, actions, self.estimates_values)

    def register(self, ps: ParameterServer, task: Any) -> None:
        """Internal: registers what the algorithm keeps beside the model of a `Task`."""

    def turns(self, learner: Any) -> Iterator[None]:
        """Internal: trains a `Learner` without an end; yields where another worker may continue."""
        raise NotImplementedError

    def for_workers(self, workers: int) -> Algorithm:
        """Internal: the same algorithm for a number of workers."""
        del workers
        return self

    def for_rank(self, rank: int) -> Algorithm:
        """Internal: the same algorithm for one of these workers."""
        del rank
        return self

    def check(self, task: Any) -> None:
        """Internal: raises `ConfigError` if the algorithm does not support the spaces of a `Task`."""

    def settings(self) -> dict[str, Any]:
        """Internal: the settings of a run."""
        return {"algorithm": self.name, **dataclasses.asdict(self)}


def in_range(name: str, value: Any, least: float, most: float, *, above: bool = False) -> float:
    """A float from `least` (or above it) to `most`; raises `ConfigError` for another."""
    number = float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else float("nan")
    if not (least < number if above else least <= number) or not number <= most:
        limit = "" if most == float("inf") else f" and <= {most:g}"
        raise invalid(name, f"a number {'>' if above else '>='} {least:g}{limit}", value)
    return number
