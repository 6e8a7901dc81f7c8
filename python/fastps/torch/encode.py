"""The codecs as plain torch operations, so that a gradient is encoded on the device that it lies on.

The bytes are those of ``protos/README.md``, on every device: all that rounds is exact arithmetic or integers.
No operation waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
import torch

from fastps import _fastps
from fastps._shared.checks import integer, invalid, listed
from fastps._shared.types import Array
from fastps.codecs import BFloat16, Codec, FourBit, Int8, OneBit
from fastps.errors import ConfigError, DTypeError

__all__ = ["SLICE", "Encoded", "body_len", "decode", "encode"]

#: Elements of a full slice of a float32 tensor.
SLICE = 258_048
#: Slices that are encoded together: their float32 copy is 16 MiB.
_TOGETHER = 16
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
#: Of a float32: its magnitude, its mantissa, the leading 1 that the mantissa leaves out, infinity.
_MAGNITUDE, _MANTISSA, _LEADING, _INFINITY = 0x7FFF_FFFF, 0x007F_FFFF, 0x0080_0000, 0x7F80_0000
#: Blocks whose largest exponent field is smaller are zero.
_SMALLEST = 32
_WORD = 0xFFFF_FFFF
_ROUNDS, _MULTIPLIERS, _WEYL = 10, (0xD251_1F53, 0xCD9E_8D57), (0x9E37_79B9, 0xBB67_AE85)

#: The parts of the bodies of rows of equal length; what they decode to, padded as the values were; and where
#: a value was not finite.
_Made = tuple[tuple[torch.Tensor, ...], Callable[[], torch.Tensor], torch.Tensor]


class Encoded(_fastps.Encoded):
    """A gradient that is encoded already: a push, a bound list or a `fastps.Worker` sends it as it is.

    Its bytes are checked as those that come over the network are. A worker adds the values to the next
    gradient where a server has refused it or never got it.

    Args:
        codec: What it is encoded with. With `fastps.OneBit` keep what a body leaves unsaid as a residual.
        body: uint8, contiguous, of one dimension: the bodies of the tensor's slices (258,048 elements), one
            after the other, as `fastps.torch.encode.encode` gives them. In CPU memory it is used in place;
            that of another device is copied now.
        shape: The gradient's shape.

    Raises:
        ConfigError, DTypeError: An argument is not as described. The push names the tensor in errors of the
            bytes.

    >>> import torch
    >>> from fastps.torch import encode
    >>> store = fastps.Store()
    >>> store.register("w", np.zeros(2, np.float32), optimizer=fastps.SGD(lr=1.0))
    >>> codec, grads = fastps.BFloat16(), {"w": torch.tensor([1.0, -2.0])}
    >>> bodies = encode.encode(codec, grads)
    >>> store.push({"w": fastps.torch.Encoded(codec, bodies["w"], grads["w"].shape)}).bytes
    4
    >>> store.pull("w")
    array([-1.,  2.], dtype=float32)
    """

    codec: Codec
    body: torch.Tensor

    def __new__(cls, codec: Codec, body: torch.Tensor, shape: Sequence[int]) -> Self:
        if not isinstance(codec, Codec):
            raise invalid("codec", "an object such as fastps.Int8()", codec)
        if not isinstance(body, torch.Tensor) or body.dtype != torch.uint8 or body.ndim != 1:
            expected, got = "a torch tensor of uint8 and one dimension", type(body).__name__
            if isinstance(body, torch.Tensor):
                got = f"one of {body.dtype} and {body.ndim} dimensions"
            raise DTypeError("the body of an encoded gradient", expected=expected, got=got)
        body = body.detach().cpu()
        sizes = tuple(integer("shape", size) for size in listed("shape", shape))
        self = super().__new__(cls, codec, body.numpy(), sizes)
        self.body = body
        return self

    def __init__(self, codec: Codec, body: torch.Tensor, shape: Sequence[int]) -> None:  # noqa: ARG002
        self.codec = codec  # tools that read signatures look for one here

    @property
    def nbytes(self) -> int:
        """Bytes of the body."""
        return self.body.nbytes

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        """The values, float32 of the gradient's shape. Raises `FrameError` if the body is not one of them."""
        n, body, codec = math.prod(self.shape), self.body.numpy(), self.codec
        values = np.empty(n, np.float32)
        for at in range(0, n, SLICE):
            length, start = min(SLICE, n - at), at // SLICE * codec.body_len(SLICE)
            values[at : at + length] = codec.decode(body[start : start + codec.body_len(length)], length)
        return values.reshape(self.shape)


def body_len(codec: Codec, n: int) -> int:
    """Bytes of the bodies of a tensor of `n` elements: those of its slices, one after the other.

    >>> from fastps.torch import encode
    >>> encode.body_len(fastps.Int8(), 258_049)
    262082
    """
    return n // SLICE * codec.body_len(SLICE) + codec.body_len(n % SLICE)


def encode(
    codec: Codec,
    grads: Mapping[str, torch.Tensor],
    residuals: Mapping[str, torch.Tensor] | None = None,
    *,
    first_element: int = 0,
    sequence: int = 0,
    out: Mapping[str, torch.Tensor] | None = None,
    bad: Mapping[str, torch.Tensor] | None = None,
) -> dict[str, torch.Tensor]:
    """Encodes gradients where they lie. A value that is not finite makes a body that no server accepts.

    Args:
        codec: `fastps.BFloat16`, `fastps.Int8`, `fastps.FourBit` or `fastps.OneBit`.
        grads: Names to float32, float16 or bfloat16 tensors of any shape, on any device.
        residuals: Names to contiguous float32 tensors of the gradients' shapes, on their devices. If given,
            the sums are encoded, and each residual becomes the rounding error (error feedback); that of a
            block with a value that is not finite stays as it was.
        first_element: Index of the gradients' first elements in their tensors, a multiple of 8; only
            stochastic rounding uses it.
        sequence: Number of the push; only stochastic rounding uses it.
        out: Names to tensors as this function returns them, to be filled.
        bad: Names to uint8 tensors of one element, which becomes 1 if a value is not finite.

    Returns:
        Names to uint8 tensors of shape ``(body_len(codec, n),)``, on the gradients' devices.

    Raises:
        DTypeError: A gradient has another dtype, such as a complex or an integer one.
        ConfigError: The codec is another one, or a residual or `out` does not fit its gradient.

    >>> import torch
    >>> from fastps.torch import encode
    >>> encode.encode(fastps.BFloat16(), {"w": torch.tensor([1.0, -2.0])})["w"]
    tensor([128,  63,   0, 192], dtype=torch.uint8)
    """
    bodies = {}
    for name, grad in grads.items():
        if grad.dtype not in _DTYPES or grad.layout != torch.strided:
            expected, got = "float32, float16 or bfloat16, strided", f"{grad.dtype}, {grad.layout}"
            raise DTypeError("no codec encodes this gradient", tensor=name, expected=expected, got=got)
        residual = None if residuals is None else residuals[name]
        if residual is not None:
            _check(name, "residual", residual, (grad.shape, torch.float32, grad.device))
        size = (body_len(codec, grad.numel()),)
        body = torch.empty(size, dtype=torch.uint8, device=grad.device) if out is None else out[name]
        _check(name, "out", body, (size, torch.uint8, grad.device))
        _encode(
            codec,
            grad.detach().resolve_neg(),
            residual,
            (first_element, sequence),
            body,
            None if bad is None else bad[name],
        )
        bodies[name] = body
    return bodies


def decode(codec: Codec, body: torch.Tensor, n: int) -> torch.Tensor:
    """The values of a body that `encode` returned: float32, of shape ``(n,)``, on the body's device."""
    values = torch.empty(n, dtype=torch.float32, device=body.device)
    for at, rows, length in _runs(n):
        start, size = at // SLICE * codec.body_len(SLICE), codec.body_len(length)
        some = body[start : start + rows * size].view(rows, size)
        values[at : at + rows * length] = _of(codec).decoder(some, length)[:, :length].reshape(-1)
    return values


def _check(name: str, what: str, given: torch.Tensor, expected: tuple[object, ...]) -> None:
    got = (given.shape, given.dtype, given.device)
    if got != expected or not given.is_contiguous():
        wanted = "contiguous, of {}, {}, on {}".format(*expected)
        raise ConfigError(f"{what} does not fit", tensor=name, expected=wanted, got="{}, {}, {}".format(*got))


def _runs(n: int) -> Iterator[tuple[int, int, int]]:
    """Runs of slices of one length: the first element, how many slices, elements of each."""
    whole = n // SLICE
    for k in range(0, whole, _TOGETHER):
        yield k * SLICE, min(_TOGETHER, whole - k), SLICE
    if n % SLICE:
        yield whole * SLICE, 1, n % SLICE


@torch.no_grad()
def _encode(
    codec: Codec,
    grad: torch.Tensor,
    residual: torch.Tensor | None,
    position: tuple[int, int],
    body: torch.Tensor,
    bad: torch.Tensor | None,
) -> None:
    flat, encoder, (first, sequence) = grad.reshape(-1), _of(codec).encoder, position
    for at, rows, length in _runs(flat.numel()):
        part = slice(at, at + rows * length)
        v = flat[part].to(torch.float32)
        if residual is not None:
            v = v + residual.view(-1)[part]
        v = torch.nn.functional.pad(v.view(rows, length), (0, -length % _of(codec).block))
        made, decoded, broken = encoder(codec, v, length, first + at, sequence)
        start = at // SLICE * codec.body_len(SLICE)
        torch.cat(made, 1, out=body[start : start + rows * codec.body_len(length)].view(rows, -1))
        if bad is not None:
            bad |= broken.any()
        if residual is not None:
            left, kept = (v - decoded())[:, :length].reshape(-1), residual.view(-1)[part]
            kept.copy_(torch.where(left.isfinite(), left, kept))


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(torch.int32)


def _power(field: torch.Tensor) -> torch.Tensor:
    """2^(field - 127), for the exponent fields of normal numbers."""
    return (field << 23).view(torch.float32)


def _exponents(magnitudes: torch.Tensor) -> torch.Tensor:
    """The exponent field of each block's largest magnitude; 0 if the block is too small."""
    e = magnitudes.amax(-1, keepdim=True) >> 23
    return torch.where(e < _SMALLEST, 0, e)


def _bytes(values: torch.Tensor, rows: int) -> torch.Tensor:
    return values.contiguous().view(torch.uint8).view(rows, -1)


# -- bfloat16 --------------------------------------------------------------------------------------------


def _encode_bfloat16(_codec: Codec, v: torch.Tensor, _length: int, _at: int, _sequence: int) -> _Made:
    bits = _bits(v)
    magnitude = bits & _MAGNITUDE
    rounded = (magnitude + 0x7FFF + ((magnitude >> 16) & 1)) >> 16
    broken = magnitude >= _INFINITY
    kept = torch.where(broken, 0x7FC0, rounded.clamp(max=0x7F7F))
    body = _bytes(((bits >> 16) & -0x8000 | kept).to(torch.int16), len(v))
    return (body,), lambda: _decode_bfloat16(body, v.shape[1]), broken


def _decode_bfloat16(body: torch.Tensor, _length: int) -> torch.Tensor:
    return (body.view(torch.int16).to(torch.int32) << 16).view(torch.float32)


# -- int8 ------------------------------------------------------------------------------------------------


def _encode_int8(codec: Codec, v: torch.Tensor, length: int, at: int, sequence: int) -> _Made:
    assert isinstance(codec, Int8)
    v = v.view(len(v), -1, codec.block)
    bits = _bits(v)
    e = _exponents(bits & _MAGNITUDE)
    if codec.stochastic:
        q = _drawn(bits, e, _noise(codec.seed, at // 8, sequence, v))
    else:
        q = (v * torch.where(e == 0, 0.0, _power(260 - e))).round_()
    q = q.clamp_(-127, 127).to(torch.int8)
    made = e.to(torch.uint8).view(len(v), -1), _bytes(q, len(v))[:, :length]
    return made, lambda: _values_int8(e, q).view(len(v), -1), e == 255


def _drawn(bits: torch.Tensor, e: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Rounds up or down. In integers, since the product of a tiny number may underflow."""
    bits = torch.where(e == 0, 0, bits)
    f = (bits >> 23) & 0xFF
    m = (bits & _MANTISSA) | torch.where(f == 0, 0, _LEADING)
    shift = (e - f + 1).clamp_(max=31)
    down = m >> shift
    up = down + (down << shift != m).to(torch.int32)
    return (torch.where(bits < 0, -up, down) + noise) >> 16


def _noise(seed: int, first: int, sequence: int, like: torch.Tensor) -> torch.Tensor:
    """16 bits for each element: Philox4x32-10 (Salmon et al., SC 2011), in int64, of which 32 bits count."""
    counter = torch.arange(first, first + like.numel() // 8, device=like.device)
    x0, x1 = counter & _WORD, (counter >> 32) & _WORD
    x2, x3 = (torch.full_like(counter, sequence >> shift & _WORD) for shift in (0, 32))
    keys = [seed & _WORD, seed >> 32]
    for _ in range(_ROUNDS):
        a, b = x0 * _MULTIPLIERS[0], x2 * _MULTIPLIERS[1]
        x0, x1 = ((b >> 32) & _WORD) ^ x1 ^ keys[0], b & _WORD
        x2, x3 = ((a >> 32) & _WORD) ^ x3 ^ keys[1], a & _WORD
        keys = [(key + weyl) & _WORD for key, weyl in zip(keys, _WEYL, strict=True)]
    halves = [half for word in (x0, x1, x2, x3) for half in (word & 0xFFFF, word >> 16)]
    return torch.stack(halves, -1).to(torch.int32).view(like.shape)


def _decode_int8(body: torch.Tensor, length: int) -> torch.Tensor:
    blocks = -(-length // Int8.block)
    q = torch.nn.functional.pad(body[:, blocks:], (0, -length % Int8.block))
    e = body[:, :blocks].to(torch.int32).unsqueeze(-1)
    return _values_int8(e, q.view(torch.int8).view(len(body), -1, Int8.block)).view(len(body), -1)


def _values_int8(e: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    factor = torch.where(e == 0, 0.0, _power(e - 6))
    return q * torch.where(e == 255, torch.nan, factor)


# -- fourbit ---------------------------------------------------------------------------------------------


def _encode_fourbit(codec: Codec, v: torch.Tensor, length: int, _at: int, _sequence: int) -> _Made:
    assert isinstance(codec, FourBit)
    bits = _bits(v).view(len(v), -1, codec.block)
    magnitude = bits & _MAGNITUDE
    largest = magnitude.amax(-1, keepdim=True)
    e = largest >> 23
    scale = torch.where(e < _SMALLEST, 0, _rounded(largest).clamp_(max=254))
    scale = torch.where(e == 255, 255, scale)
    code = torch.maximum(_rounded(magnitude) + 7 - scale, ((magnitude >> 23) + 7 >= scale).to(torch.int32))
    code = torch.where(scale == 0, 0, code.clamp_(0, 7))
    element = torch.where((bits < 0) & (code > 0), code | 8, code)
    pairs = element.to(torch.uint8).view(len(v), -1, 2)
    packed = (pairs[..., 0] | pairs[..., 1] << 4)[:, : -(-length // 2)]
    return (_bytes(scale.to(torch.uint8), len(v)), packed), lambda: _values_fourbit(scale, element), e == 255


def _rounded(magnitude: torch.Tensor) -> torch.Tensor:
    """The exponent field of the nearest power of two."""
    return ((magnitude >> 22) + 1) >> 1


def _decode_fourbit(body: torch.Tensor, length: int) -> torch.Tensor:
    blocks = -(-length // FourBit.block)
    pairs = torch.nn.functional.pad(body[:, blocks:], (0, blocks * FourBit.block // 2 - -(-length // 2)))
    element = torch.stack([pairs & 15, pairs >> 4], -1).view(len(body), blocks, -1).to(torch.int32)
    return _values_fourbit(body[:, :blocks].to(torch.int32).unsqueeze(-1), element)


def _values_fourbit(scale: torch.Tensor, element: torch.Tensor) -> torch.Tensor:
    code = element & 7
    power = torch.where(code == 0, 0.0, _power((scale - 7 + code).clamp_(min=0)))
    values = torch.where(scale == 255, torch.nan, torch.where(element >= 8, -power, power))
    return values.view(len(values), -1)


# -- onebit ----------------------------------------------------------------------------------------------


def _encode_onebit(codec: Codec, v: torch.Tensor, length: int, _at: int, _sequence: int) -> _Made:
    assert isinstance(codec, OneBit)
    bits = _bits(v).view(len(v), -1, codec.block)
    negative, magnitude = bits < 0, bits & _MAGNITUDE
    e = _exponents(magnitude)
    shift = (e - (magnitude >> 23)).clamp_(max=31)
    a = ((magnitude & _MANTISSA) | _LEADING) >> shift  # of a subnormal nothing is left
    sums = torch.stack([a.sum(-1), (a * negative).sum(-1)], -1)
    sums[..., 0] -= sums[..., 1]
    below = negative.sum(-1)
    starts = torch.arange(0, v.shape[1], codec.block, device=v.device)
    counts = torch.stack([(length - starts).clamp_(max=codec.block) - below, below], -1)
    means = (256 * sums + counts // 2) // counts.clamp(min=1)
    unit = torch.where(e == 0, 0.0, _power((e - 31).clamp_(min=0)))
    means = means.to(torch.float32) * torch.where(e == 255, torch.nan, unit)
    packed = negative.view(len(v), -1, 8).to(torch.uint8) << torch.arange(
        8, dtype=torch.uint8, device=v.device
    )
    signs = packed.sum(-1, dtype=torch.uint8)[:, : -(-length // 8)]
    return (_bytes(means, len(v)), signs), lambda: _values_onebit(means, negative), e == 255


def _decode_onebit(body: torch.Tensor, length: int) -> torch.Tensor:
    blocks = -(-length // OneBit.block)
    means = body[:, : 8 * blocks].reshape(-1).clone().view(torch.float32).view(len(body), blocks, 2)
    signs = torch.nn.functional.pad(body[:, 8 * blocks :], (0, blocks * OneBit.block // 8 - -(-length // 8)))
    bits = signs.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=body.device) & 1
    return _values_onebit(means, bits.view(len(body), blocks, -1) == 1)


def _values_onebit(means: torch.Tensor, negative: torch.Tensor) -> torch.Tensor:
    values = torch.where(negative, -means[..., 1:], means[..., :1])
    return values.view(len(values), -1)


class _Way(NamedTuple):
    """How a codec encodes and decodes rows of equal length, in blocks of so many elements."""

    block: int
    encoder: Callable[[Codec, torch.Tensor, int, int, int], _Made]
    decoder: Callable[[torch.Tensor, int], torch.Tensor]


_WAYS = {
    BFloat16: _Way(1, _encode_bfloat16, _decode_bfloat16),
    Int8: _Way(Int8.block, _encode_int8, _decode_int8),
    FourBit: _Way(FourBit.block, _encode_fourbit, _decode_fourbit),
    OneBit: _Way(OneBit.block, _encode_onebit, _decode_onebit),
}


def _of(codec: Codec) -> _Way:
    if type(codec) not in _WAYS:
        raise invalid("codec", "fastps.BFloat16, fastps.Int8, fastps.FourBit or fastps.OneBit", codec)
    return _WAYS[type(codec)]
