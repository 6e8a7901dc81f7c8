"""`fastps.torch.Hierarchical`: two machines of two processes each, which are all on this one."""

from __future__ import annotations

import copy
import itertools
import os
import signal
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from processes import Failed, Parts

import fastps
import fastps.torch
import kill_table
from cases import case
from fastps.worker.run import ramp

STEPS = 3
RULE = fastps.Adam(lr=0.05)


class Model(torch.nn.Module):
    """Its tensors have uneven sizes; one never has a gradient, and one only for some batches."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(5, 7), torch.nn.Linear(7, 3)
        self.unused, self.rare = torch.nn.Linear(4, 4), torch.nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor, rare: bool) -> torch.Tensor:
        y = self.second(torch.tanh(self.first(x)))
        return (y * self.rare if rare else y).square().mean()


def model() -> Model:
    torch.manual_seed(1)
    return Model()


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(6, 5, generator=torch.Generator().manual_seed(100 * rank + step))


def is_rare(rank: int, step: int) -> bool:
    return rank % 2 == 1 and step > 0


def node_of(rank: int) -> Any:
    """The group of this rank's machine; all ranks make both."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    return groups[rank // 2]


def values_of(model: torch.nn.Module) -> dict[str, np.ndarray]:
    return {name: param.detach().numpy().copy() for name, param in model.named_parameters()}


# -- what the processes run ----------------------------------------------------------------------------------


def trains(pipe: Connection, address: str) -> dict[str, Any]:
    """Trains three models, and measures the bytes of a large one; returns what it has at the end."""
    rank, sync = dist.get_rank(), fastps.Sync(workers=2, deterministic=True)
    node = node_of(rank)
    found: dict[str, Any] = {}
    with fastps.connect(address, timeout=120.0) as ps:
        for way in ("plain", "ddp"):
            own = model()
            if rank % 2:  # of local ranks 1, which do not push this one
                with torch.no_grad():
                    own.first.weight.add_(1.0)
            wrapped: torch.nn.Module = own
            if way == "ddp":
                kind = torch.nn.parallel.DistributedDataParallel
                wrapped = kind(own, process_group=node, find_unused_parameters=True)
            steps: list[fastps.Step] = []
            with fastps.torch.Hierarchical(
                wrapped, ps, RULE, sync, node=node, prefix=f"{way}/", group=way, on_step=steps.append
            ) as optimizer:
                schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
                for step in range(STEPS):
                    optimizer.zero_grad()
                    loss = wrapped(batch(rank, step), is_rare(rank, step))
                    loss.backward()
                    optimizer.step(loss=loss)
                    schedule.step()
                assert optimizer.global_step == STEPS
                assert [one.step for one in steps] == [1, 2, 3]
                found[way] = values_of(own)
        found["bytes"] = bytes_of_a_large_model(ps, node)
        found["refused"] = refusals(ps, node)
    return found


def bytes_of_a_large_model(ps: fastps.ParameterServer, node: Any) -> tuple[int, int]:
    """Bytes that this process pushes in a step of 1.2 million numbers: hierarchical, and as a flat worker."""
    pushed = []
    for flat in (False, True):
        own = torch.nn.Sequential(*(torch.nn.Linear(500, 400) for _ in range(6)))
        if flat:
            mode = fastps.Sync(workers=4)
            optimizer: Any = fastps.torch.ParameterServerOptimizer(
                own.named_parameters(), ps, fastps.SGD(lr=0.1), mode, prefix="flat/"
            )
        else:
            mode = fastps.Sync(workers=2)
            optimizer = fastps.torch.Hierarchical(
                own, ps, fastps.SGD(lr=0.1), mode, node=node, prefix="large/", group="large"
            )
        with optimizer:
            for param in own.parameters():
                param.grad = torch.ones_like(param)
            optimizer.step()
            pushed.append(optimizer.stats()["bytes_pushed"])
    return pushed[0], pushed[1]


def refusals(ps: fastps.ParameterServer, node: Any) -> list[str]:
    """The errors of a gradient that is not finite, and of a division among other numbers of processes."""
    texts = []
    own, rank = model(), dist.get_rank(node)
    with fastps.torch.Hierarchical(own, ps, RULE, node=node, prefix="bad/", group="bad") as optimizer:
        for param in own.parameters():
            param.grad = torch.zeros_like(param)
        if rank == 1:
            own.second.bias.grad = torch.full((3,), float("nan"))
        dist.barrier()  # the other machine has registered the model, and goes on no sooner than this one
        before = ps.versions("bad/first.weight")["bad/first.weight"]
        try:
            optimizer.step()
        except fastps.NonFiniteError as error:
            texts.append(str(error))
        assert ps.versions("bad/first.weight")["bad/first.weight"] == before
        dist.barrier()
        for param in own.parameters():
            param.grad = torch.zeros_like(param)
        optimizer.step()  # the node continues
    alone = [dist.new_group([k]) for k in range(4)][dist.get_rank()]
    try:
        fastps.torch.Hierarchical(own, ps, RULE, node=alone, prefix="bad/", group="bad")
    except fastps.ConfigError as error:
        texts.append(str(error))
    wrapped = torch.nn.parallel.DistributedDataParallel(own)
    try:
        fastps.torch.Hierarchical(wrapped, ps, RULE, node=node, prefix="ddp of all/")
    except fastps.ConfigError as error:
        texts.append(str(error))
    return texts


def shards(pipe: Connection, address: str) -> dict[str, Any]:
    """Trains a model that FSDP2 has sharded over the machine's two processes."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    rank = dist.get_rank()
    node = node_of(rank)
    mesh = DeviceMesh.from_group(node, "cpu")
    own = model()
    fully_shard(own, mesh=mesh)
    sync = fastps.Sync(workers=2, deterministic=True)
    with fastps.connect(address, timeout=120.0) as ps:
        with fastps.torch.Hierarchical(
            own, ps, RULE, sync, node=node, prefix="fsdp/", group="fsdp"
        ) as optimizer:
            for step in range(STEPS):
                optimizer.zero_grad()
                own(batch(rank, step), False).backward()
                optimizer.step()
            whole = {name: param.full_tensor().detach().numpy() for name, param in own.named_parameters()}
        joined = model()
        fastps.torch.load(joined, ps, prefix="fsdp/")
        for name, values in values_of(joined).items():
            np.testing.assert_array_equal(values, whole[name])
        ps.register("three/first.weight@0/3", np.zeros((3, 5), np.float32), RULE, group="three/0")
        dist.barrier()
        try:
            fastps.torch.Hierarchical(own, ps, RULE, node=node, prefix="three/", group="three")
        except fastps.ConfigError as error:
            return {"names": ps.names(), "refused": str(error), "whole": whole}
    raise AssertionError("three shards and two are the same")


def dies(pipe: Connection, address: str, machine: int) -> str:
    """One machine of two; local rank 1 of the first kills itself in its third step."""
    own, rank = model(), dist.get_rank()
    with fastps.connect(address, timeout=120.0) as ps:
        mode = fastps.Sync(workers=2, deterministic=True)
        with fastps.torch.Hierarchical(own, ps, RULE, mode, rank=machine) as optimizer:
            for step in range(6):
                if machine == 0 and rank == 1 and step == 2:
                    os.kill(os.getpid(), signal.SIGKILL)
                optimizer.zero_grad()
                own(batch(rank, step), False).backward()
                optimizer.step()
            return str(optimizer.global_step)


def begins(pipe: Connection, address: str, machine: int) -> int:
    """One machine of two, which begin in turn; returns the step that it begins with."""
    own, rank = model(), dist.get_rank()
    with fastps.connect(address, timeout=120.0) as ps:
        mode = fastps.Async(join_every=4)
        with fastps.torch.Hierarchical(own, ps, RULE, mode, rank=machine) as optimizer:
            first = optimizer.global_step
            if machine == 0:
                pipe.send(("said", "begins"))
                pipe.recv()
            for step in range(6):
                optimizer.zero_grad()
                own(batch(rank, step), False).backward()
                optimizer.step()
            return first


def skips(pipe: Connection, address: str) -> dict[str, list[float | str]]:
    """Weights after each step of gradients 1, 10, 100 and 1000, one of which local rank 1 does not take."""
    rank, found = dist.get_rank(), {}
    with fastps.connect(address, timeout=120.0) as ps:
        for way, ddp in itertools.product(
            ("scaler", "unscale", "continue", "rate", "setting"), (False, True)
        ):
            own = torch.nn.Linear(4, 1, bias=False)
            torch.nn.init.zeros_(own.weight)
            wrapped = torch.nn.parallel.DistributedDataParallel(own) if ddp else own
            name, seen = f"{way} {ddp}", []
            optimizer = fastps.torch.Hierarchical(wrapped, ps, fastps.SGD(lr=1.0), prefix=name, group=name)
            scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=way in ("scaler", "unscale"))
            for k in range(4):
                fault = k == 1 and rank == 1
                optimizer.zero_grad()
                if way == "continue" and fault:
                    continue
                if way in ("rate", "setting"):
                    optimizer.param_groups[0]["lr" if way == "rate" else "momentum"] = 0.5 * fault + (
                        way == "rate"
                    )
                loss = wrapped(torch.full((1, 4), float(10**k))).sum()
                scaler.scale(loss * float("inf") if fault and scaler.is_enabled() else loss).backward()
                if way == "unscale":
                    scaler.unscale_(optimizer)
                try:
                    scaler.step(optimizer)
                except fastps.ConfigError as error:
                    seen.append(str(error))
                scaler.update()
                seen.append(own.weight[0, 0].item())
                if way == "continue" and k == 2 - (rank == 0):
                    break
            optimizer.close()
            found[name] = seen
        with pytest.raises(fastps.ConfigError, match=r"requires_grad_\(False\)"):
            optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
    return found


# -- tests ---------------------------------------------------------------------------------------------------


def reference(rare: bool) -> dict[str, np.ndarray]:
    """One process with all batches: the mean of each machine's two gradients, then of both machines.

    With `rare` as `trains` does it, else as `shards`.
    """
    torch.set_num_threads(1)
    own = model()
    with fastps.Store() as store:
        for name, values in values_of(own).items():
            store.register(name, values, RULE)
        for step in range(STEPS):
            grads: list[dict[str, torch.Tensor]] = []
            for rank in range(4):
                copied = copy.deepcopy(own)
                copied(batch(rank, step), rare and is_rare(rank, step)).backward()
                grads.append({n: p.grad for n, p in copied.named_parameters() if p.grad is not None})
            mean: dict[str, np.ndarray] = {}
            for name, param in own.named_parameters():
                zero = torch.zeros_like(param)
                each = [grad.get(name, zero) for grad in grads]
                if any(name in grad for grad in grads):
                    mean[name] = (((each[0] + each[1]) / 2 + (each[2] + each[3]) / 2) / 2).numpy()
            store.push(mean, lr=RULE.lr * (0.5**step if rare else 1.0))
            for name, values in store.pull(list(mean)).items():
                own.get_parameter(name).data.copy_(torch.from_numpy(values))
    return values_of(own)


@pytest.mark.timeout(300)
def test_two_machines_of_two_processes_equal_one_process(server):
    with Parts(4, trains, server.addresses) as parts:
        found = parts.results()
    expected = reference(rare=True)
    for rank, own in enumerate(found):
        for way in ("plain", "ddp"):
            assert own[way].keys() == expected.keys()
            for name, values in expected.items():
                np.testing.assert_array_equal(own[way][name], values, err_msg=f"{way} {rank} {name}")
    pushed = [own["bytes"] for own in found]
    assert sum(one for one, _ in pushed) <= 0.51 * sum(flat for _, flat in pushed)
    assert max(one for one, _ in pushed) <= 0.51 * pushed[0][1]
    for own in found:
        bad, other, ddp = own["refused"]
        assert "local rank 1" in bad
        assert 'tensor "bad/second.bias"' in bad
        assert "expected group bad/1, got group bad/0" in other
        assert "number of processes" in other
        assert "got ranks 0, 1, 2, 3" in ddp


@pytest.mark.timeout(300)
def test_all_local_ranks_skip_a_step_or_none(server):
    """Of an overflow all skip the step; whatever else one does alone is an error on all, in that step."""
    with Parts(2, skips, server.addresses) as parts:
        for rank, found in enumerate(parts.results()):
            for name, seen in found.items():
                with case(rank, name):
                    way = name.partition(" ")[0]
                    if way in ("scaler", "unscale"):
                        assert seen == [-1.0, -1.0, -101.0, -1101.0]
                        continue
                    said = [text for text in seen if isinstance(text, str)]
                    assert len(said) == 1
                    assert seen.index(said[0]) == 1
                    if way == "continue":
                        assert "1 on local rank 0, 2 on local rank 1" in said[0]
                        assert seen[2] == -1.0
                    else:
                        assert ("lr" if way == "rate" else "momentum") in said[0]
                        assert seen[2:] == [-1.0, -101.0, -1101.0]


@pytest.mark.timeout(300)
def test_each_shard_of_fsdp_is_a_tensor(server):
    with Parts(4, shards, server.addresses) as parts:
        found = parts.results()
    names = found[0]["names"]
    assert {"fsdp/first.weight@0/2", "fsdp/first.weight@1/2"} <= set(names)
    assert not [name for name in names if name.startswith("fsdp/") and "@" not in name]
    for own in found:
        assert "expected 3 shards, got 2 shards" in own["refused"]
        assert "three/first.weight@0/3" in own["refused"]
        for name, values in reference(rare=False).items():
            np.testing.assert_array_equal(own["whole"][name], values, err_msg=name)


@pytest.mark.timeout(300)
def test_a_machine_that_loses_a_process_fails_and_the_other_continues():
    with (
        fastps.serve(lease=2.0) as server,
        Parts(2, dies, server.addresses, 0) as first,
        Parts(2, dies, server.addresses, 1) as second,
    ):
        with pytest.raises(Failed) as failed:
            first.result(0)
        assert failed.value.kind == "ConnectionLostError"
        assert "other nodes continue" in failed.value.text
        named = "local rank 1 (rank 1, pid" in failed.value.text
        phrase = "its machine fails with an error that names the local rank"
        kill_table.check("Hierarchical", "worker", phrase, named)
        continued = second.results() == ["6", "6"]
        kill_table.check("Hierarchical", "worker", "other machines continue", continued)


@pytest.mark.timeout(300)
def test_machines_begin_one_by_one(server):
    """Both local ranks of the second one wait for updates, and neither for the other's group."""
    with Parts(2, begins, server.addresses, 0) as first:
        for rank in range(2):
            assert first.heard(rank) == "begins"
        with Parts(2, begins, server.addresses, 1) as second:
            time.sleep(3.0)
            for rank in range(2):
                first.say(rank, "go on")
            assert first.results() == [0, 0]
            for step in second.results(timeout=ramp.PATIENCE / 2):
                assert 4 <= step <= 6
