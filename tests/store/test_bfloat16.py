"""Tensors of bfloat16: against NumPy bit for bit, in every verb, and what they refuse."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import fastps
from cases import case
from reference_optim import OPTIMIZERS, Array, lerp
from reference_rounding import GOLDEN_SEED, golden, nearest, stochastic, widen

VECTORS = Path(__file__).parents[1] / "vectors" / "bfloat16.json"
SLICE = 63 * 4096
SEED = GOLDEN_SEED


def same(got: Array, expected: Array) -> None:
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got.view(np.uint32), expected.view(np.uint32))


def test_the_golden_roundings_are_those_of_numpy() -> None:
    """The Rust tests read the file, too."""
    text = json.dumps(golden(), indent=1) + "\n"
    if os.environ.get("FASTPS_REGENERATE"):
        VECTORS.write_text(text)
    assert VECTORS.read_text() == text


def test_every_optimizer_steps_in_float32_and_rounds(store: fastps.Store, rng: np.random.Generator) -> None:
    for name, reference in OPTIMIZERS.items():
        for n in (1, 7, 65, 4097, SLICE + 5):
            with case(name, n):
                values = widen(nearest(rng.standard_normal(n, np.float32)))
                lr = 0.25 if name == "Average" else 1e-2
                expected, rule = reference(lr=lr), getattr(fastps, name)(lr=lr)  # type: ignore[call-arg]
                store.register("w", values, rule, dtype="bfloat16", seed=SEED)
                for step in range(3):
                    g = rng.standard_normal(n, np.float32)
                    store.push("w", g)
                    expected.step(values, g)
                    for first in range(0, n, SLICE):
                        part = values[first : first + SLICE]
                        part[...] = widen(stochastic(part, SEED, step, first))
                    same(store.pull("w"), values)
                for slot, state in expected.state.items():
                    same(store.state("w")[slot], state)
                store.unregister("w")


def test_rounding_is_a_function_of_seed_element_and_step(store: fastps.Store) -> None:
    x = np.linspace(-3, 3, 1001, dtype=np.float32) ** 3
    store.register("w", np.zeros_like(x), fastps.SGD(lr=1.0), dtype="bfloat16", seed=5)
    for step in range(32):
        store.assign("w", np.zeros_like(x))
        store.push("w", -x)
        same(store.pull("w"), widen(stochastic(x, 5, step)))
    with pytest.warns(RuntimeWarning, match="nearest"):
        store.register("n", np.zeros_like(x), fastps.SGD(lr=1.0), dtype="bfloat16", rounding="nearest")
    store.push("n", -x)
    same(store.pull("n"), widen(nearest(x)))
    # Without a seed, the name gives one: the same for all who register it.
    for name in ("a", "b"):
        store.register(name, np.zeros_like(x), fastps.SGD(lr=1.0), dtype="bfloat16")
        store.push(name, -x)
    seed = 0xAF63DC4C8601EC8C  # FNV-1a of "a"
    assert (store.spec("a").seed, store.spec("a").rounding) == (seed, "stochastic")
    same(store.pull("a"), widen(stochastic(x, seed, 0)))
    assert (store.pull("a") != store.pull("b")).any()


def test_the_mean_of_many_small_steps_is_theirs(store: fastps.Store) -> None:
    n, steps, size = 4096, 64, 2.0**-12  # a step is 1/32 of the distance to the next bfloat16
    ones, g = np.ones(n, np.float32), np.full(n, -size, np.float32)
    store.register("w", ones, fastps.SGD(lr=1.0), dtype="bfloat16")
    with warnings.catch_warnings(action="ignore"):
        store.register("n", ones, fastps.SGD(lr=1.0), dtype="bfloat16", rounding="nearest")
    for _ in range(steps):
        store.push({"w": g, "n": g})
    moved = store.pull("w").astype(np.float64) - 1
    error = moved.std() / np.sqrt(n)
    assert abs(moved.mean() - steps * size) < 4 * error
    assert error > 0
    assert (store.pull("n") == 1).all()  # every update is lost


def test_arrays_of_other_packages(store: fastps.Store) -> None:
    torch = pytest.importorskip("torch")
    values = np.array([[1.5, -2.0], [0.0, 3e38]], np.float32)
    for kind, array in {
        "torch": torch.tensor(values).bfloat16(),
        "ml_dtypes": values.astype(ml_dtypes.bfloat16),
    }.items():
        with case(kind):
            store.register(kind, array, fastps.SGD(lr=1.0))
            assert store.spec(kind).dtype == "bfloat16"
            same(store.pull(kind), widen(nearest(values)))
            store.register(f"{kind} wide", array, fastps.SGD(lr=1.0), dtype="float32")
            assert store.spec(f"{kind} wide").dtype == "float32"
            store.push(kind, array)
            assert not store.pull(kind).any()
            store.assign(kind, array)
            same(store.pull(kind), widen(nearest(values)))
            store.push(f"{kind} wide", array)
            assert not store.pull(f"{kind} wide").any()
    out = torch.empty(2, 2, dtype=torch.bfloat16)
    assert store.pull("torch", out=out) is out
    assert out.view(torch.int16).numpy().view(np.uint16).tolist() == nearest(values).tolist()
    half = np.empty((2, 2), ml_dtypes.bfloat16)
    store.pull(["torch"], out={"torch": half})
    assert half.view(np.uint16).tolist() == nearest(values).tolist()


def test_every_verb(ps: fastps.ParameterServer, rng: np.random.Generator) -> None:
    x = rng.standard_normal((3, SLICE), np.float32)
    narrow = x[:, :1000].copy()
    ps.register("w", x, fastps.SGD(lr=1.0), dtype="bfloat16", average=fastps.EMA(0.5))
    ps.register("rows", narrow, fastps.SGD(lr=1.0), dtype="bfloat16", seed=1)
    ps.register("wide", x, fastps.SGD(lr=1.0))
    spec = ps.spec("w")
    assert (spec.dtype, spec.rounding) == ("bfloat16", "stochastic")
    values = widen(nearest(x))
    got, versions = ps.pull(["w", "wide"], versions=True)
    same(got["w"], values)
    for view, expected in (("values", values), ("average", values)):
        same(ps.pull("w", view=view), expected)  # type: ignore[call-overload]
    g = rng.standard_normal(x.shape, np.float32)
    receipts = ps.push({"w": g, "wide": g}, based_on=versions, scale=0.5)
    assert receipts["w"].staleness == 0
    stepped = widen(
        np.concatenate(
            [
                stochastic(part - np.float32(0.5) * grad, spec.seed or 0, 0, k * SLICE).reshape(1, -1)
                for k, (part, grad) in enumerate(zip(values, g, strict=True))
            ]
        )
    )
    same(ps.pull("w"), stepped)
    same(ps.pull("w", view="average"), lerp(values, stepped, 0.5))
    out = np.empty_like(x)
    assert ps.pull("w", out=out) is out
    same(out, stepped)
    # Rows, pushed, pulled and assigned.
    part = values[:, :1000].copy()
    ps.push("rows", fastps.Sparse([2, 0, 2], np.ones((3, 1000), np.float32)))
    noisy = part - np.array([[1], [0], [2]], np.float32)
    for row in (0, 2):
        part[row] = widen(stochastic(noisy[row], 1, 0, 1000 * row))
    same(ps.pull("rows"), part)
    same(ps.pull("rows", indices=[2, 0]), part[[2, 0]])
    ps.assign("rows", fastps.Sparse([1], narrow[:1]))
    same(ps.pull("rows", indices=[1]), values[:1, :1000])
    # State, bound lists, and pushes that also pull.
    state = ps.state("w")
    assert state["average"].dtype == np.float32
    ps.load_state("w", state)
    ps.load_state("w", state | {"average": x})
    same(ps.pull("w", view="average"), x)
    assert ps.push(ps.bind({"rows": narrow}))["rows"].version > 1
    pulled, _, _ = ps.push_pull({"w": g})
    same(pulled["w"], ps.pull("w"))
    ps.assign("w", x)
    for view in ("values", "average"):
        same(ps.pull("w", view=view), values)  # type: ignore[call-overload]


def test_every_codec_pushes_to_them(ps: fastps.ParameterServer, rng: np.random.Generator) -> None:
    g = rng.standard_normal(5000, np.float32)
    codecs = (fastps.Float32(), fastps.BFloat16(), fastps.Int8(), fastps.Int8(seed=3), fastps.FourBit())
    ps.register("w", np.zeros_like(g), fastps.SGD(lr=1.0), dtype="bfloat16", seed=2)
    ps.register("wide", np.zeros_like(g), fastps.SGD(lr=1.0))
    for step, codec in enumerate(codecs):
        with case(codec):
            for name in ("w", "wide"):
                ps.assign(name, np.zeros_like(g))
            ps.push({"w": g, "wide": g}, codec=codec)
            same(ps.pull("w"), widen(stochastic(ps.pull("wide"), 2, step)))
    params = {name: np.zeros_like(g) for name in ("w", "wide")}
    with fastps.Worker(ps, params, codec=fastps.OneBit()) as worker:
        worker.step({"w": g, "wide": g})


def test_workers_train_them_in_every_mode(ps: fastps.ParameterServer) -> None:
    target = np.linspace(-1, 1, 300, dtype=np.float32)
    modes = fastps.Async(), fastps.Local(3, 2, lr=0.1), fastps.Sync(1), fastps.Bounded(1)
    for k, mode in enumerate(modes):
        name = f"w{k}"
        with case(mode):
            zeros = np.zeros_like(target)
            ps.register(name, zeros, fastps.AdamW(lr=0.05), group=name, dtype="bfloat16")
            with fastps.Worker(ps, {name: zeros.copy()}, mode) as worker:
                for _ in range(200):
                    worker.step({name: worker.params[name] - target})
            assert np.abs(ps.pull(name) - target).max() < 0.1


def test_sums_of_several_workers_are_float32(ps: fastps.ParameterServer) -> None:
    """bfloat16 would lose the small gradient beside the large one."""
    import threading

    ps.register("w", np.zeros(3, np.float32), fastps.SGD(lr=1.0), dtype="bfloat16")
    grads = [np.full(3, 1.0, np.float32), np.full(3, 2.0**-10, np.float32), np.full(3, -1.0, np.float32)]

    def train(g: Array) -> None:
        with (
            ps.another() as own,
            fastps.Worker(own, {"w": np.zeros(3, np.float32)}, fastps.Sync(3)) as worker,
        ):
            worker.step({"w": g})

    threads = [threading.Thread(target=train, args=(g,)) for g in grads]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    mean = -np.float32(2.0**-10) * np.float32(1 / 3)
    got = ps.pull("w")
    assert (np.abs(got - mean) <= abs(mean) / 128).all()
    assert got.all()


def test_a_saved_store_is_loaded_with_its_rounding(store: fastps.Store, tmp_path: Path) -> None:
    x = np.linspace(-1, 1, 100, dtype=np.float32)
    store.register("w", x, fastps.Adam(lr=0.1), dtype="bfloat16", seed=9, average=fastps.EMA(0.9))
    store.push("w", x)
    fastps.checkpoint.save(store, tmp_path / "file")
    with fastps.Store() as other:
        fastps.checkpoint.load(other, tmp_path / "file")
        assert other.spec("w") == store.spec("w")
        for one in (store, other):
            one.push("w", x)
        same(other.pull("w"), store.pull("w"))
        same(other.pull("w", view="average"), store.pull("w", view="average"))


def test_what_does_not_fit_is_refused(ps: fastps.ParameterServer) -> None:
    ones = np.ones((2, 2), np.float32)
    ps.register("w", ones, fastps.SGD(lr=1.0), dtype="bfloat16", average=fastps.EMA(0.9))
    ps.register("f", ones, fastps.SGD(lr=1.0))

    def new(array: Any = ones, rule: Any = None, **how: Any) -> Any:
        return lambda: ps.register("x", array, rule or fastps.SGD(lr=1.0), **how)

    refused: dict[str, tuple[type[fastps.FastpsError], str, Any]] = {
        "65504.*float16": (fastps.DTypeError, "x", new(dtype="float16")),
        "unknown dtype.*int8": (fastps.DTypeError, "x", new(dtype="int8")),
        "another type.*float32.*float64": (
            fastps.DTypeError,
            "x",
            new(ones.astype(np.float64), dtype="bfloat16"),
        ),
        "another type.*float64.*float32": (fastps.DTypeError, "x", new(dtype="float64")),
        "hogwild.*float32.*bfloat16": (fastps.DTypeError, "x", new(dtype="bfloat16", apply="hogwild")),
        "unknown rounding.*down": (fastps.ConfigError, "x", new(dtype="bfloat16", rounding="down")),
        "no seed": (fastps.ConfigError, "x", new(dtype="bfloat16", rounding="nearest", seed=1)),
        "not rounded": (fastps.ConfigError, "x", new(rounding="stochastic")),
        "not rounded.*seed 3": (fastps.ConfigError, "x", new(seed=3)),
        r"seed.*2\*\*64": (fastps.ConfigError, "x", new(dtype="bfloat16", seed=-1)),
        "dtype.*bfloat16.*float32": (
            fastps.ConfigError,
            "w",
            lambda: ps.register("w", ones, fastps.SGD(lr=1.0)),
        ),
        "rounding.*seed": (
            fastps.ConfigError,
            "w",
            lambda: ps.register(
                "w", ones, fastps.SGD(lr=1.0), dtype="bfloat16", average=fastps.EMA(0.9), seed=1
            ),
        ),
        "out=.*float32 or bfloat16.*float64": (
            fastps.DTypeError,
            "w",
            lambda: ps.pull("w", out=np.empty((2, 2))),
        ),
        "float64": (fastps.DTypeError, "w", lambda: ps.push("w", np.ones((2, 2)))),
        "assigned|dtype": (fastps.DTypeError, "w", lambda: ps.assign("w", np.ones((2, 2)))),
        "finite": (fastps.NonFiniteError, "w", lambda: ps.assign("w", np.full((2, 2), np.inf, np.float32))),
    }
    with warnings.catch_warnings(action="ignore"):
        for text, (error, tensor, call) in refused.items():
            with case(text), pytest.raises(error, match=rf"(?s){text}") as caught:
                call()
            assert caught.value.tensor == tensor
    assert ps.names() == ["f", "w"]
    same(ps.pull("w"), ones)
    with pytest.raises(fastps.DTypeError, match="vectors"):
        fastps.optimize.minimize(ps, ["w"], lambda p, i: (0.0, p), samples=2)
