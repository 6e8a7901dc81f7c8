"""Gradients that leave while backward computes others."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch

from fastps._fastps import Sparse
from fastps.errors import ConfigError
from fastps.torch._params import Entry

__all__ = ["Ahead", "hooks_of"]

#: Bytes of gradients that start a push during backward.
_BUCKET = 1 << 20


class Ahead:
    """The gradients of one step that are collected or pushed during backward."""

    def __init__(self) -> None:
        self._collected: list[tuple[Entry, Any]] = []
        #: Entries whose gradients were pushed, with the gradient and the version of its memory.
        self._pushed: dict[str, tuple[Entry, torch.Tensor, int]] = {}

    def __bool__(self) -> bool:
        """Returns whether a gradient was pushed."""
        return bool(self._pushed)

    def __contains__(self, name: str) -> bool:
        return name in self._pushed

    def __iter__(self) -> Iterator[str]:
        """Names of the pushed gradients."""
        return iter(self._pushed)

    def collect(self, entry: Entry, rows: bool) -> list[tuple[Entry, Any]]:
        """Adds a complete gradient. Returns those to push now, by entry; none while they are few.

        Raises:
            ConfigError: The gradient of this step was pushed already.
        """
        if entry.name in self._pushed:
            raise ConfigError(
                "a second backward before step()",
                tensor=entry.name,
                expected="one backward for each step",
                got="a second one",
                advice="push_in_backward allows no accumulation; after an exception in backward, zero_grad() "
                "ends the step",
            )
        gradient = entry.gradient(rows)
        if gradient is None or isinstance(gradient, Sparse):
            return []
        self._collected.append((entry, gradient))
        if sum(each.nbytes for _, each in self._collected) < _BUCKET:
            return []
        leaving, self._collected = self._collected, []
        return leaving

    def pushed(self, entries: Iterable[Entry]) -> None:
        """Notes that these gradients were pushed."""
        for entry in entries:
            grad = entry.param.grad
            assert grad is not None
            self._pushed[entry.name] = entry, grad, grad._version

    def check(self) -> None:
        """Raises if something has changed a gradient that was pushed."""
        for name, (entry, grad, version) in self._pushed.items():
            now = entry.param.grad
            if now is not grad or now._version != version:
                raise ConfigError(
                    "the gradient was changed after it was sent",
                    tensor=name,
                    expected="the gradient that backward made",
                    got="another one",
                    advice="push_in_backward allows no accumulation, clipping or GradScaler",
                )

    def drop(self) -> None:
        """Drops the collected gradients."""
        self._collected = []

    def clear(self) -> None:
        """Ends the step."""
        self._collected, self._pushed = [], {}


class _PushesAhead(Protocol):
    def _push_ahead(self, entry: Entry) -> None: ...


def _hook_of(optimizer: _PushesAhead, entry: Entry) -> Callable[[torch.Tensor], None]:
    """The hook that backward calls when a gradient is complete.

    Torch keeps it out of sight of Python's cycle collector, so it must not keep the optimizer or the
    parameter alive.
    """
    own, its = weakref.ref(optimizer), weakref.ref(entry)

    def leaves(_: torch.Tensor) -> None:
        optimizer, entry = own(), its()
        if optimizer is not None and entry is not None:
            optimizer._push_ahead(entry)

    return leaves


def hooks_of(optimizer: _PushesAhead, entries: Iterable[Entry]) -> list[Any]:
    """Registers the hooks of trained parameters; returns their handles."""
    register: Any = torch.Tensor.register_post_accumulate_grad_hook
    return [register(e.param, _hook_of(optimizer, e)) for e in entries if e.param.requires_grad]
