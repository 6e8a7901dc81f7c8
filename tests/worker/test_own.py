"""A training cell that is run twice: workers that nothing refers to leave, and open ones are named."""

from __future__ import annotations

import gc
import logging
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch

import fastps
import fastps.torch

ZEROS, ONES = np.zeros(2, np.float32), np.ones(2, np.float32)


@pytest.fixture(params=["store", "servers"])
def ps(request):
    """Of a store, and of servers whose leases are longer than a test."""
    if request.param == "store":
        with fastps.Store() as store:
            yield store
    else:
        with fastps.serve(lease=600) as server, fastps.connect(server.addresses) as ps:
            yield ps


def cell(ps, mode):
    """Does what a notebook's cell does."""
    ps.register("w", ZEROS, fastps.SGD(lr=1.0))
    worker = fastps.Worker(ps, {"w": ZEROS}, mode)
    worker.step({"w": ONES})
    return worker


def test_a_worker_that_nothing_refers_to_leaves_its_group(ps):
    worker = cell(ps, fastps.Async())
    gc.disable()
    try:
        del worker  # is collected without the cycle collector
        second = cell(ps, fastps.Sync(workers=1))
        second.cycle = second
        del second  # waits for the cycle collector
    finally:
        gc.enable()
    third = cell(ps, fastps.Async())
    assert third.params["w"][0] == -3


def test_an_optimizer_that_nothing_refers_to_leaves_its_group(ps):
    def cell(mode, **options):
        model = torch.nn.Linear(2, 1)
        named = model.named_parameters()
        optimizer = fastps.torch.ParameterServerOptimizer(named, ps, fastps.SGD(lr=0.1), mode, **options)
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        return model, optimizer

    _ = cell(fastps.Async(), push_in_backward=True)
    del _
    _ = cell(fastps.Sync(workers=1))
    del _
    cell(fastps.Local(lr=0.1, push_every=2))[1].close()


def test_an_open_worker_of_this_process_is_named_with_the_remedy(ps):
    worker = cell(ps, fastps.Async())
    with pytest.raises(fastps.ConfigError, match="use another mode") as refused:
        cell(ps, fastps.Sync(workers=1))
    assert "1 open worker." in refused.value.__notes__[0]
    assert "close()" in refused.value.__notes__[0]
    worker.close()
    cell(ps, fastps.Sync(workers=1)).close()
    with pytest.raises(fastps.ConfigError) as refused, fastps.Worker(ps, {"w": ZEROS}, fastps.Async()):
        fastps.Worker(ps, {"w": ZEROS}, fastps.Local(lr=-1.0))
    assert not hasattr(refused.value, "__notes__")  # no other mode


def test_a_second_run_of_a_cell_warns_that_it_continues(ps, caplog):
    caplog.set_level(logging.INFO, "fastps")
    first = cell(ps, fastps.Async())
    assert not caplog.records

    def levels(make):
        caplog.clear()
        make().close()
        return [record.levelname for record in caplog.records]

    assert levels(lambda: cell(ps, fastps.Async())) == ["WARNING"]
    # Others beside it that are no second run: another name, another thread.
    assert levels(lambda: fastps.Worker(ps, {"w": ZEROS}, fastps.Async(), name="b")) == ["INFO"]
    found = []
    thread = threading.Thread(target=lambda: found.append(levels(lambda: cell(ps, fastps.Async()))))
    thread.start()
    thread.join()
    assert found == [["INFO"]]
    first.close()


def test_two_models_of_one_thread_with_the_same_names_are_said_to_be_one(ps, caplog):
    """A generator and a discriminator without prefixes; a model with some of another one's tensors."""
    caplog.set_level(logging.INFO, "fastps")

    def make(prefix="", ps=ps, **options):
        caplog.clear()
        named = torch.nn.Linear(2, 1, **options).named_parameters()
        made = fastps.torch.ParameterServerOptimizer(named, ps, fastps.SGD(lr=0.1), prefix=prefix)
        return made, [(record.levelname, record.getMessage()) for record in caplog.records]

    first, said = make()
    assert not said
    for options, names in (({}, '"bias", "weight"'), ({"bias": False}, '"weight"')):
        second, ((level, text),) = make(**options)
        assert level == "WARNING"
        assert f"as one model: {names}. " in text
        assert "prefix=" in text
        second.close()
    with fastps.Store() as another:
        assert not make(ps=another)[1]
    assert not make("d.")[1]
    first.zero_grad()
    first.param_groups[0]["params"][0].sum().backward()
    first.step()
    ((level, text),) = make(bias=False)[1]
    assert (level, text[:10]) == ("WARNING", "continuing")
    first.close()


PROGRAM = """
import sys, numpy as np, fastps
ps = fastps.connect(sys.argv[1])
worker = fastps.Worker(ps, {"w": np.zeros(2, np.float32)}, fastps.Async())
worker.step({"w": np.ones(2, np.float32)})
if sys.argv[2] == "error":
    raise SystemError("the program ends")
"""


@pytest.mark.parametrize("how", ["end", "error"])
def test_an_open_worker_leaves_when_its_process_ends(how):
    with fastps.serve(lease=600) as server, fastps.connect(server.addresses) as ps:
        ps.register("w", ZEROS, fastps.SGD(lr=1.0))
        command = [sys.executable, "-c", PROGRAM, server.addresses, how]
        run = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert run.returncode == (how == "error"), run.stderr
        with fastps.Worker(ps, {"w": ZEROS}, fastps.Sync(workers=1)) as worker:
            worker.step({"w": ONES})
        assert ps.pull("w")[0] == -2
