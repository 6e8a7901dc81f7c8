"""Parameter groups that come while a schedule runs get its rate of the present step, or are refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import fastps
import fastps.torch
from fastps.torch import GlobalSchedule, ParameterServerOptimizer


def halved(step):
    return 0.5**step


KINDS = {
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=40, eta_min=0.01),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "warm-up": lambda o: lr_scheduler.LinearLR(o, start_factor=0.1, total_iters=30),
    "constant": lambda o: lr_scheduler.ConstantLR(o, factor=0.1, total_iters=5),
    "steps": lambda o: lr_scheduler.MultiStepLR(o, [2, 5], 0.3),
    "every": lambda o: lr_scheduler.StepLR(o, 2, 0.3),
    "polynomial": lambda o: lr_scheduler.PolynomialLR(o, 20, 2.0),
    "exponential": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, halved),
    "multiplicative": lambda o: lr_scheduler.MultiplicativeLR(o, halved),
    "two": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, 1.0, 4), lr_scheduler.CosineAnnealingLR(o, 30)], [4]
    ),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(o, 0.1, 1.0, 10), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
}
REFUSED = {
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.5, total_steps=40, cycle_momentum=False),
    "cycles": lambda o: lr_scheduler.CyclicLR(o, 0.1, 0.5, cycle_momentum=False),
    "functions": lambda o: lr_scheduler.LambdaLR(o, [halved, lambda step: 0.9**step]),
    "chained": lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.LinearLR(o), REFUSED["one cycle"](o)]),
}


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))


def group(model, layer, **settings):
    return {"params": [(f"{layer}.{n}", p) for n, p in model[layer].named_parameters()], **settings}


def step(model, optimizer, schedule):
    optimizer.zero_grad()
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    schedule.step()


@pytest.mark.parametrize("lr", [None, 0.3], ids=["the rule's rate", "its own rate"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("at", [0, 3])
def test_a_group_that_comes_late_has_the_schedule(store, kind, lr, at):
    """As in a worker that has it from the beginning."""
    model, rule, own = net(), fastps.SGD(lr=0.1), {} if lr is None else {"lr": lr}
    optimizer = ParameterServerOptimizer([group(model, 0)], store, rule)
    schedule = GlobalSchedule(KINDS[kind](optimizer))
    for _ in range(at):
        step(model, optimizer, schedule)
    optimizer.add_param_group(group(model, 1, **own))
    other = net()
    late = ParameterServerOptimizer([group(other, 0), group(other, 1, **own)], store, rule)
    follows = GlobalSchedule(KINDS[kind](late))
    for taken in range(at, at + 6):
        assert optimizer.global_step == taken
        late.pull_model()
        assert len(schedule.get_last_lr()) == 2
        assert schedule.get_last_lr() == pytest.approx(follows.get_last_lr(), rel=1e-9)
        step(model, optimizer, schedule)
    optimizer.pull_model()  # from the first step again
    late.pull_model()
    assert schedule.get_last_lr() == pytest.approx(follows.get_last_lr(), rel=1e-9)


@pytest.mark.parametrize("kind", REFUSED)
def test_what_has_settings_for_each_group_refuses_another_one(store, kind):
    model = net()
    groups = [{"params": [item]} for item in group(model, 0)["params"]]
    optimizer = ParameterServerOptimizer(groups, store, fastps.SGD(lr=0.1))
    schedule = GlobalSchedule(REFUSED[kind](optimizer))
    step(model, optimizer, schedule)
    names = store.names()
    with pytest.raises(fastps.ConfigError, match=r"requires_grad_\(False\)"):
        optimizer.add_param_group(group(model, 1))
    assert store.names() == names
    assert len(optimizer.param_groups) == 2
    step(model, optimizer, schedule)
    assert optimizer.global_step == 2


def test_a_scheduler_of_fewer_groups_is_refused(store):
    model = net()
    optimizer = ParameterServerOptimizer([group(model, 0)], store, fastps.SGD(lr=0.1))
    scheduler = KINDS["cosine"](optimizer)
    optimizer.add_param_group(group(model, 1))
    with pytest.raises(fastps.ConfigError, match="expected 2 parameter groups, got 1"):
        GlobalSchedule(scheduler)
