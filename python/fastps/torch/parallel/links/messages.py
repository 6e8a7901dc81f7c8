"""A message between two parts: a header of fixed length, then a tensor's bytes, together if they are few."""

from __future__ import annotations

import dataclasses
import enum
import math
import struct

import torch

from fastps.errors import FrameError

__all__ = ["HEADER", "INLINE", "Kind", "Message", "as_bytes", "pack", "unpack"]

_MAGIC = b"fps\x01"
#: Magic, kind, dtype, dimensions, flags; call, step; micro-batch, micro-batches, number; rows, bytes.
_FIXED = struct.Struct("<4sBBBBQQIIIqQ")
_DIMENSIONS = 16
#: Bytes of a header; the data behind it in a buffer is aligned.
HEADER = 192
#: Maximum bytes of a tensor that is sent with its header.
INLINE = 4096
#: Maximum bytes of a tensor.
_MOST = 1 << 36

_DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.complex128,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
)
_REQUIRES_GRAD, _HAS_TENSOR = 1, 2


class Kind(enum.IntEnum):
    """Kind of a message."""

    HELLO = 1
    VALUE = 2
    GRADIENT = 3
    TOTAL = 4
    PARAMETER = 5
    PARAMETER_GRADIENT = 6
    PORTION = 7
    JOINED = 8
    ASK = 9
    ANSWER = 10
    ERROR = 11
    CLOSE = 12
    LOSS = 13


@dataclasses.dataclass(slots=True)
class Message:
    """A message.

    Attributes:
        kind: Kind of the message.
        number: Which one of its kind: the edge of a value or gradient.
        call: Number of the call of `step` or `predict` that it belongs to, from 1.
        step: Training steps before it.
        micro_batch: Which micro-batch, from 0.
        micro_batches: How many the sender has.
        rows: Rows of the micro-batch, or -1 if the sender does not know. Of an answer: the part that the
            sender waits for, or -1 if it waits for none.
        requires_grad: The sender waits for a gradient.
        tensor: None is no gradient.
        source: The part that sent it; not in the header.
    """

    kind: Kind
    number: int = 0
    call: int = 0
    step: int = 0
    micro_batch: int = 0
    micro_batches: int = 1
    rows: int = -1
    requires_grad: bool = False
    tensor: torch.Tensor | None = None
    source: int = -1


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous CPU tensor's memory as bytes."""
    return tensor.resolve_conj().resolve_neg().reshape(-1).view(torch.uint8)


def pack(message: Message) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The first message on the wire, and the second one if the tensor is not small.

    Raises:
        FrameError: The tensor's dtype or number of dimensions cannot travel.
    """
    tensor, shape, code, size = message.tensor, torch.Size(()), 0, 0
    flags = _REQUIRES_GRAD if message.requires_grad else 0
    if tensor is not None:
        shape = tensor.shape
        size = tensor.numel() * tensor.element_size()
        if tensor.dtype not in _DTYPES or len(shape) > _DIMENSIONS or size > _MOST:
            raise FrameError(
                "a tensor cannot be sent",
                expected=f"a dtype of numbers, at most {_DIMENSIONS} dimensions and {_MOST} bytes",
                got=f"dtype {tensor.dtype} and shape {tuple(shape)}",
            )
        code, flags = _DTYPES.index(tensor.dtype), flags | _HAS_TENSOR
    payload = None if tensor is None or size == 0 else as_bytes(tensor)
    wire = torch.zeros(HEADER + (size if size <= INLINE else 0), dtype=torch.uint8, device="cpu")
    fixed = (message.call, message.step, message.micro_batch, message.micro_batches, message.number)
    view = wire.numpy().data
    _FIXED.pack_into(view, 0, _MAGIC, message.kind, code, len(shape), flags, *fixed, message.rows, size)
    struct.pack_into(f"<{_DIMENSIONS}q", view, _FIXED.size, *shape, *[0] * (_DIMENSIONS - len(shape)))
    if payload is None or size > INLINE:
        return wire, payload
    wire[HEADER:] = payload
    return wire, None


def unpack(wire: torch.Tensor) -> tuple[Message, torch.Size, torch.dtype, int]:
    """The message of a buffer of `HEADER` + `INLINE` bytes, and its tensor's shape, dtype and missing bytes.

    Raises:
        FrameError: It is not one of ours; nothing was allocated for it.
    """
    view = wire.numpy().data
    magic, kind, code, dimensions, flags, call, step, micro, micros, number, rows, size = _FIXED.unpack_from(
        view, 0
    )
    known = magic == _MAGIC and kind in list(Kind) and code < len(_DTYPES) and dimensions <= _DIMENSIONS
    shape = torch.Size(struct.unpack_from(f"<{dimensions}q", view, _FIXED.size) if known else ())
    dtype = _DTYPES[code] if known else torch.uint8
    expected = math.prod(shape) * dtype.itemsize if flags & _HAS_TENSOR else 0
    if not known or min(shape, default=0) < 0 or expected != size or size > _MOST:
        raise FrameError("a message between parts has an invalid header: do all parts run the same fastps?")
    message = Message(Kind(kind), number, call, step, micro, micros, rows, bool(flags & _REQUIRES_GRAD))
    if flags & _HAS_TENSOR and size <= INLINE:
        message.tensor = wire[HEADER : HEADER + size].view(dtype).view(shape)
    return message, shape, dtype, size if size > INLINE else 0
