"""Rounding to bfloat16 in NumPy, written from `protos/README.md` and not from the Rust code."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from reference_optim import Array

Bits = NDArray[np.uint16]
_LOW = np.uint64(0xFFFFFFFF)
GOLDEN_SEED = 0x0123456789ABCDEF


def widen(bits: Bits) -> Array:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def nearest(x: Array) -> Bits:
    return _rounded(x, lambda magnitude: 0x7FFF + (magnitude >> 16 & 1))


def stochastic(x: Array, seed: int, step: int, first: int = 0) -> Bits:
    """The slice had taken `step` steps; `first` is the tensor's element of `x[0]`."""
    noise = random_bits(seed, step, first, x.size).reshape(x.shape)
    return _rounded(x, lambda _: noise)


def _rounded(x: Array, added) -> Bits:  # type: ignore[no-untyped-def]
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.int64)
    magnitude = bits & 0x7FFFFFFF
    finite = np.minimum(magnitude + added(magnitude) >> 16, 0x7F7F)
    other = np.where(magnitude > 0x7F800000, 0x7FC0, 0x7F80)
    return ((bits >> 16 & 0x8000) | np.where(magnitude < 0x7F800000, finite, other)).astype(np.uint16)


def random_bits(seed: int, step: int, first: int, n: int) -> NDArray[np.int64]:
    """16 bits for each of `n` elements: Philox4x32-10 under the seed."""
    start = first // 8
    counter = np.arange(start, (first + n + 7) // 8, dtype=np.uint64)
    high = 1 << 63 | step
    x = [counter & _LOW, counter >> 32, *(np.full_like(counter, w) for w in (high & 0xFFFFFFFF, high >> 32))]
    k0, k1 = seed & 0xFFFFFFFF, seed >> 32
    for _ in range(10):
        a, b = x[0] * np.uint64(0xD2511F53), x[2] * np.uint64(0xCD9E8D57)
        x = [(b >> 32) ^ x[1] ^ np.uint64(k0), b & _LOW, (a >> 32) ^ x[3] ^ np.uint64(k1), a & _LOW]
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    words = np.stack(x, axis=1)
    halves = np.stack([words & 0xFFFF, words >> 16], axis=2).reshape(-1)
    return halves[first - 8 * start :][:n].astype(np.int64)


def golden() -> dict[str, Any]:
    """Inputs of odd lengths with the special values, for 32 steps, and their roundings."""
    special = [0x0, 0x80000000, 0x1, 0x80000001, 0x7FFF, 0x8000, 0x18000, 0x80018000, 0x7FFFFF, 0x800000]
    special += [0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0xBF808000, 0x7F7F0000, 0x7F7F7FFF]
    special += [0x7F7F8000, 0x7F7FFFFF, 0xFF7FFFFF, 0x3F800000]
    rng, cases = np.random.default_rng(75), []
    for step in range(32):
        bits = rng.integers(0, 0x7F800000, 2 * step + 3, dtype=np.uint32) | rng.choice(
            [0, 1 << 31], 2 * step + 3
        )
        x = np.concatenate([np.array(special, np.uint32), bits.astype(np.uint32)]).view(np.float32)
        first = int(rng.integers(0, 1 << 40)) if step else 0
        cases.append(
            {
                "step": step * step * 1_000_003,
                "first": first,
                "input": x.astype("<f4").tobytes().hex(),
                "nearest": nearest(x).astype("<u2").tobytes().hex(),
                "stochastic": stochastic(x, GOLDEN_SEED, step * step * 1_000_003, first)
                .astype("<u2")
                .tobytes()
                .hex(),
            }
        )
    return {"seed": f"{GOLDEN_SEED:x}", "cases": cases}
