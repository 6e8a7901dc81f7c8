"""The codecs in NumPy, written from `protos/README.md`, without any code of fastps.

A body holds the values of one slice. Only the stochastic 8-bit codec depends on the slice's position in its
tensor.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Float32 = NDArray[np.float32]
Floats = NDArray[np.float32] | NDArray[np.float64]

FLOAT32, BFLOAT16, INT8, ONEBIT, FLOAT64, FOURBIT = 1, 2, 3, 4, 5, 6
INT8_BLOCK, ONEBIT_BLOCK, FOURBIT_BLOCK = 64, 1024, 64
SLICE_LEN = 63 * 4096
FLOAT64_SLICE_LEN = 31 * 4096

# Exponent fields below this one (magnitudes below 2^-95) make a block zero.
_SMALLEST = 32


def body_len(codec: int, n: int) -> int:
    """Bytes of a body of `n` elements."""
    return {
        FLOAT32: 4 * n,
        BFLOAT16: 2 * n,
        INT8: -(-n // INT8_BLOCK) + n,
        ONEBIT: 8 * -(-n // ONEBIT_BLOCK) + -(-n // 8),
        FOURBIT: -(-n // FOURBIT_BLOCK) + -(-n // 2),
    }[codec]


def encode(
    codec: int, values: Floats, *, seed: int | None = None, first: int = 0, sequence: int = 0
) -> bytes:
    """The body of finite `values`. With `seed`, 8-bit rounds stochastically; `first` is the index in the
    tensor of the first element, `sequence` the push's number."""
    if codec == FLOAT64:
        return values.astype("<f8").tobytes()
    values = np.ascontiguousarray(values, np.float32).ravel()
    if codec == FLOAT32:
        return values.astype("<f4").tobytes()
    if codec == BFLOAT16:
        return _encode_bfloat16(values)
    if codec == INT8:
        return _encode_int8(values, seed, first, sequence)
    if codec == ONEBIT:
        return _encode_onebit(values)
    if codec == FOURBIT:
        return _encode_fourbit(values)
    raise ValueError(f"unknown codec {codec}")


def decode(codec: int, body: bytes, n: int) -> Float32:
    """The `n` values that a body encodes."""
    if len(body) != body_len(codec, n):
        raise ValueError(f"{len(body)} bytes, expected {body_len(codec, n)}")
    if codec == FLOAT32:
        return np.frombuffer(body, "<f4").astype(np.float32)
    if codec == BFLOAT16:
        return (np.frombuffer(body, "<u2").astype(np.uint32) << 16).view(np.float32)
    if codec == INT8:
        blocks = -(-n // INT8_BLOCK)
        scale = np.repeat(np.frombuffer(body, np.uint8, blocks).astype(np.int32), INT8_BLOCK)[:n]
        q = np.frombuffer(body, np.int8, n, blocks)
        return np.where(scale == 0, 0.0, np.ldexp(q.astype(np.float64), scale - 133)).astype(np.float32)
    if codec == ONEBIT:
        blocks = -(-n // ONEBIT_BLOCK)
        means = np.frombuffer(body, "<f4", 2 * blocks).astype(np.float32).reshape(blocks, 2)
        bits = np.unpackbits(np.frombuffer(body, np.uint8, offset=8 * blocks), bitorder="little", count=n)
        positive, negative = np.repeat(means, ONEBIT_BLOCK, axis=0)[:n].T
        return np.where(bits == 1, -negative, positive)
    if codec == FOURBIT:
        blocks = -(-n // FOURBIT_BLOCK)
        scale = np.repeat(np.frombuffer(body, np.uint8, blocks).astype(np.int32), FOURBIT_BLOCK)[:n]
        pairs = np.frombuffer(body, np.uint8, offset=blocks)
        element = np.stack([pairs & 15, pairs >> 4], axis=1).reshape(-1)[:n].astype(np.int32)
        power = np.ldexp(np.where(element & 7, 1.0, 0.0), scale - 134 + (element & 7))
        return np.where(element & 8, -power, power).astype(np.float32)
    raise ValueError(f"unknown codec {codec}")


def _encode_bfloat16(values: Float32) -> bytes:
    bits = values.view(np.uint32).astype(np.uint64)
    magnitude = bits & 0x7FFFFFFF
    # To nearest, ties to even; what would round to infinity becomes the largest finite value.
    rounded = np.minimum((magnitude + 0x7FFF + ((magnitude >> 16) & 1)) >> 16, 0x7F7F)
    return (rounded | (bits >> 16) & 0x8000).astype("<u2").tobytes()


def _blocks(values: Float32, block: int) -> tuple[Float32, NDArray[np.int64]]:
    """The values in rows of one block, padded with +0; the exponent field of each row's largest magnitude."""
    rows = np.zeros((-(-values.size // block), block), np.float32)
    rows.reshape(-1)[: values.size] = values
    return rows, ((rows.view(np.uint32) & 0x7FFFFFFF).max(axis=1, initial=0) >> 23).astype(np.int64)


def _encode_int8(values: Float32, seed: int | None, first: int, sequence: int) -> bytes:
    rows, exponent = _blocks(values, INT8_BLOCK)
    live = exponent >= _SMALLEST
    # Exact: a float32 times a power of two is a float64.
    scaled = np.ldexp(np.where(live[:, None], rows, 0).astype(np.float64), 133 - exponent[:, None])
    if seed is None:
        q = np.rint(scaled)
    else:
        noise = random_bits(seed, first, rows.size, sequence).reshape(rows.shape)
        q = (np.floor(scaled * 65536).astype(np.int64) + noise) >> 16
        q = np.where(live[:, None], q, 0)
    elements = np.clip(q, -127, 127).astype(np.int8).reshape(-1)[: values.size]
    return np.where(live, exponent, 0).astype(np.uint8).tobytes() + elements.tobytes()


def random_bits(seed: int, first: int, n: int, sequence: int) -> NDArray[np.int64]:
    """16 random bits for each of the `n` elements from `first` (a multiple of 8) on of a tensor."""
    counters = np.arange(first // 8, first // 8 + -(-n // 8), dtype=np.uint64)
    words = philox(seed, counters, sequence)
    halves = np.stack([words & 0xFFFF, words >> 16], axis=2)
    return halves.reshape(-1)[:n].astype(np.int64)


def philox(key: int, counter: NDArray[np.uint64], high: int) -> NDArray[np.uint64]:
    """Philox4x32-10 (Salmon et al., SC 2011): four words for each 128-bit counter `high * 2^64 + counter`."""
    low32 = np.uint64(0xFFFFFFFF)
    x = [counter & low32, counter >> 32, *(np.full_like(counter, w) for w in (high & 0xFFFFFFFF, high >> 32))]
    k0, k1 = key & 0xFFFFFFFF, key >> 32
    for _ in range(10):
        a, b = x[0] * np.uint64(0xD2511F53), x[2] * np.uint64(0xCD9E8D57)
        x = [(b >> 32) ^ x[1] ^ np.uint64(k0), b & low32, (a >> 32) ^ x[3] ^ np.uint64(k1), a & low32]
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return np.stack(x, axis=1)


def _encode_onebit(values: Float32) -> bytes:
    rows, exponent = _blocks(values, ONEBIT_BLOCK)
    live = exponent >= _SMALLEST
    real = np.arange(rows.size).reshape(rows.shape) < values.size
    # The integer part of |v| * 2^(150 - E), below 2^24: sums of integers do not depend on their order.
    magnitudes = np.where(live[:, None], np.abs(rows), 0).astype(np.float64)
    a = np.ldexp(magnitudes, 150 - exponent[:, None]).astype(np.int64)
    means = []
    for side in (~np.signbit(rows) & real, np.signbit(rows) & real):
        total, count = np.where(side, a, 0).sum(axis=1), side.sum(axis=1)
        mean = (256 * total + count // 2) // np.maximum(count, 1)
        means.append(np.ldexp(mean.astype(np.float32), exponent - 158).astype(np.float32))
    pairs = np.where(live[:, None], np.stack(means, axis=1), np.float32(0)).astype("<f4")
    return pairs.tobytes() + np.packbits(np.signbit(values), bitorder="little").tobytes()


def _encode_fourbit(values: Float32) -> bytes:
    rows, exponent = _blocks(values, FOURBIT_BLOCK)
    live = exponent >= _SMALLEST
    magnitudes = np.where(live[:, None], np.abs(rows), 0).astype(np.float64)
    fraction, power = np.frexp(magnitudes.max(axis=1))  # magnitude = fraction * 2^power, from 1/2 to below 1
    scale = np.where(live, np.minimum(power - 1 + (fraction >= 0.75) + 127, 254), 0)
    # Every code's value, from 0 to the scale's power; halfway to the next smaller one it begins.
    codes = np.arange(1, 8)
    powers = np.ldexp(1.0, scale[:, None] - 134 + codes)
    begins = np.where(codes == 1, 0.5, 0.75) * powers
    code = (magnitudes[:, :, None] >= begins[:, None, :]).sum(axis=2) * live[:, None]
    element = (code + 8 * (np.signbit(rows) & (code > 0))).reshape(-1).astype(np.uint8)
    pairs = element[0::2] | element[1::2] << 4
    return scale.astype(np.uint8).tobytes() + pairs[: -(-values.size // 2)].tobytes()


def crc32c(data: bytes) -> int:
    """CRC-32C (Castagnoli): polynomial 0x82F63B78, reflected, all ones first, inverted at the end."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = (crc >> 8) ^ _CRC_TABLE[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


def _crc_entry(byte: int) -> int:
    for _ in range(8):
        byte = (byte >> 1) ^ (0x82F63B78 if byte & 1 else 0)
    return byte


_CRC_TABLE = [_crc_entry(byte) for byte in range(256)]


def golden_input() -> Float32:
    """The input of the golden digests: 5000 values over seven powers of two."""
    i = np.arange(5000, dtype=np.uint64)
    u = ((2654435761 * i + 12345) % 2**32).astype(np.uint32).view(np.int32).astype(np.float32)
    return np.ldexp(u, ((i // 64) % 7).astype(np.int64) - 34).astype(np.float32)
