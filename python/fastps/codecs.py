"""Codecs: how gradients are encoded. The bytes are a contract (``protos/README.md``) for every language.

A lossy codec drops part of a gradient. A `fastps.Worker` and a bound list (`fastps.Store.bind`) keep that
part in an `ErrorFeedback` and add it to the next gradient (Seide et al. 2014; Karimireddy et al. 2019).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from fastps import _fastps
from fastps._fastps import ErrorFeedback
from fastps._shared.checks import choice, integer
from fastps._shared.types import Array

__all__ = ["BFloat16", "Codec", "ErrorFeedback", "Float32", "FourBit", "Int8", "OneBit"]


@dataclass(frozen=True)
class Codec:
    """Base of all codecs; use a subclass. Invalid settings raise `fastps.ConfigError`."""

    _kind: ClassVar[str] = ""

    def __post_init__(self) -> None:
        _fastps.check_codec(self)

    @staticmethod
    def names() -> tuple[str, ...]:
        """The names that `named` accepts, from the largest bodies to the smallest.

        >>> fastps.codecs.Codec.names()
        ('float32', 'bfloat16', 'int8', 'fourbit', 'onebit')
        """
        return tuple(each._kind for each in Codec.__subclasses__())

    @staticmethod
    def named(name: str, **settings: Any) -> Codec:
        """The codec of a name, in lower case, with default settings except those given.

        Raises:
            ConfigError: No codec has this name, or a setting is invalid.

        >>> fastps.codecs.Codec.named("int8", stochastic=True)
        Int8(block=64, stochastic=True, seed=0)
        """
        kinds = {each._kind: each for each in Codec.__subclasses__()}
        return choice("codec", name, kinds)(**settings)

    def body_len(self, n: int) -> int:
        """Bytes of the body of `n` elements of a slice, 0 <= n < 2**32.

        >>> fastps.Int8().body_len(1000)
        1016
        """
        return _fastps.body_len(self, integer("n", n))

    def encode(self, array: Any, residual: Any = None, *, first_element: int = 0, sequence: int = 0) -> bytes:
        """Encodes one slice; returns its body.

        Args:
            array: C-contiguous float32, any shape, read in row-major order; finite.
            residual: Writable C-contiguous float32 of as many elements, or None. If given, ``array +
                residual`` is encoded, and `residual` becomes the rounding error (error feedback).
            first_element: Index of the first element in its tensor, a multiple of 8; only stochastic rounding
                uses it.
            sequence: Number of the push; only stochastic rounding uses it.

        Raises:
            NonFiniteError: A value, or its sum with the residual, is NaN or infinite; `residual` is
                unchanged.
            DTypeError, ShapeError: `array` or `residual` is not as described.
            ConfigError: `first_element` or `sequence` is not as described.

        >>> import numpy as np
        >>> fastps.BFloat16().encode(np.array([1.0, -2.0], np.float32)).hex()
        '803f00c0'
        """
        at = (integer("first_element", first_element), integer("sequence", sequence))
        return _fastps.encode(self, array, residual, *at)

    def decode(self, body: Any, n: int) -> Array:
        """Decodes a body of `n` elements; returns a new float32 array of shape ``(n,)``.

        Args:
            body: Bytes (or a contiguous buffer of bytes) as `encode` returns them.
            n: Number of elements, >= 0.

        Raises:
            FrameError: `body` is not a body of `n` elements.
            ConfigError: `n` is negative or not an integer.

        >>> fastps.BFloat16().decode(bytes.fromhex("803f00c0"), 2)
        array([ 1., -2.], dtype=float32)
        """
        return _fastps.decode(self, body, integer("n", n))


@dataclass(frozen=True)
class Float32(Codec):
    """The gradient unchanged: 4 bytes per element. The default."""

    _kind = "float32"


@dataclass(frozen=True)
class BFloat16(Codec):
    """The upper half of each float32, rounded to nearest even: 2 bytes per element."""

    _kind = "bfloat16"


@dataclass(frozen=True)
class Int8(Codec):
    """One signed byte per element, one power-of-two scale per 64 elements: 8.125 bits per element.

    Args:
        block: Elements that share a scale; must be 64.
        stochastic: Round up or down at random, unbiased (Philox4x32-10, counted by element and push).
        seed: Key of the random numbers, 0 to 2**64 - 1; only with `stochastic`.

    >>> fastps.Int8(stochastic=True, seed=7).block
    64
    """

    _kind = "int8"
    block: int = 64
    stochastic: bool = False
    seed: int = 0


@dataclass(frozen=True)
class FourBit(Codec):
    """A sign and one of seven powers of two per element, one scale per 64 elements: 4.125 bits per element.

    The differences of `fastps.DiLoCo` lose next to nothing (E3M0; Douillard et al., 2025, arXiv:2501.18512).
    Without error feedback all below 1/128 of a block's largest magnitude is dropped.

    Args:
        block: Elements that share a scale; must be 64.

    >>> fastps.FourBit().body_len(1000)
    516
    """

    _kind = "fourbit"
    block: int = 64


@dataclass(frozen=True)
class OneBit(Codec):
    """One sign bit per element, two means per 1024 elements (Seide et al., Interspeech 2014).

    Needs error feedback, so it raises `fastps.ConfigError` except in a `fastps.Worker` or a bound list.

    Args:
        block: Elements that share the two means; must be 1024.
    """

    _kind = "onebit"
    block: int = 1024
