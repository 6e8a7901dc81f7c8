"""The local steps of a worker between two contributions: `fastps.DiLoCo`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fastps._fastps import Listener
from fastps._shared.checks import invalid, number
from fastps._shared.text import quoted
from fastps._shared.types import Array
from fastps.errors import ConfigError
from fastps.worker.gradients import check, whole

__all__ = ["Rounds", "as_samples"]


def as_samples(value: Any) -> float:
    """Samples behind a step; raises `ConfigError` unless they are finite and above 0."""
    samples = number("samples", value)
    if not 0 < samples < float("inf"):
        raise invalid("samples", "a finite number > 0", value)
    return samples


class Rounds:
    """What a worker has reached, and the values that it began from.

    Args:
        params: Names to the worker's arrays.
        every: Steps of a round.
        check_finite: Refuse differences that are not finite.

    Attributes:
        begun: Names to the values that the round began from.
        steps: Local steps since then.
        samples: Samples of those steps; 0 if none were given.
        pending: The last of them has begun and not ended.
        ends: It is the round's last one.
        listener: Hears that a quorum is in; None before the first step, and where the mode does not ask.
        sent: The round takes no more steps.
        started: Its difference is on its way.
        rejected: Pushes that were rejected before it.
    """

    def __init__(self, params: Mapping[str, Array], every: int, check_finite: bool) -> None:
        self._params, self.every, self._check_finite = params, every, check_finite
        self._differences: dict[str, Array] = {}
        self.begun: dict[str, Array] = {}
        self.listener: Listener | None
        self.begin()

    def begin(self) -> None:
        """Begins a round at the worker's present values."""
        for name, values in self._params.items():
            if name not in self.begun:
                self.begun[name] = np.empty_like(values)
                self._differences[name] = np.empty_like(values)
            self.begun[name][...] = values
        self.reset()

    def reset(self) -> None:
        """Begins a round at the values that the last one began from."""
        self.steps, self.samples = 0, 0.0
        self.pending = self.ends = self.sent = self.started = False
        self.rejected = 0
        self.listener = None

    @property
    def weight(self) -> float | None:
        """The weight of the contribution: its samples, or else its share of the steps of a round."""
        return self.samples or (self.steps / self.every if self.steps < self.every else None)

    def step(self, values: Any, samples: Any, called: bool) -> None:
        """Takes a local step to these values; if one is invalid, nothing has changed.

        Args:
            values: Names to arrays.
            samples: Those behind the step, or None.
            called: The step is the round's last one, since a quorum is in.
        """
        if not isinstance(values, Mapping):
            expected, got = "a mapping of names to arrays", type(values).__name__
            raise ConfigError("invalid values", expected=expected, got=got)
        if values.keys() != self._params.keys():
            raise ConfigError(
                "the values are not those of the worker's tensors",
                expected=quoted(self._params),
                got=quoted(values),
                advice="give all of them, also those that no step changes",
            )
        added = 0.0 if samples is None else as_samples(samples)
        for name, array in values.items():
            check(name, array, self._params[name], False)
        if called or self.steps + 1 == self.every:
            self.check(values)
        for name, array in values.items():
            if array is not self._params[name]:
                self._params[name][...] = whole(array)
        self.steps, self.samples, self.pending = self.steps + 1, self.samples + added, True
        self.ends = called or self.steps == self.every

    def check(self, values: Mapping[str, Any]) -> None:
        """Raises `NonFiniteError` if a difference is not finite."""
        for name, array in values.items():
            with np.errstate(all="ignore"):
                difference = np.subtract(self.begun[name], whole(array), out=self._differences[name])
            check(name, difference, difference, self._check_finite)

    def differences(self) -> dict[str, Array]:
        """*Begin minus now* of all tensors."""
        for name, values in self._params.items():
            np.subtract(self.begun[name], values, out=self._differences[name])
        return self.sent_differences

    @property
    def sent_differences(self) -> dict[str, Array]:
        """What `differences` returned last."""
        return dict(self._differences)

    def state_dict(self) -> dict[str, Any]:
        """The unfinished round, for `Worker.state_dict`."""
        begun = {name: values.copy() for name, values in self.begun.items()}
        return {"begun": begun, "round": self.steps, "samples": self.samples}

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Continues a saved round if it began from the present values; returns whether it did."""
        if not all(np.array_equal(state["begun"][name], values) for name, values in self._params.items()):
            return False
        for name, values in state["params"].items():
            self._params[name][...] = np.reshape(values, self._params[name].shape)
        self.steps, self.samples = int(state["round"]), float(state["samples"])
        return True
