"""Gradients that are encoded on their GPU, and what the codec leaves unsaid of them."""

from __future__ import annotations

import math

import torch

from fastps._shared.types import Array
from fastps.codecs import Codec
from fastps.errors import NonFiniteError
from fastps.torch._gpu import Gpu
from fastps.torch.encode import Encoded, body_len, encode

__all__ = ["Bodies", "Residuals"]

#: Bodies of a parameter in memory: with `overlap`, one is pushed while the next is encoded.
RING = 2


class _Slot:
    """A body on the GPU and in pinned memory, each with a last byte that is 1 if a value was not finite."""

    def __init__(self, codec: Codec, shape: torch.Size, gpu: Gpu) -> None:
        size = body_len(codec, math.prod(shape))
        self.made = gpu.empty(size + 1, torch.uint8)
        self.arrived = gpu.pinned((size + 1,), torch.uint8)
        self.copied = gpu.event()
        self.encoded = Encoded(codec, self.arrived[:size], shape)
        self.flag: Array = self.arrived[size:].numpy()


class Bodies:
    """The bodies of one parameter's gradients. Only the first allocates memory.

    A residual is of the gradients that were taken: `encode` leaves it as it is, and `taken` replaces it.

    Args:
        name: The parameter's name.
        shape: Its shape.
        codec: A lossy codec.
        gpu: The GPU that it is on.
    """

    def __init__(self, name: str, shape: torch.Size, codec: Codec, gpu: Gpu) -> None:
        self._name, self._shape, self._codec, self._gpu = name, shape, codec, gpu
        self._slots: list[_Slot] = []
        self._turn = 0  # which slot is next
        self._count = 0
        #: The rounding error so far, and that after the gradient that was encoded last.
        self._residuals: list[torch.Tensor] = []

    def encode(self, grad: torch.Tensor) -> Encoded:
        """Encodes on the current stream; the body is complete after `Gpu.wait`."""
        if not self._residuals:
            self._residuals = [self._gpu.empty(self._shape, torch.float32).zero_() for _ in range(2)]
        if not self._slots:
            self._slots = [_Slot(self._codec, self._shape, self._gpu) for _ in range(RING)]
        slot = self._slots[self._turn]
        self._gpu.after(slot.copied)
        slot.made[-1:].zero_()
        before, then = self._residuals
        then.copy_(before)
        one = self._name
        encode(
            self._codec,
            {one: grad},
            {one: then},
            sequence=self._count,
            out={one: slot.made[:-1]},
            bad={one: slot.made[-1:]},
        )
        self._gpu.send(slot.made, slot.arrived, slot.copied)
        self._count += 1
        return slot.encoded

    def check(self) -> None:
        """Raises if the last gradient was not finite; after `Gpu.wait`."""
        if self._slots[self._turn].flag[0]:
            raise NonFiniteError(
                "a value is not finite", tensor=self._name, expected="finite values", got="NaN or infinity"
            )

    def taken(self) -> None:
        """Notes that the last gradient was sent, or waits to be. Without it the next one replaces that."""
        self._residuals.reverse()
        self._turn = (self._turn + 1) % RING

    def residual(self) -> Array | None:
        """A copy of the residual, flat; None before the first gradient."""
        return self._residuals[0].view(-1).cpu().numpy() if self._residuals else None

    def load(self, residual: Array | None) -> None:
        """Replaces the residual; None: by zeros."""
        if residual is not None and not self._residuals:
            self._residuals = [self._gpu.empty(self._shape, torch.float32) for _ in range(2)]
        if self._residuals:
            kept = self._residuals[0].view(-1)
            _ = kept.zero_() if residual is None else kept.copy_(torch.as_tensor(residual))


class Residuals:
    """The residuals on GPUs, for a worker's state.

    Args:
        bodies: The bodies of parameters by name; more may come.
    """

    def __init__(self, bodies: dict[str, Bodies]) -> None:
        self._bodies = bodies

    def taken(self, name: str) -> None:
        """Replaces that of a tensor by the one after its last gradient."""
        self._bodies[name].taken()

    def state_dict(self) -> dict[str, Array]:
        """Copies of them by name."""
        found = {name: bodies.residual() for name, bodies in self._bodies.items()}
        return {name: residual for name, residual in found.items() if residual is not None}

    def take(self, residuals: dict[str, Array]) -> None:
        """Replaces them by those of a state, and removes those from there."""
        for name, bodies in self._bodies.items():
            bodies.load(residuals.pop(name, None))
