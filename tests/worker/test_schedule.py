"""Global steps and schedules: one point of the run for all workers, late and resumed ones included."""

from __future__ import annotations

import math
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import fastps
import fastps.jax
import fastps.torch
from fastps.torch import GlobalSchedule, ParameterServerOptimizer


def build(ps, lr=0.1, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    return model, ParameterServerOptimizer(model.named_parameters(), ps, fastps.Adam(lr=lr), **options)


def step(model, optimizer):
    optimizer.zero_grad()
    model(torch.ones(3, 4)).square().mean().backward()
    optimizer.step()


def cosine(k, length, lr=0.1):
    return lr * (1 + math.cos(math.pi * k / length)) / 2


MAKE = {
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=40),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.5, total_steps=40, cycle_momentum=False),
    "warm-up": lambda o: lr_scheduler.LinearLR(o, start_factor=0.1, total_iters=30),
    "steps": lambda o: lr_scheduler.MultiStepLR(o, [5, 20], 0.3),
    "two": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, 1.0, 10), lr_scheduler.CosineAnnealingLR(o, 30)], [10]
    ),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(o, 0.1, 1.0, 10), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
}


def plain(make, steps):
    optimizer = torch.optim.Adam(nn.Linear(1, 1).parameters(), lr=0.1)
    scheduler = make(optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(steps):
            scheduler.step()
    return optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize("which", MAKE)
def test_workers_have_the_rate_of_the_same_point(ps, which):
    """A fast and a slow one, and one that comes late."""
    make = MAKE[which]
    workers = [build(ps) for _ in range(2)]
    schedules = [GlobalSchedule(make(optimizer)) for _, optimizer in workers]
    for taken, k in enumerate([0, 0, 0, 1, 0, 0, 1], 1):
        step(*workers[k])
        schedules[k].step()
        assert workers[k][1].global_step == taken
        assert schedules[k].get_last_lr()[0] == pytest.approx(plain(make, taken), rel=1e-9)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        late = build(ps)
        assert GlobalSchedule(make(late[1])).get_last_lr()[0] == pytest.approx(plain(make, 7), rel=1e-9)
    for _, optimizer in [*workers, late]:
        optimizer.close()


@pytest.mark.parametrize("order", ["scheduler, resume, schedule", "resume, schedule", "schedule, resume"])
@pytest.mark.parametrize("which", MAKE)
def test_a_resumed_run_continues_where_it_was(tmp_path, which, order):
    """The rate is that of the global step at once, whatever the schedule did before."""
    make = MAKE[which]
    with fastps.Store() as store:
        model, optimizer = build(store)
        schedule = GlobalSchedule(make(optimizer))
        for _ in range(12):
            step(model, optimizer)
            schedule.step()
        fastps.torch.save(model, optimizer, tmp_path / "run.pt")
    with fastps.Store() as store:
        model, optimizer = build(store)
        scheduler = make(optimizer) if order.startswith("scheduler") else None
        if order.startswith("schedule,"):
            schedule = GlobalSchedule(make(optimizer))
            for _ in range(3):
                step(model, optimizer)
                schedule.step()
        keep = "checkpoint" if order.startswith("schedule,") else None
        fastps.torch.resume(model, optimizer, tmp_path / "run.pt", keep=keep)
        if order.endswith("schedule"):
            schedule = GlobalSchedule(scheduler or make(optimizer))
        for _ in range(2):
            assert optimizer.global_step == 12
            assert schedule.get_last_lr()[0] == pytest.approx(plain(make, 12), rel=1e-9)
            step(model, optimizer)
            schedule.step()
            assert schedule.get_last_lr()[0] == pytest.approx(plain(make, 13), rel=1e-9)
            fastps.torch.resume(model, optimizer, tmp_path / "run.pt", keep="checkpoint")


def test_a_worker_that_did_not_put_the_checkpoint_has_its_step(ps, tmp_path):
    """Assignments are no steps, though this worker knew a step count before them."""
    with fastps.Store() as store:
        model, optimizer = build(store)
        for _ in range(12):
            step(model, optimizer)
        fastps.torch.save(model, optimizer, tmp_path / "run.pt")
    workers = [build(ps) for _ in range(2)]
    schedules = [GlobalSchedule(MAKE["cosine"](optimizer)) for _, optimizer in workers]
    for model, optimizer in workers:
        fastps.torch.resume(model, optimizer, tmp_path / "run.pt")
    for taken, (worker, schedule) in enumerate(zip(workers, schedules, strict=True), 12):
        assert worker[1].global_step == 12
        assert schedule.get_last_lr()[0] == pytest.approx(cosine(12, 40), rel=1e-9)
        step(*worker)
        schedule.step()
        assert worker[1].global_step == taken + 1
        assert schedule.get_last_lr()[0] == pytest.approx(cosine(taken + 1, 40), rel=1e-9)
        worker[1].close()


def test_the_scheduler_s_own_state_may_be_loaded(store):
    model, optimizer = build(store)
    scheduler = MAKE["cosine"](optimizer)
    schedule = GlobalSchedule(scheduler)
    for _ in range(5):
        step(model, optimizer)
        schedule.step()
    _, other = build(store)
    again = MAKE["cosine"](other)
    again.load_state_dict(scheduler.state_dict())
    assert GlobalSchedule(again).get_last_lr()[0] == pytest.approx(cosine(5, 40), rel=1e-9)


def test_skipped_steps_assignments_and_loaded_states(store):
    model, optimizer = build(store)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for k in range(6):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(3, 4)).sum() * (math.inf if k == 2 else 1)).backward()
        scaler.step(optimizer)
        scaler.update()
    assert optimizer.global_step == 5
    optimizer.push_model()  # a version, and no step
    assert optimizer.global_step == 5
    states = optimizer.state_dict()["state"].values()
    named = zip([name for name, _ in model.named_parameters()], states, strict=True)
    loaded = {name: {**state, "step": torch.tensor(50.0)} for name, state in named}
    optimizer._held.assign(loaded)
    step(model, optimizer)
    assert optimizer.global_step == 51
    for name in store.names():  # by the user's own client
        store.assign(name, store.pull(name))
        store.load_state(name, {**store.state(name), "step": 70})
    step(model, optimizer)
    assert optimizer.global_step == 71


def test_what_another_process_assigned_is_no_step_after_a_pull(server):
    """A separate client represents the other process."""
    with fastps.connect(server.addresses) as ps, fastps.connect(server.addresses) as other:
        ps.register("w", np.zeros(2, np.float32), fastps.SGD(lr=1.0))
        with fastps.Worker(ps, {"w": np.zeros(2)}, fastps.Async()) as worker:
            worker.step({"w": np.ones(2, np.float32)})
            assert worker.global_step == 1
            for _ in range(3):
                other.assign("w", np.zeros(2, np.float32))
            other.load_state("w", {"step": 9})
            worker.pull_model()
            assert worker.global_step == 9
            worker.step({"w": np.ones(2, np.float32)})
            assert worker.global_step == 10


def test_no_call_is_made_for_it(ps, monkeypatch):
    model, optimizer = build(ps)
    step(model, optimizer)
    assert optimizer.global_step == 1
    ps = optimizer._worker._ps

    class Counting:
        def __getattr__(self, name):
            assert name not in ("versions", "state")
            return getattr(ps, name)

    monkeypatch.setattr(optimizer._worker._progress, "_ps", Counting())
    for _ in range(3):
        step(model, optimizer)
        assert optimizer.global_step == optimizer.stats()["steps"]
    optimizer.close()


@pytest.mark.parametrize(
    "mode", [fastps.Async(overlap=True), fastps.Bounded(2), fastps.Local(5, 5, lr=0.1)], ids=str
)
def test_numpy_workers_of_every_mode_have_it(ps, mode):
    ps.register("w", np.zeros(3, np.float32), fastps.SGD(lr=0.1))
    with fastps.Worker(ps, {"w": np.zeros(3)}, mode) as worker:
        for _ in range(10):
            worker.step({"w": np.ones(3, np.float32)})
        worker.flush()
        worker.pull_model()
        assert worker.global_step == (2 if isinstance(mode, fastps.Local) else 10)


def test_local_workers_have_it_before_they_fetch_what_came_later(ps):
    ones = {"w": np.ones(3, np.float32), "late": np.ones(2, np.float32)}
    for name, values in ones.items():
        ps.register(name, values, fastps.SGD(lr=0.1))
    progress = []
    mode = fastps.Local(2, 2, lr=0.1, overlap=False)
    with fastps.Worker(ps, {"w": np.zeros(3)}, mode, on_step=progress.append) as worker:
        worker.add_params({"late": np.zeros(2)})
        for _ in range(4):
            worker.step(ones)
        assert [step.global_step for step in progress] == [0, 1, 1, 2]


def test_jax_workers_have_it(store):
    start = {"w": jnp.zeros(2)}
    fastps.jax.register(store, start, fastps.SGD(lr=0.5))
    with fastps.jax.Worker(store, start, mode=fastps.Async()) as worker:
        for _ in range(3):
            worker.step({"w": jnp.ones(2)})
        assert worker.global_step == 3


def test_a_shared_store_is_asked_now_and_then():
    with fastps.Store(shared=True) as store:
        model, optimizer = build(store, apply="hogwild", mode=fastps.Hogwild())
        for _ in range(45):
            step(model, optimizer)
            assert 0 <= optimizer.stats()["steps"] - optimizer.global_step <= 20
        optimizer.close()


def test_the_smallest_trained_tensor_counts(store):
    """Frozen parameters take no step."""
    model = nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 1))
    model[1].bias.requires_grad_(False)
    optimizer = ParameterServerOptimizer(model.named_parameters(), store, fastps.SGD(lr=0.1))
    step(model, optimizer)
    assert optimizer.global_step == 1


def test_a_parameter_without_gradients_does_not_count(store, tmp_path):
    """The smallest one, which no loss uses; also right after a resume, before the first step."""

    def build():
        model = nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 2))
        model.unused = nn.Linear(1, 1)
        return model, ParameterServerOptimizer(model.named_parameters(), store, fastps.Adam(lr=0.1))

    def take(model, optimizer):
        optimizer.zero_grad()
        model[1](model[0](torch.ones(3, 4))).sum().backward()
        optimizer.step()

    model, optimizer = build()
    schedule = GlobalSchedule(MAKE["cosine"](optimizer))
    for taken in range(1, 4):
        take(model, optimizer)
        schedule.step()
        assert optimizer.global_step == taken
    assert schedule.get_last_lr()[0] == pytest.approx(cosine(3, 40), rel=1e-9)
    fastps.torch.save(model, optimizer, tmp_path / "run.pt")
    optimizer.close()
    _, late = build()
    assert late.global_step == 3
    for name in store.names():
        store.unregister(name)
    model, optimizer = build()
    fastps.torch.resume(model, optimizer, tmp_path / "run.pt")
    assert optimizer.global_step == 3


def test_schedules_of_other_lengths_and_kinds_are_refused(store):
    _, optimizer = build(store)
    GlobalSchedule(MAKE["cosine"](optimizer))
    _, other = build(store)
    with pytest.raises(fastps.ConfigError, match=r"expected 40 steps.*got 50.*unregister"):
        GlobalSchedule(lr_scheduler.CosineAnnealingLR(other, T_max=50))
    store.unregister("0.weight.fastps.schedule")
    GlobalSchedule(lr_scheduler.CosineAnnealingLR(other, T_max=3_000_001))
    for scheduler, text in [
        (lr_scheduler.ReduceLROnPlateau(other), "ReduceLROnPlateau"),
        (lr_scheduler.ConstantLR(torch.optim.SGD(nn.Linear(1, 1).parameters())), "ParameterServerOptimizer"),
        (None, "ParameterServerOptimizer"),
    ]:
        with pytest.raises(fastps.ConfigError, match=text):
            GlobalSchedule(scheduler)
    with pytest.raises(fastps.ConfigError, match="length"):
        GlobalSchedule(MAKE["steps"](other), length=0)


def test_it_ends_with_its_length(store):
    model, optimizer = build(store)
    schedule = GlobalSchedule(lr_scheduler.CosineAnnealingLR(optimizer, T_max=3), length=3)
    for _ in range(5):
        step(model, optimizer)
        schedule.step()
    assert schedule.get_last_lr() == [0.0]


@pytest.mark.parametrize("length", [None, 8, 12])
def test_a_cycle_ends_with_its_smallest_rate(store, length):
    """torch's rate of the step after the last one is negative."""
    model, optimizer = build(store)
    cycle = lr_scheduler.OneCycleLR(
        optimizer, max_lr=0.5, total_steps=8, anneal_strategy="linear", cycle_momentum=False
    )
    schedule = GlobalSchedule(cycle, length=length)
    for _ in range(10):
        step(model, optimizer)
        schedule.step()
    assert schedule.get_last_lr() == [pytest.approx(0.5 / 25 / 1e4, rel=1e-6)]


def test_a_run_of_three_uneven_workers_ends_its_cosine(server):
    """Under `Portions`: each worker would otherwise end a cosine of the run's length before its end.

    A worker that gets far ahead of the others, as their threads may stall, lets them catch up.
    """
    lengths, rates, failed, taken = 300, {}, [], [0, 0, 0]

    def work(which, addresses):
        try:
            with fastps.connect(addresses) as ps:
                model, optimizer = build(ps)
                portions = fastps.data.Portions(ps, n=150, size=1)
                schedule = GlobalSchedule(
                    lr_scheduler.CosineAnnealingLR(optimizer, T_max=len(portions) * 2), length=lengths
                )
                while portions.epoch < 2:
                    for _ in portions:
                        time.sleep(which * 0.005)
                        step(model, optimizer)
                        schedule.step()
                        assert schedule.get_last_lr()[0] == pytest.approx(
                            cosine(optimizer.global_step, lengths)
                        )
                        taken[which] += 1
                        if taken[which] == 200:
                            portions.finish()  # else they could wait for it
                            while sum(taken) < 250 and not failed:
                                time.sleep(0.005)
                optimizer.pull_model()  # another one may have taken the last step
                rates[which] = schedule.get_last_lr()[0]
                optimizer.close()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(k, server.addresses)) for k in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failed == []
    assert sum(taken) == lengths
    for which, rate in rates.items():
        assert rate == pytest.approx(cosine(lengths, lengths), abs=1e-9)
        assert cosine(taken[which], lengths) > 0.01 * 0.1  # where its own steps would have ended


@pytest.mark.parametrize("name", ["Sync", "Local", "WarmStart", "Async"])
def test_a_schedule_over_all_portions_fits_every_mode(name):
    """Its length is that of one process, whoever has how many of the gradients."""
    n, epochs = 2, 3
    modes = {"Sync": fastps.Sync(workers=n), "Local": fastps.Local(2, 2, lr=0.01), "Async": fastps.Async()}
    mode = modes.get(name) or fastps.WarmStart(steps=2, then=modes["Sync"])
    x = torch.randn(24, 4)

    def train(addresses):
        with fastps.connect(addresses, timeout=30) as ps:
            model = nn.Linear(4, 2)
            named = model.named_parameters()
            with ParameterServerOptimizer(named, ps, fastps.SGD(lr=0.1), mode=mode) as optimizer:
                portions = fastps.data.Portions(ps, n=len(x), size=4)
                linear = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, len(portions) * epochs)
                schedule, rates = GlobalSchedule(linear), []
                while portions.epoch < epochs:
                    for indices in portions:
                        optimizer.zero_grad()
                        model(x[indices]).square().mean().backward()
                        optimizer.step()
                        schedule.step()
                        rates.append(schedule.get_last_lr()[0])
                optimizer.flush()
                optimizer.pull_model()
                schedule.step()
                return rates, schedule.get_last_lr()

    with fastps.serve() as server, ThreadPoolExecutor(n) as pool:
        found = list(pool.map(train, [server.addresses] * n, timeout=60))
    for rates, last in found:
        assert last == [pytest.approx(0.0, abs=0.1 * 1.5 * n / 18)]
        assert rates == sorted(rates, reverse=True)
