"""Copies between a GPU and pinned memory."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

__all__ = ["Gpu"]

_NOT_PINNED = "no pinned memory is left, so some copies from and to the GPU wait for it"


class Gpu:
    """Copies between a GPU and pinned memory on their own stream, so no call waits for the whole GPU.

    Attributes:
        pinned_bytes: Bytes of pinned memory for gradients and values.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._module = device, torch.get_device_module(device)
        self._stream = self._module.Stream(device=device)
        self._reset()

    def _reset(self) -> None:
        #: Mark the last copies of `fetch` and `show`, and of all.
        self._own: Any = None
        self._last: Any = None
        self._warned = False
        self.pinned_bytes = 0

    def pinned(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Allocates pinned memory, which the GPU accesses directly; ordinary memory if none is left."""
        try:
            memory = self._pin(shape, dtype)
        except RuntimeError as error:
            if not self._warned:
                self._warned = True
                warnings.warn(f"{_NOT_PINNED} ({error})", RuntimeWarning, stacklevel=2)
            return torch.empty(shape, dtype=dtype, device="cpu")
        self.pinned_bytes += memory.nbytes
        return memory

    def _pin(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True)

    def empty(self, shape: int | Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Allocates memory of the GPU."""
        return torch.empty(shape, dtype=dtype, device=self._device)

    def event(self) -> Any:
        """Makes an event, which marks a place in a stream."""
        return self._module.Event()

    def after(self, event: Any) -> None:
        """Lets what is submitted from now on wait for an event; nothing else waits."""
        event.wait(self._module.current_stream(self._device))

    @contextlib.contextmanager
    def _after_what_is_queued(self) -> Iterator[None]:
        self._stream.wait_stream(self._module.current_stream(self._device))
        with self._module.stream(self._stream):
            yield

    def fetch(self, tensor: torch.Tensor, into: torch.Tensor) -> None:
        """Begins to copy; `wait` before `into` is read."""
        with self._after_what_is_queued():
            into.copy_(tensor.to(into.dtype), non_blocking=True)
            self._mark()

    def _mark(self) -> None:
        if self._own is None:
            self._own = self.event()
        self._own.record(self._stream)
        self._last = self._own

    def send(self, body: torch.Tensor, into: torch.Tensor, copied: Any) -> None:
        """Begins to copy what the current stream makes; `copied` then marks the end of the copy."""
        with self._after_what_is_queued():
            into.copy_(body, non_blocking=True)
            copied.record(self._stream)
        self._last = copied

    def wait(self) -> None:
        """Until what was asked for has arrived, and what is shown has left."""
        if self._last is not None:
            self._last.synchronize()
            self._last = None

    def show(self, values: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Starts to fill parameters; GPU work that is submitted from now on sees the new values."""
        with self._after_what_is_queued():
            for param, new in values:
                if param.dtype != new.dtype:  # converted there
                    param.copy_(new.to(self._device, non_blocking=True), non_blocking=True)
                else:
                    param.copy_(new, non_blocking=True)
            self._mark()
        self._module.current_stream(self._device).wait_stream(self._stream)
