"""An exception between any two instructions of a step: no gradient counts twice, and later ones count once.

Ctrl-C, a data loader's SIGCHLD handler and a launcher's SIGTERM handler raise wherever the main thread is. A
trace function raises in their place, before each instruction of the package in turn.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import fastps

PACKAGE = str(Path(fastps.__file__).parent)
#: Every instruction, or one of three, which most statements have.
EVERY = pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.nightly)])
#: Steps before the one that is interrupted, and all.
BEFORE, STEPS = 2, 5
#: The gradient of step k is BASE**k in each element, so the digits of the sum say how often each counted.
BASE = 4


class Interrupted(BaseException):
    """Raised by the handler of a signal."""


def interrupted(call, count):
    """Runs `call`, and raises before the instruction of this number; returns whether there was one.

    The exception that arrives may be another one, raised while the package handled this one. The call has
    its own thread: an exception before the instruction that ends a handler stays its thread's current one.
    """
    left = count

    def trace(frame, event, _):
        nonlocal left
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            left -= 1
            if left == 0:
                raise Interrupted
        return trace

    def traced():
        sys.settrace(trace)
        try:
            call()
        finally:
            sys.settrace(None)

    with ThreadPoolExecutor(1) as thread, contextlib.suppress(Interrupted):
        thread.submit(traced).result()
    return left <= 0


def times(ps, name):
    """The number of times that each step's gradient counted."""
    values = np.unique(-ps.pull(name))
    assert len(values) == 1, values
    total = int(values[0])
    assert total == values[0]
    return [total // BASE**k % BASE for k in range(STEPS)]


def gradients(kind, k):
    whole = np.full(70, BASE**k, np.float32)
    if kind != "rows":
        return {"a": whole, "b": whole[:3].copy()}
    return {"a": fastps.Sparse(np.arange(10), np.full((10, 7), BASE**k, np.float32)), "b": whole[:3].copy()}


WAYS = {
    "whole": {"mode": fastps.Async()},
    "rates": {"mode": fastps.Async()},
    "rows": {"mode": fastps.Async()},
    "codec": {"mode": fastps.Async(), "codec": fastps.Int8()},
    "overlap": {"mode": fastps.Async(overlap=True)},
    "local": {"mode": fastps.Local(push_every=1, pull_every=1, lr=1.0)},
    "accumulate": {"mode": fastps.Async(), "accumulate": 2},
    "begin": {"mode": fastps.Async()},
    "sync": {"mode": fastps.Sync(workers=1)},
}


@pytest.fixture(params=["store", "server"])
def place(request, kind):
    """A store, or a server. Transports differ below Python's instructions, so each kind takes one of them."""
    if request.param == "store":
        with fastps.Store() as store:
            yield store
        return
    transport = ("tcp", "unix", "shm")[list(WAYS).index(kind) % 3]
    with fastps.serve() as server, fastps.connect(server.addresses, timeout=20.0, transport=transport) as ps:
        yield ps


def run(ps, kind, number, count, refused=False):
    """Trains with the third step interrupted; returns whether it was, and how often each step counted.

    With `refused`, tensor b is unregistered during the second and the third step.
    """
    names = {"a": f"a{number}", "b": f"b{number}"}
    shapes = {"a": (10, 7) if kind == "rows" else (70,), "b": (3,)}
    # A push is the mean of the gradients of its steps.
    rate = float(WAYS[kind].get("accumulate", 1))

    def register(name):
        ps.register(names[name], np.zeros(shapes[name], np.float32), fastps.SGD(lr=rate))

    for name in names:
        register(name)
    own = {names[name]: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    with fastps.Worker(ps, own, **WAYS[kind]) as worker:

        def step(k):
            grads = {names[name]: gradient for name, gradient in gradients(kind, k).items()}
            if kind == "begin":
                worker.begin({names["b"]: grads.pop(names["b"])})
            with warnings.catch_warnings(), contextlib.suppress(fastps.FastpsError if refused else ()):
                warnings.simplefilter("ignore", RuntimeWarning)
                worker.step(grads, lr={names["a"]: 1.0} if kind == "rates" else None)

        was = False
        for k in range(STEPS):
            if refused and k == 1:
                ps.unregister(names["b"])
            if k == BEFORE:
                was = interrupted(lambda k=k: step(k), count)
                if was and kind == "begin":
                    worker.step({})  # ends what has begun
                if refused:
                    register("b")
            else:
                step(k)
        worker.flush()
        found = [times(ps, name) for name in names.values()]
    for name in names.values():
        ps.unregister(name)
    return was, found


@pytest.mark.timeout(600)
@EVERY
@pytest.mark.parametrize("kind", WAYS)
def test_no_gradient_counts_twice(place, kind, every):
    stride = every if isinstance(place, fastps.Store) else 7 * every
    count, interruptions = 1, 0
    while True:
        was, found = run(place, kind, count, count)
        # With `Sync`, the step after an interrupted fetch is of an old version, so it is dropped.
        may_lack = [BEFORE, BEFORE + 1] if kind == "sync" else [BEFORE]
        for counted in found:
            assert all(n == 1 or (n == 0 and k in may_lack) for k, n in enumerate(counted)), (count, counted)
        if not was:
            break
        count, interruptions = count + stride, interruptions + 1
    assert interruptions > 10


@pytest.mark.timeout(600)
@EVERY
@pytest.mark.parametrize("kind", ["whole", "overlap", "local"])  # one of each transport
def test_what_waits_for_the_next_push_is_not_lost(place, kind, every):
    stride = every if isinstance(place, fastps.Store) else 23 * every
    count = 1
    while True:
        was, (a, b) = run(place, kind, count, count, refused=True)
        assert all(n == 1 or (n == 0 and k == BEFORE) for k, n in enumerate(a)), (count, a)
        # The first step went to the tensor that was there before.
        assert all(n == 1 or (n == 0 and k == BEFORE) for k, n in enumerate(b) if k > 0), (count, b)
        if not was:
            break
        count += stride
    assert count > 10 * stride
