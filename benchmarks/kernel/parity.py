"""Checks, before kernels.py times anything, that the C references give the same bits and bytes as fastps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from kernel.peers import RULES, Rule
from kernel.references import Floats, Reference
from numpy.typing import NDArray

import fastps
from fastps._fastps import VectorSpaces
from fastps.optimize import Vectors

CODECS: dict[str, fastps.Codec] = {"int8": fastps.Int8(), "onebit": fastps.OneBit()}


def normal(n: int, seed: int = 0) -> Floats:
    """A gradient."""
    return np.random.default_rng(seed).standard_normal(n, np.float32) * np.float32(1e-3)


def check_all(c: Reference) -> None:
    """Ends the program where C and fastps differ: such a reference is worth nothing."""
    for rule in RULES.values():
        check_optimizer(c, rule)
    for name in ("SGD", "AdamW"):
        check_bfloat16(c, RULES[name])
    for name, codec in CODECS.items():
        check_codec(c, name, codec)
    check_vectors(c)


def check_optimizer(c: Reference, rule: Rule) -> None:
    """Three steps after the first one, which for momentum is another formula."""
    n = 5003
    gradient = normal(n, 1)
    with fastps.Store(threads=1) as store:
        store.register("w", normal(n, 2), optimizer=rule.settings)
        store.push("w", gradient)
        arrays = [c.memory(n, values) for values in values_and_state(store)]
        for step in range(2, 5):
            c.runner(rule.kernel, *arrays, n=n, read=gradient, scalars=rule.scalars(step))(1)
            store.push("w", gradient)
        for ours, theirs in zip(values_and_state(store), arrays, strict=True):
            same(rule.kernel, ours, theirs.array)


def check_bfloat16(c: Reference, rule: Rule) -> None:
    """Three steps of a tensor whose values are rounded stochastically."""
    n = 5003
    gradient = normal(n, 1)
    with fastps.Store(threads=1) as store:
        store.register("w", normal(n, 2), rule.settings, dtype="bfloat16", seed=7)
        values, *state = (array.copy() for array in values_and_state(store))
        arrays = [(values.view(np.uint32) >> 16).astype(np.uint16), *state]
        for step in range(1, 4):
            scalars = (*rule.scalars(step), step - 1.0)
            c.runner(f"{rule.kernel}_bfloat16", *arrays, n=n, read=gradient, scalars=scalars)(1)
            store.push("w", gradient)
        arrays[0] = (arrays[0].astype(np.uint32) << 16).view(np.float32)
        for ours, theirs in zip(values_and_state(store), arrays, strict=True):
            same(f"{rule.kernel}_bfloat16", ours, theirs)


def values_and_state(store: fastps.Store) -> Iterator[Floats]:
    """Parameters, then the state in the order of torch's names."""
    yield store.pull("w")
    yield from (slot for name, slot in store.state("w").items() if name != "step")


def check_codec(c: Reference, name: str, codec: fastps.Codec) -> None:
    """Bodies, decoded values and residuals; zeros and values too small to encode among them."""
    n = 64 * 1024
    values = normal(n, 3) * np.repeat(np.float32(2.0) ** np.arange(-120, 8, dtype=np.float32), n // 128)
    values[5000:9000] = 0.0
    values[9001] = -0.0
    body = codec.encode(values)
    theirs = np.zeros(len(body), np.uint8)
    c.runner(f"{name}_encode", theirs, n=n, read=values)(1)
    same(f"{name}_encode", np.frombuffer(body, np.uint8), theirs)
    decoded = np.empty(n, np.float32)
    c.runner(f"{name}_decode", decoded, n=n, read=theirs)(1)
    same(f"{name}_decode", codec.decode(body, n), decoded)
    residual, residual_of_c = normal(n, 4), normal(n, 4)
    for _ in range(2):
        body = codec.encode(values, residual)
        c.runner(f"{name}_feedback", theirs, residual_of_c, n=n, read=values)(1)
        same(f"{name}_feedback", np.frombuffer(body, np.uint8), theirs)
        same(f"{name}_feedback", residual, residual_of_c)


def check_vectors(c: Reference) -> None:
    """The operations on vectors and the sum of a portion, of one slice."""
    n = 5003
    for bits, dtype in ((32, np.float32), (64, np.float64)):
        x, y = normal(n, 4).astype(dtype), normal(n, 5).astype(dtype)
        to, product, summed = x.copy(), x.copy(), x.copy()
        dot, largest, word, high, low = np.zeros(1), np.zeros(1), np.zeros(1), *np.zeros((2, n), np.int64)
        with fastps.Store(threads=1) as store:
            store.register("w", x, optimizer=fastps.SGD())
            with Vectors(store, ["w"], ["x", "y", "z"], space="parity") as v:
                v.run(v.copy("x", "w"), v.begin_sum(1, 1, largest=1.0))
                VectorSpaces(store._native).push_portion(v._id, 1, 0, {"w": y}, None)
                # The grid of magnitude 1: a high unit of 2^-20, a low one of 2^-60.
                c.runner(f"add_portion{bits}", high, low, word, n=n, read=y, scalars=(2.0**20,))(1)
                c.runner(f"end_sum{bits}", summed, high, n=n, read=low, scalars=(2.0**-20,))(1)
                v.run(v.end_sum("y"))
                same(f"end_sum{bits}", v.pull("y")["w"], summed)
                c.runner(f"dot{bits}", dot, x, n=n, read=summed)(1)
                c.runner(f"max_abs{bits}", largest, n=n, read=x)(1)
                same(f"dot{bits}", np.array(v.run(v.dot("x", "y"))), dot)
                same(f"max_abs{bits}", np.array(v.run(v.max_abs("x"))), largest)
                c.runner(f"axpy{bits}", to, n=n, read=summed, scalars=(0.25,))(1)
                c.runner(f"combine{bits}", to, x, n=n, read=summed, scalars=(0.5, 0.25, 0.125))(1)
                v.run(v.copy("z", "x"), v.axpy("z", 0.25, "y"))
                v.run(v.combine("z", {"z": 0.5, "x": 0.25, "y": 0.125}))
                same(f"axpy and combine{bits}", v.pull("z")["w"], to)
                c.runner(f"multiply{bits}", product, x, n=n, read=summed)(1)
                v.run(v.multiply("z", "x", "y"))
                same(f"multiply{bits}", v.pull("z")["w"], product)


def same(kernel: str, ours: NDArray[Any], theirs: NDArray[Any]) -> None:
    """Bit for bit."""
    if ours.tobytes() != theirs.tobytes():
        raise SystemExit(f"{kernel}: C and fastps differ; nothing was measured")
