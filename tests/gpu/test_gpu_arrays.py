"""Arrays of other libraries: memory of a GPU where an array in CPU memory belongs, and DLPack."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import fastps
from pretended_gpu import REHEARSAL


class OnDevice:
    """Stands for a CUDA array in a rehearsal."""

    shape, dtype, device = (4,), np.float32, "cuda:0"

    def __dlpack_device__(self):
        return (2, 0)

    def __dlpack__(self, **options):
        raise BufferError("memory of a GPU")


@pytest.fixture
def array():
    return OnDevice() if REHEARSAL else torch.ones(4, device="cuda")


@pytest.fixture
def w(ps):
    ps.register("w", np.zeros(4, np.float32), fastps.SGD(lr=1.0))
    return ps


def test_arrays_on_a_gpu_are_refused(w, array):
    """By the verbs themselves, which read CPU memory; the error names the device."""
    calls = {
        "push": lambda: w.push("w", array),
        "push of a dict": lambda: w.push({"w": array}),
        "push_async": lambda: w.push_async({"w": array}).result(),
        "pull": lambda: w.pull("w", out=array),
        "assign": lambda: w.assign("w", array),
        "register": lambda: w.register("x", array, fastps.SGD(lr=1.0)),
        "bind": lambda: w.bind({"w": array}),
    }
    for name, call in calls.items():
        with pytest.raises(fastps.DTypeError, match=r"cuda:0"):
            call()
        assert (w.pull("w") == 0).all(), name
        assert w.names() == ["w"]


def test_rows_on_a_gpu_are_refused(w, array):
    with pytest.raises((fastps.DTypeError, TypeError), match=r"cuda"):
        w.push("w", fastps.Sparse(np.array([0]), array))


def test_pinned_memory_and_dlpack(w, device):
    """Pinned memory is CPU memory: pushed from and pulled into without a copy, then copied to the GPU."""
    pinned = torch.empty(4) if REHEARSAL else torch.empty(4, pin_memory=True)
    pinned.fill_(1.0)
    w.push("w", pinned)
    w.pull("w", out=pinned)
    assert pinned.to(device, non_blocking=True).cpu().tolist() == [-1.0] * 4
    assert torch.from_dlpack(w.pull("w")).to(device).sum().item() == -4.0
    bound = w.bind({"w": pinned})
    pinned.fill_(1.0)
    w.push(bound)
    assert w.pull("w").tolist() == [-2.0] * 4


def test_a_worker_of_given_arrays(ps, device):
    """Gradients of a GPU reach `fastps.Worker` by way of the CPU."""
    with fastps.Store() as store:
        store.register("w", np.zeros(4, np.float32), fastps.SGD(lr=1.0))
        with fastps.Worker(store, {"w": np.zeros(4, np.float32)}, mode=fastps.Async()) as worker:
            worker.step({"w": torch.ones(4, device=device).cpu()})
            assert torch.from_numpy(worker.params["w"]).to(device).tolist() == [-1.0] * 4
