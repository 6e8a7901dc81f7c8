"""Base class of this package's algorithms."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar

from fastps._shared.checks import invalid
from fastps.connection import ParameterServer
from fastps.modes import Mode
from fastps.optim import Optimizer

__all__ = ["Algorithm", "in_range"]


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """The base of the algorithms: settings, which are equal for all workers of a run."""

    #: Name in the command line and in the settings of a run.
    _name: ClassVar[str] = ""
    #: Whether the model estimates values beside the policy.
    _value: ClassVar[bool] = True
    #: Maximum number of elements of a tensor: larger parameters are kept in several. None: no limit.
    _largest: ClassVar[int | None] = None

    #: Whether observations are normalized.
    normalize = False

    def _optimizer(self) -> Optimizer:
        """The optimizer of the model's tensors."""
        raise NotImplementedError

    def _mode(self, ps: ParameterServer) -> Mode:
        """Returns the worker's mode; raises `ConfigError` if `ps` does not support it."""
        raise NotImplementedError

    def _register(self, ps: ParameterServer) -> None:
        """Registers what the algorithm keeps beside the model."""

    def _turns(self, learner: Any) -> Iterator[None]:
        """Trains a `Learner` without an end; yields where another worker may continue."""
        raise NotImplementedError

    def _for(self, workers: int) -> Algorithm:
        """The same algorithm for a number of workers."""
        del workers
        return self

    def _settings(self) -> dict[str, Any]:
        return {"algorithm": self._name, **dataclasses.asdict(self)}


def in_range(name: str, value: Any, least: float, most: float, *, above: bool = False) -> float:
    """A float from `least` (or above it) to `most`; raises `ConfigError` for another."""
    number = float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else float("nan")
    if not (least < number if above else least <= number) or not number <= most:
        limit = "" if most == float("inf") else f" and <= {most:g}"
        raise invalid(name, f"a number {'>' if above else '>='} {least:g}{limit}", value)
    return number
