"""The global step is the largest step count of any tensor, for early and late workers alike."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import fastps
import fastps.torch
from fastps.torch import GlobalSchedule, ParameterServerOptimizer

#: Rarely used tensors, the smallest ones, whose names are before and after the others'.
RARE = ["a_rare", "z_rare"]


class Net(nn.Module):
    """Two scales that few steps use, beside a layer and a head that take turns."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a_rare, self.z_rare = (nn.Parameter(torch.ones(1)) for _ in RARE)
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x, rare):
        x = self.body(x)
        return self.head(x) * self.a_rare * self.z_rare if rare else self.head(x)


def build(ps, **options):
    model = Net()
    return model, ParameterServerOptimizer(model.named_parameters(), ps, fastps.Adam(lr=0.1), **options)


def step(model, optimizer, rare):
    optimizer.zero_grad()
    model(torch.ones(3, 4), rare).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("first", [False, True], ids=["not in the first step", "in the first step"])
def test_tensors_that_few_steps_use_do_not_hold_it_back(ps, first):
    seen = []
    model, optimizer = build(ps, on_step=lambda step: seen.append(step.global_step))
    schedule = GlobalSchedule(lr_scheduler.ExponentialLR(optimizer, 0.5))
    for k in range(9):
        step(model, optimizer, rare=k % 4 == 0 if first else k % 4 == 3)
        schedule.step()
    assert seen == list(range(1, 10))
    late = [build(ps)[1] for _ in range(2)]
    assert [worker.global_step for worker in late] == [9, 9]
    assert GlobalSchedule(lr_scheduler.ExponentialLR(late[0], 0.5)).get_last_lr() == schedule.get_last_lr()
    for worker in (optimizer, *late):
        worker.close()


def test_tensors_may_take_turns(ps):
    """Each is ahead at times, and one of them was used only in this worker's first step."""
    shapes = {"a": 1, "b": 5, "c": 3}
    for name, size in shapes.items():
        ps.register(name, np.zeros(size, np.float32), fastps.Adam())
    start = {name: np.zeros(size, np.float32) for name, size in shapes.items()}
    with fastps.Worker(ps, start, fastps.Async()) as early:
        for used, expected in [
            ("c", 1),
            ("a", 1),
            ("a", 2),
            ("b", 2),
            ("b", 2),
            ("b", 3),
            ("bc", 4),
            ("c", 4),
        ]:
            early.step({name: np.ones(shapes[name], np.float32) for name in used})
            with fastps.Worker(ps, start, fastps.Async()) as late:
                assert (early.global_step, late.global_step) == (expected, expected)


def test_it_never_falls_when_layers_are_frozen(store):
    """It goes on with the layers that are trained, and a late worker begins with the most of any."""
    model, optimizer = build(store)
    schedule = GlobalSchedule(lr_scheduler.ExponentialLR(optimizer, 0.5))
    phases = ("body head", 3, (3, 3)), ("a_rare", 1, (4, 3)), ("body head a_rare", 2, (6, 5))
    for trained, steps, expected in phases:
        other = Net()
        for net in (model, other):
            for name, param in net.named_parameters():
                param.requires_grad_(name.partition(".")[0] in trained.split())
        for _ in range(steps):
            step(model, optimizer, rare="a_rare" in trained)
            schedule.step()
        late = ParameterServerOptimizer(other.named_parameters(), store, fastps.Adam(lr=0.1))
        late_schedule = GlobalSchedule(lr_scheduler.ExponentialLR(late, 0.5))
        assert (optimizer.global_step, late.global_step) == expected, trained
        rates = [schedule.get_last_lr(), late_schedule.get_last_lr()]
        assert rates == [[0.1 * 0.5**count] for count in expected]


def test_rows_of_a_table_count_where_they_are_used(ps):
    """The table has three slices, and the first worker uses the last one only."""
    rows = 3 * 63 * 4096
    ps.register("table", np.zeros((rows, 1), np.float32), fastps.Adagrad())
    with fastps.Worker(ps, {"table": np.zeros((rows, 1), np.float32)}, fastps.Async()) as early:
        for k in range(1, 4):
            early.step({"table": fastps.Sparse(np.array([rows - 1]), np.ones((1, 1), np.float32))})
            assert early.global_step == k
        with fastps.Worker(ps, {"table": np.zeros((rows, 1), np.float32)}, fastps.Async()) as late:
            assert late.global_step == 3


def test_a_resumed_run_has_it_at_once(store, tmp_path):
    model, optimizer = build(store)
    for k in range(7):
        step(model, optimizer, rare=k == 0)
    fastps.torch.save(model, optimizer, tmp_path / "run.pt")
    with fastps.Store() as new:
        workers = [build(new) for _ in range(2)]
        for model, optimizer in workers:
            fastps.torch.resume(model, optimizer, tmp_path / "run.pt")
            assert optimizer.global_step == 7
        step(*workers[0], rare=True)
        assert workers[0][1].global_step == 8
        assert build(new)[1].global_step == 8
