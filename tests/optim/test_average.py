"""The averages that tensors keep: against NumPy, and in every place where a tensor is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fastps
from cases import case
from reference_optim import Array, lerp

SLICE = 63 * 4096
EMA = fastps.EMA(decay=0.9)
#: Settings around a step that updates nothing, and one that copies.
AVERAGES = (EMA, fastps.EMA(0.4), fastps.EMA(0.999, every=3), fastps.EMA(0.5, every=2, start=3))


class Expected:
    """The average of a tensor, from the values after each of its steps."""

    def __init__(self, average: fastps.EMA, values: Array) -> None:
        self.average, self.values, self.steps = average, values.copy(), 0

    def step(self, values: Array) -> None:
        self.steps += 1
        since = self.steps - self.average.start
        with np.errstate(all="ignore"):
            if since <= 0:
                self.values = values.copy()
            elif since % self.average.every == 0:
                self.values = lerp(self.values, values, 1 - self.average.decay)


def same(got: Array, expected: Array) -> None:
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got.view(np.uint32), expected.view(np.uint32))


def push(ps: fastps.ParameterServer, expected: Expected, g: Array, **how: Any) -> None:
    ps.push("w", g, **how)
    expected.step(ps.pull("w"))
    same(ps.pull("w", view="average"), expected.values)


def test_each_step_moves_it_as_numpy_does(rng: np.random.Generator) -> None:
    rules = (fastps.SGD(lr=0.1), fastps.AdamW(lr=0.1), fastps.RMSprop(lr=0.1, centered=True, momentum=0.9))
    ways: tuple[dict[str, Any], ...] = ({}, {"scale": 0.5}, {"codec": fastps.Int8()}, {"lr": 0.3})
    for average in AVERAGES:
        for rule in rules:
            for n in (0, 1, 63, 65, 1025, SLICE + 1):
                with case(average, rule, n), fastps.Store() as ps:
                    values = rng.standard_normal(n, np.float32)
                    ps.register("w", values, rule, average=average)
                    expected = Expected(average, values)
                    for k in range(7):
                        push(ps, expected, rng.standard_normal(n, np.float32), **ways[k % len(ways)])
                    assert list(ps.state("w"))[-1] == "average"


def test_assigned_values_are_its_own(store: fastps.Store, rng: np.random.Generator) -> None:
    values = rng.standard_normal((4, 2), np.float32)
    store.register("w", values, fastps.AdamW(lr=0.1), average=EMA)
    expected = Expected(EMA, values)
    push(store, expected, values)
    store.assign("w", fastps.Sparse([2], np.full((1, 2), 7, np.float32)))
    expected.values[2] = 7
    same(store.pull("w", view="average"), expected.values)
    store.assign("w", values)
    same(store.pull("w", view="average"), values)
    state = store.state("w") | {"average": values + 1}
    store.load_state("w", state)
    same(store.pull("w", view="average"), values + 1)
    del state["average"]  # torch's optimizers have none
    store.load_state("w", state)
    same(store.pull("w", view="average"), values + 1)


def test_a_program_of_vectors_sets_it(store: fastps.Store) -> None:
    store.register("w", np.zeros(2, np.float32), fastps.SGD(), average=EMA)
    targets = np.array([[1, 2], [3, 4]], np.float32)

    def objective(params: dict[str, Array], indices: Any) -> tuple[float, dict[str, Array]]:
        away = params["w"] - targets[indices]
        return float((away**2).sum()), {"w": 2 * away.sum(axis=0)}

    assert fastps.optimize.minimize(store, ["w"], objective, samples=2).success
    np.testing.assert_allclose(store.pull("w"), [2, 3], rtol=1e-6)
    same(store.pull("w", view="average"), store.pull("w"))


def test_what_a_tensor_cannot_keep_or_show_is_refused(store: fastps.Store) -> None:
    zeros = np.zeros((2, 2), np.float32)
    store.register("w", zeros, fastps.SGD(lr=1.0), average=EMA)
    store.register("plain", zeros, fastps.SGD(lr=1.0))
    rows = fastps.Sparse([0], zeros[:1])
    refused: dict[str, tuple[type[fastps.FastpsError], Any]] = {
        "decay": (fastps.ConfigError, lambda: fastps.EMA(1.0)),
        "every": (fastps.ConfigError, lambda: fastps.EMA(0.5, every=0)),
        "start": (fastps.ConfigError, lambda: fastps.EMA(0.5, start=-1)),
        "fastps.EMA": (fastps.ConfigError, lambda: store.register("x", zeros, fastps.SGD(), average=0.9)),  # type: ignore[arg-type]
        "hogwild": (
            fastps.ConfigError,
            lambda: store.register("x", zeros, fastps.SGD(), "hogwild", average=EMA),
        ),
        "float32": (
            fastps.DTypeError,
            lambda: store.register("x", zeros.astype(np.float64), fastps.SGD(), average=EMA),
        ),
        "average.*EMA.*None": (fastps.ConfigError, lambda: store.register("w", zeros, fastps.SGD(lr=1.0))),
        "sparse": (fastps.ConfigError, lambda: store.push("w", rows)),
        "keeps no average.*EMA.*SGD": (
            fastps.ConfigError,
            lambda: store.pull(["w", "plain"], view="average"),
        ),
        "view": (fastps.ConfigError, lambda: store.pull("w", view="best")),  # type: ignore[call-overload]
        "rows": (fastps.ConfigError, lambda: store.pull("w", indices=[0], view="average")),
    }
    for text, (error, call) in refused.items():
        with case(text), pytest.raises(error, match=rf"(?s){text}"):
            call()
    assert store.names() == ["plain", "w"]
    assert store.versions("w")["w"] == 1


def test_readers_choose_the_view(store: fastps.Store, tmp_path: Path) -> None:
    store.register("w", np.zeros(2, np.float32), fastps.SGD(lr=1.0), average=EMA)
    store.register("plain", np.ones(2, np.float32), fastps.SGD(lr=1.0))
    store.push("w", np.full(2, -1, np.float32))
    average = store.pull("w", view="average")
    assert (store.spec("w").average, store.spec("plain").average) == (EMA, None)
    seen: dict[str, Array] = {}

    def note(values: dict[str, Array]) -> dict[str, float]:
        seen.update(values)
        return {}

    for consistent in (False, True):
        seen.clear()
        fastps.evaluator(store, note, view="average", consistent=consistent).now()
        same(seen["w"], average)
        same(seen["plain"], np.ones(2, np.float32))
    with pytest.raises(fastps.ConfigError, match="keeps no average"):
        fastps.evaluator(store, lambda _: {}, names=["plain"], view="average").now()
    with pytest.raises(fastps.ConfigError, match="view"):
        fastps.evaluator(store, lambda _: {}, view="mean")  # type: ignore[arg-type]
    fastps.checkpoint.save(store, tmp_path / "saved")
    with fastps.Store() as other:
        fastps.checkpoint.load(other, tmp_path / "saved")
        assert other.spec("w").average == EMA
        same(other.pull("w", view="average"), average)
        other.unregister("w")
        other.register("w", np.zeros(2, np.float32), fastps.SGD(lr=1.0))
        with pytest.raises(fastps.ConfigError, match="another average"):
            fastps.checkpoint.load(other, tmp_path / "saved")


def test_servers_have_it_whatever_their_number(rng: np.random.Generator) -> None:
    values, g = (rng.standard_normal(5 * SLICE + 3, np.float32) for _ in range(2))
    for shards in (1, 2, 5):
        with case(shards), fastps.serve(shards=shards) as server, fastps.connect(server.addresses) as ps:
            ps.register("w", values, fastps.Adam(lr=0.1), average=EMA)
            assert ps.spec("w").average == EMA
            expected = Expected(EMA, values)
            for _ in range(2):
                push(ps, expected, g)
            into = np.empty_like(values)
            ps.pull(["w"], out={"w": into}, view="average")
            same(into, expected.values)
