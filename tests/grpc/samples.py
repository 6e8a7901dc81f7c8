"""Tensors and gradients of the conformance tests, and the state that bad input must not change."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import encoders
import numpy as np
from encoders import BFLOAT16, FLOAT32, INT8
from foreign_client import ForeignClient

import fastps
import grpc

NativeCodec = Any
Float32 = np.ndarray[Any, np.dtype[np.float32]]
FreshName = Callable[[str], str]

# Three slices, the last one short and with pad bits; and small ones.
BIG = 2 * encoders.SLICE_LEN + 1027
SMALL = 13
PLAIN = [(FLOAT32, fastps.Float32()), (BFLOAT16, fastps.BFloat16()), (INT8, fastps.Int8())]
SHAPES = [(BIG,), (SMALL,), (3, 5), (), (0,), (encoders.SLICE_LEN,)]


def normal(shape: tuple[int, ...], seed: int, scale: float = 1.0) -> Float32:
    return np.asarray(np.random.default_rng(seed).normal(scale=scale, size=shape), np.float32)


# protos/README.md, "Errors".
STATUS = {
    "frame": grpc.StatusCode.INVALID_ARGUMENT,
    "unknown_tensor": grpc.StatusCode.NOT_FOUND,
    "shape": grpc.StatusCode.INVALID_ARGUMENT,
    "dtype": grpc.StatusCode.INVALID_ARGUMENT,
    "config": grpc.StatusCode.INVALID_ARGUMENT,
    "precondition": grpc.StatusCode.FAILED_PRECONDITION,
    "capacity": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "lease": grpc.StatusCode.FAILED_PRECONDITION,
    "unauthenticated": grpc.StatusCode.UNAUTHENTICATED,
    "denied": grpc.StatusCode.PERMISSION_DENIED,
}


@contextmanager
def unharmed(client: ForeignClient) -> Iterator[None]:
    """Values, versions, state and map are as before; then a good push is applied."""

    def look() -> list[Any]:
        pulled = [client.pull(name) for name in ("target", "small")]
        states = [(n, s.tobytes()) for n, s in client.pull_state("target")]
        return [(values.tobytes(), versions) for values, versions in pulled] + [states, client.names()]

    before = look()
    yield
    assert look() == before
    for name, shape in (("target", (BIG,)), ("small", (SMALL,))):
        versions = client.pull(name)[1]
        receipts = client.push(name, normal(shape, 14))
        assert [r.version for r in receipts] == [v + 1 for v in versions]
