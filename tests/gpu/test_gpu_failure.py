"""A kernel fails in the middle of a step: CUDA's error ends the process, and nothing of the step counts."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch
from gpu_processes import Child
from gpu_training import give_gradients, mlp, pulled, wrap
from torch import nn

import fastps
from pretended_gpu import REHEARSAL, pretended

#: Steps before the one that fails.
STEPS = 3


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.out = nn.Embedding(10, 4), nn.Linear(4, 1)

    def forward(self, rows):
        return self.out(self.embed(rows)).mean()


def fails(address, namespace, device, when):
    """An index is out of range in the last step. CUDA notices when the kernel runs, long after the call."""
    with (
        pretended() if REHEARSAL else contextlib.nullcontext() as gpu,
        fastps.connect(address, namespace=namespace) as ps,
    ):
        net = Net().to(device)
        mode = fastps.Async(overlap=when == "overlap")
        codec = fastps.OneBit() if when == "with a codec" else None
        optimizer = wrap(net, ps, mode=mode, codec=codec, push_in_backward=when == "push_in_backward")
        for step in range(STEPS + 1):
            rows = torch.arange(8, device=device)
            if step == STEPS and gpu is not None:
                gpu.fail()
            elif step == STEPS:
                rows += 100
            optimizer.zero_grad()
            net(rows).backward()
            optimizer.step()
            optimizer.flush()


@pytest.mark.timeout(180)
@pytest.mark.parametrize("when", ["step", "overlap", "push_in_backward", "with a codec"])
def test_a_failed_kernel(server, device, when):
    with fastps.connect(server.addresses, namespace=f"failed-{when.replace(' ', '-')}") as ps:
        with Child(fails, server.addresses, ps.namespace, device, when) as child:
            assert "CUDA error" in child.failure(60)
        # The last step was taken by no tensor, and the servers' other clients continue.
        assert {ps.versions(name)[name] for name in ps.names()} == {1 + STEPS}
        assert all(np.isfinite(values).all() for values in pulled(ps).values())
        ps.push("out.bias", np.ones(1, np.float32))


@pytest.mark.skipif(not REHEARSAL, reason="a process loses a real GPU with the error; the test above has one")
@pytest.mark.parametrize("codec", [None, fastps.Int8()], ids=str)
def test_the_error_of_a_step_is_cuda_s_own(store, gpu, device, codec):
    """Nothing that the step does at its end hides it, and the optimizer can be closed."""
    net = mlp().to(device)
    optimizer = wrap(net, store, codec=codec)
    give_gradients(net, 0)
    optimizer.step()
    gpu.fail()
    before = pulled(store)
    with pytest.raises(torch.AcceleratorError, match="device-side assert"):
        optimizer.step()
    for name, values in pulled(store).items():
        np.testing.assert_array_equal(values, before[name])
    optimizer.close()
