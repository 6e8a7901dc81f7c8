"""`Logger`, the base of all loggers, and `Collection`, several of them as one."""

from __future__ import annotations

import contextlib
from abc import abstractmethod

from fastps._shared.checks import at_least
from fastps._shared.idioms.closing import Closing
from fastps.errors import ConfigError
from fastps.worker import Step

__all__ = ["Collection", "Logger"]


class Logger(Closing):
    """Base of all loggers; a subclass writes values by name. A call after `close` raises `ConfigError`.

    Args:
        every: Steps between two records, >= 1.
    """

    def __init__(self, every: int = 1) -> None:
        self._every = at_least(1, "every", every)
        self._closed = False

    def __call__(self, step: Step) -> None:
        """Logs a step: loss, staleness, bytes, scale, global step and learning rate, those that are known."""
        if self._closed:
            raise ConfigError("the logger is closed", expected="an open logger", got="a closed one")
        if step.step % self._every:
            return
        values = {name: float(v) for name, v in step._asdict().items() if name != "step" and v is not None}
        self.write(step.step, values)

    @abstractmethod
    def write(self, step: int, values: dict[str, float]) -> None:
        """Writes the values of a step."""

    @abstractmethod
    def finish(self) -> None:
        """Completes the output."""

    def close(self) -> None:
        """Completes the output; a second call does nothing."""
        if not self._closed:
            self._closed = True
            self.finish()


class Collection(Closing):
    """Several loggers as one: passes each step to all of them, and closes them together.

    >>> import tempfile
    >>> folder = tempfile.mkdtemp()
    >>> with fastps.loggers.Collection(
    ...     fastps.loggers.JSONL(folder + "/all.jsonl"), fastps.loggers.JSONL(folder + "/some.jsonl", every=2)
    ... ) as logger:
    ...     for k in (1, 2):
    ...         logger(fastps.Step(k, 0.5, 0, 8, 1.0, k, 0.1))
    >>> [len(open(f"{folder}/{name}.jsonl").readlines()) for name in ("all", "some")]
    [2, 1]
    """

    def __init__(self, *loggers: Logger) -> None:
        self._loggers = loggers

    def __call__(self, step: Step) -> None:
        for logger in self._loggers:
            logger(step)

    def close(self) -> None:
        """Closes all loggers, also if closing one fails."""
        with contextlib.ExitStack() as stack:
            for logger in reversed(self._loggers):
                stack.callback(logger.close)
