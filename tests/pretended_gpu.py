"""A GPU that is pretended in CPU memory, so that what is written for a GPU can run without one."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from fastps.torch._gpu import Gpu
from fastps.torch._params import Gpus

#: `benchmarks/gpu.py --rehearse` sets it: checks for a GPU run on a pretended one.
REHEARSAL = "FASTPS_REHEARSE_GPU" in os.environ


class Copy(NamedTuple):
    """A copy between the GPU and CPU memory; times in microseconds."""

    to_gpu: bool
    bytes: int
    begin: float
    end: float


class _Stream:
    def wait_stream(self, other: _Stream) -> None:
        pass


class _Event:
    """Marks the end of a copy.

    Attributes:
        waited: A stream or the host has waited for it.
    """

    def __init__(self) -> None:
        self.waited = True

    def record(self, stream: _Stream) -> None:
        pass

    def wait(self, stream: _Stream) -> None:
        self.waited = True

    def synchronize(self) -> None:
        self.waited = True


class _Driver:
    """Stands for `torch.cuda`."""

    Event = _Event

    def __init__(self) -> None:
        self.current = _Stream()

    def current_stream(self, device: torch.device) -> _Stream:
        return self.current

    @contextlib.contextmanager
    def stream(self, stream: _Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before


class PretendedGpu(Gpu):
    """A gradient arrives only when it is waited for.

    Attributes:
        copies: All copies so far.
        allocated: How often pinned memory, or the GPU's for bodies and residuals, was allocated.
    """

    def __init__(self) -> None:
        self._device, self._module, self._stream = torch.device("cpu"), _Driver(), _Stream()
        self._late: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._broken = False
        self._reset()
        self.copies: list[Copy] = []
        self.allocated = 0

    def _pin(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        self.allocated += 1
        return torch.empty(shape, dtype=dtype)

    def empty(self, shape: int | Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        self.allocated += 1
        return super().empty(shape, dtype)

    def fetch(self, tensor: torch.Tensor, into: torch.Tensor) -> None:
        with self._copying(False, tensor.nbytes):
            arrived = torch.empty_like(into)
            super().fetch(tensor, arrived)
            into.fill_(torch.nan)
            self._late.append((arrived, into))

    def send(self, body: torch.Tensor, into: torch.Tensor, copied: _Event) -> None:
        assert copied.waited, "a body is made in memory whose copy may not have ended"
        copied.waited = False
        with self._copying(False, body.nbytes):
            arrived = torch.empty_like(into)
            super().send(body, arrived, copied)
            into.fill_(0xA5)  # no body: nothing reads it before its event
            self._late.append((arrived, into))

    def wait(self) -> None:
        self._check()
        super().wait()
        for arrived, into in self._late:
            into.copy_(arrived)
        self._late.clear()

    def show(self, values: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        values = list(values)
        with self._copying(True, sum(array.nbytes for _, array in values)):
            super().show(values)

    def fail(self) -> None:
        """From now on every call fails, as those of CUDA do after a kernel has failed."""
        self._broken = True

    def _check(self) -> None:
        if self._broken:
            raise torch.AcceleratorError("CUDA error: device-side assert triggered")

    @contextlib.contextmanager
    def _copying(self, to_gpu: bool, size: int) -> Iterator[None]:
        self._check()
        begin = time.time_ns() / 1e3
        yield
        self.copies.append(Copy(to_gpu, size, begin, time.time_ns() / 1e3))


@contextlib.contextmanager
def pretended() -> Iterator[PretendedGpu]:
    """Parameters of optimizers that are made meanwhile count as being on a GPU."""
    gpu, of = PretendedGpu(), Gpus.of
    Gpus.of = lambda self, device: gpu
    try:
        yield gpu
    finally:
        Gpus.of = of
