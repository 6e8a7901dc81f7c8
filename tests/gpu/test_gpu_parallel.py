"""A model in parts that are on a GPU."""

from __future__ import annotations

import contextlib
import datetime

import pytest
import torch
import torch.distributed as dist
from gpu_processes import Child
from gpu_training import assert_close, pulled
from torch import nn

import fastps
import fastps.torch
from fastps.torch import parallel
from pretended_gpu import REHEARSAL, pretended

STEPS = 6
RULE = fastps.SGD(lr=0.05, momentum=0.9)


def graph(device):
    """Two parts with a normalization, dropout and an activation that works in place."""
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Linear(16, 32),
        nn.BatchNorm1d(32),
        nn.ReLU(inplace=True),
        nn.Linear(32, 32),
        nn.Tanh(),
        nn.Linear(32, 4),
    )
    return parallel.Graph.sequential(model.to(device), [3], nn.functional.cross_entropy, seed=3)


def batch(step, device):
    generator = torch.Generator().manual_seed(step)
    inputs, targets = (
        torch.randn(24, 16, generator=generator),
        torch.randint(0, 4, (24,), generator=generator),
    )
    return inputs.to(device), targets.to(device)


def train(replica, ps, device, micro_batches):
    optimizer, losses = replica.optimizer(ps, RULE), []
    for step in range(STEPS):
        inputs, targets = batch(step, device)
        optimizer.zero_grad()
        losses.append(replica.step(input=inputs, target=targets, micro_batches=micro_batches))
        optimizer.step(loss=losses[-1])
    optimizer.close()
    return losses


def on_the_cpu(micro_batches):
    with fastps.Store() as reference:
        losses = train(parallel.Replica.local(graph("cpu")), reference, "cpu", micro_batches)
        return losses, pulled(reference)


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("threads", [False, True])
def test_parts_in_one_process(store, device, threads, micro_batches):
    losses, values = on_the_cpu(micro_batches)
    with parallel.Replica.local(graph(device), threads=threads) as replica:
        found = train(replica, store, device, micro_batches)
    assert found == pytest.approx(losses, rel=1e-3)
    assert_close(pulled(store), values)


def part(rank, file, address, device, micro_batches):
    """A process of the replica."""
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    timeout = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", store=dist.FileStore(file, 2), rank=rank, world_size=2, timeout=timeout)
    with (
        fastps.connect(address, timeout=60.0) as ps,
        parallel.Replica(graph(device)) as replica,
        pretended() if REHEARSAL else contextlib.nullcontext(),
    ):
        return train(replica, ps, device, micro_batches)


@pytest.mark.timeout(240)
def test_parts_in_two_processes(device, tmp_path):
    """Values and gradients travel between them by way of the CPU."""
    expected, values = on_the_cpu(2)
    with fastps.serve(shards=2) as server, contextlib.ExitStack() as stack:
        arguments = (str(tmp_path / "group"), server.addresses, device, 2)
        parts = [stack.enter_context(Child(part, rank, *arguments)) for rank in range(2)]
        for child in parts:
            assert child.result(180) == pytest.approx(expected, rel=1e-3)
        with fastps.connect(server.addresses) as ps:
            assert_close(pulled(ps), values)


def test_autocast_reaches_the_threads_of_parts(store, device):
    with parallel.Replica.local(graph(device), threads=True) as replica:
        optimizer = replica.optimizer(store, RULE)
        inputs, targets = batch(0, device)
        seen = []
        replica.modules["3-5"].register_forward_hook(lambda module, given, out: seen.append(out.dtype))
        with torch.autocast(device.type, torch.bfloat16):
            replica.step(input=inputs, target=targets)
        optimizer.step()
        optimizer.close()
    assert seen == [torch.bfloat16]


def test_dropout_is_the_same_in_threads(device):
    """Nodes draw one at a time and under their own seeds, also from the GPU's generator."""

    def losses(threads):
        first = [nn.Linear(16, 32), nn.Dropout(0.5), nn.ReLU()]
        torch.manual_seed(1)
        model = nn.Sequential(*first, nn.Linear(32, 32), nn.Dropout(0.5), nn.Linear(32, 4)).to(device)
        made = parallel.Graph.sequential(model, [3], nn.functional.cross_entropy, seed=3)
        with fastps.Store() as store, parallel.Replica.local(made, threads=threads) as replica:
            for values in model.parameters():
                nn.init.constant_(values, 0.1)
            return train(replica, store, device, 3)

    assert losses(True) == pytest.approx(losses(False), rel=1e-4)
