"""Tensors that another client has removed and registered again, with another shape or dtype."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import numpy as np
import pytest

import fastps
from cases import case

SGD = fastps.SGD(lr=1.0)


def test_a_client_takes_the_new_tensor_for_the_old_one() -> None:
    """Its copy of the map has the old one, by which it checks what it is given."""
    old, new = np.zeros(7, np.float32), np.ones(5, np.float32)
    calls: dict[str, Callable[[fastps.ParameterServer, str], object]] = {
        "push": lambda ps, w: ps.push(w, new),
        "list": lambda ps, w: ps.push({w: new}, codec=fastps.Int8()),
        "assign": lambda ps, w: ps.assign(w, new),
    }
    with fastps.serve(shards=2) as server, fastps.connect(server) as one, fastps.connect(server) as other:
        for name, call in calls.items():
            with case(name):
                w = f"w {name}"
                one.register(w, old, SGD)
                other.pull(w)
                one.unregister(w)
                one.register(w, new, SGD, average=fastps.EMA(0.5), dtype="bfloat16")
                call(other, w)
                assert other.pull(w).shape == new.shape


def test_a_pull_after_a_refusal_is_of_the_new_tensor() -> None:
    values = np.zeros(7, np.float32)
    with fastps.serve() as server, fastps.connect(server) as one, fastps.connect(server) as other:
        one.register("w", values, SGD)
        other.pull("w")
        one.unregister("w")
        one.register("w", values + 1, SGD, dtype="bfloat16")
        with pytest.raises(fastps.UnknownTensorError):
            other.push("w", values)
        np.testing.assert_array_equal(other.pull("w"), values + 1)


def test_a_call_for_values_is_right_after_one_refusal() -> None:
    old, new = np.zeros(7, np.float32), np.ones(5, np.float32)
    calls: dict[str, Callable[[fastps.ParameterServer, str], object]] = {
        "push_pull": lambda ps, w: ps.push_pull(w, new),
        "rows": lambda ps, w: ps.pull(w, indices=[6]),
    }
    with fastps.serve(shards=2) as server, fastps.connect(server) as one, fastps.connect(server) as other:
        for name, call in calls.items():
            with case(name):
                w = f"w {name}"
                first, second = (new, old) if name == "rows" else (old, new)
                one.register(w, first, SGD)
                other.pull(w)
                one.unregister(w)
                one.register(w, second, SGD, average=fastps.EMA(0.5))
                with pytest.raises((fastps.ShapeError, fastps.ConfigError)):
                    call(other, w)
                assert other.versions(w)[w] == 1
                call(other, w)
                one.unregister(w)


def test_arrays_and_views_fit_the_new_tensor() -> None:
    """What a call gives for values, and what it reads of them, is compared with the tensor that there is."""
    old, new = np.zeros(7, np.float32), np.ones(5, np.float32)
    average = fastps.EMA(0.5)

    def out() -> np.ndarray:
        return np.zeros(5, np.float32)

    calls: dict[str, Callable[[fastps.ParameterServer, str], object]] = {
        "average": lambda ps, w: ps.pull(w, view="average"),
        "averages": lambda ps, w: ps.pull([w], view="average"),
        "average into": lambda ps, w: ps.pull(w, view="average", out=out()),
        "into": lambda ps, w: ps.pull(w, out=out()),
        "list into": lambda ps, w: ps.pull([w], out={w: out()}),
        "push and pull": lambda ps, w: ps.push_pull(w, new, out=out()),
        "state": lambda ps, w: ps.load_state(w, {"step": 1, "average": new}),
        "bound": lambda ps, w: ps.bind({w: new}),
    }
    with fastps.serve(shards=2) as server, fastps.connect(server) as one, fastps.connect(server) as other:
        for before in (None, average):
            for name, call in calls.items():
                with case(name, before):
                    w = f"w {name} {before}"
                    one.register(w, old, SGD, average=before)
                    other.pull(w)
                    one.unregister(w)
                    one.register(w, new, SGD, average=average)
                    # A slice that is gone is noticed by its server.
                    with contextlib.suppress(fastps.UnknownTensorError):
                        call(other, w)
                    call(other, w)
        wrong = np.zeros(6, np.float32)
        for call in (
            lambda: other.pull(w, out=wrong),
            lambda: other.bind({w: wrong}),
            lambda: other.load_state(w, {"step": 1, "average": wrong}),
        ):
            with pytest.raises(fastps.ShapeError, match=r"\(5,\), got \(6,\)"):
                call()
