"""Pytrees of `fastps.jax` on several devices and processes, and gradients of another structure."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest

import fastps
import fastps.jax
from fastps.commands.kit.servers import free_ports

SHARDED = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
import fastps, fastps.jax

devices = jax.devices()
mesh = jax.sharding.Mesh(np.array(devices).reshape(2, 2), ("a", "b"))
split, copies = NamedSharding(mesh, P("a", "b")), NamedSharding(mesh, P())
params = {
    "split": jax.device_put(jnp.arange(16.0).reshape(4, 4), split),
    "narrow": jax.device_put(jnp.ones((4, 2), jnp.bfloat16), split),
    "copies": jax.device_put(jnp.ones(3), copies),
    "second": jax.device_put(jnp.ones(3), devices[1]),
    "free": jnp.ones(3),
    "numpy": np.ones(3, np.float32),
}
before = {name: np.asarray(leaf, np.float32) for name, leaf in params.items()}


def check(tree, step):
    for name, leaf in tree.items():
        assert isinstance(leaf, jax.Array) and leaf.dtype == params[name].dtype, name
        np.testing.assert_array_equal(np.asarray(leaf, np.float32), before[name] - step)
        if name in ("free", "numpy"):  # goes wherever the others of a computation are
            assert not leaf.committed, name
        else:
            assert leaf.committed and leaf.sharding == params[name].sharding, name


with fastps.Store() as store:
    fastps.jax.register(store, params, fastps.SGD(lr=1.0))
    check(fastps.jax.pull(store, params), 0)
    with fastps.jax.Worker(store, params, mode=fastps.Async()) as worker:
        check(worker.params, 0)
        for k in range(1, 3):
            worker.step(jax.tree_util.tree_map(jnp.ones_like, worker.params))
            check(worker.params, k)
        worker.pull_model()
        worker.load_state_dict(worker.state_dict())
        check(worker.params, 2)
print("kept")
"""

SEVERAL_PROCESSES = """
import sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
import fastps, fastps.jax

jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
mesh = jax.sharding.Mesh(np.array(jax.devices()), ("a",))


def over_both(spec):
    whole = np.arange(4, dtype=np.float32)
    return jax.make_array_from_callback((4,), NamedSharding(mesh, spec), lambda index: whole[index])


assert fastps.jax.flatten({"copies": over_both(P())})["copies"].tolist() == [0, 1, 2, 3]
with fastps.Store() as store:
    try:
        fastps.jax.register(store, {"layer": {"w": over_both(P("a"))}}, fastps.SGD(lr=1.0))
    except fastps.ConfigError as error:
        assert error.tensor == "layer/w" and "process_allgather" in str(error), error
        print("refused")
    assert store.names() == []
"""


def start(script, *arguments, devices):
    environment = {**os.environ, "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
    environment["JAX_PLATFORMS"] = "cpu"
    command = [sys.executable, "-c", script, *arguments]
    return subprocess.Popen(
        command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def test_pulled_arrays_lie_where_those_of_the_tree_do():
    out, err = start(SHARDED, devices=4).communicate(timeout=110)
    assert out == "kept\n", err


def test_arrays_that_span_processes_are_refused():
    address = f"127.0.0.1:{free_ports(1)[0]}"
    both = [start(SEVERAL_PROCESSES, address, str(k), devices=1) for k in range(2)]
    try:
        for process in both:
            out, err = process.communicate(timeout=110)
            assert out == "refused\n", err
    finally:
        for process in both:
            process.kill()
            process.communicate()


class Layer(NamedTuple):
    w: object
    b: object


def test_gradients_of_another_length_are_refused(store):
    one = jnp.ones(2)
    params = {"layers": [{"w": one}, {"w": one}, (one, one)], "out": Layer(one, one), "none": []}
    fastps.jax.register(store, params, fastps.SGD(lr=1.0))
    full = {"layers": params["layers"], "out": params["out"]}
    with fastps.jax.Worker(store, params, mode=fastps.Async()) as worker:
        for grads, name, expected, got in [
            ({**full, "layers": params["layers"][:2]}, "layers", "3", "2"),
            ({**full, "layers": [*params["layers"], {"w": one}]}, "layers", "3", "4"),
            ({**full, "layers": []}, "layers", "3", "0"),
            ({**full, "layers": one}, "layers", "3", "0"),
            ({**full, "layers": [{}, {}, (one,)]}, "layers/2", "2", "1"),
            ({**full, "none": [one]}, "none", "0", "1"),
        ]:
            text = rf'"{name}".*expected {expected}.*got {got}'
            with pytest.raises(fastps.ConfigError, match=text) as caught:
                worker.step(grads)
            assert caught.value.tensor == name
        assert all(store.versions(name)[name] == 1 for name in store.names())
        # Keys may be left out, and None means no gradient.
        worker.step({"layers": [{}, {"w": None}, (one, None)], "out": None})
        worker.step({"out": Layer(one, None)})
        worker.step(params)
    steps = {name: store.versions(name)[name] - 1 for name in store.names()}
    assert steps == {
        "layers/0/w": 1,
        "layers/1/w": 1,
        "layers/2/0": 2,
        "layers/2/1": 1,
        "out/w": 2,
        "out/b": 1,
    }
    np.testing.assert_array_equal(store.pull("out/w"), np.full(2, -1, np.float32))
