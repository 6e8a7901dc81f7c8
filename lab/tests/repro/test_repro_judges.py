"""No claim of `fastps-lab repro`'s quick form holds for a product that lacks what it claims.

Each test measures a claim on one seed with a part of the product replaced, and asks its judge.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest

import fastps
from fastps.optimize import LBFGS, GradientDescent, StrongWolfe
from fastps_lab.repro import slow_link, tasks
from fastps_lab.repro.catalogue import CLAIMS, find
from fastps_lab.repro.claim import Setting
from fastps_lab.repro.claims import (
    codecs,
    diloco,
    fleet,
    learners,
    momentum,
    sandblaster,
    tensors,
    toys,
    training,
    trust_region,
)

USELESS = fastps.SGD(lr=1e-12)


def replace(name, make):
    """The public class of this name is another, which `make` builds from the class and the arguments."""
    real = getattr(fastps, name)
    return lambda patch: patch.setattr(fastps, name, functools.partial(make, real))


def without(name, setting):
    """The class ignores a setting."""
    return replace(
        name, lambda real, *args, **more: real(*args, **{k: more[k] for k in more if k != setting})
    )


def one_worker(patch):
    """Nothing is asynchronous: one worker takes all steps."""
    alone = functools.partial(one_worker_runs, tasks.run)
    patch.setattr(tasks, "run", alone)
    patch.setattr(momentum, "run", alone)
    patch.setattr(momentum, "QUICK_RUNS", {2: 1, 16: 1})


def one_worker_runs(run, *args, **more):
    return run(*args, **{**more, "workers": 1})


def optimizers_that_do_nothing(patch):
    patch.setattr(toys, "OPTIMIZERS", dict.fromkeys(toys.OPTIMIZERS, lambda _: USELESS))


def one_optimizer_that_does_nothing(name):
    return lambda patch: patch.setattr(toys, "OPTIMIZERS", {**toys.OPTIMIZERS, name: lambda _: USELESS})


def no_velocity(patch):
    plain = toys.OPTIMIZERS["SGD"]
    patch.setattr(toys, "OPTIMIZERS", {**toys.OPTIMIZERS, "momentum": plain, "Nesterov": plain})


def no_adaptive_rate(patch):
    patch.setattr(toys, "OPTIMIZERS", {**toys.OPTIMIZERS, "Adam": toys.OPTIMIZERS["SGD"]})


def some_ways(**changed):
    """Only the ways that time is compared of, and these."""

    def switch_off(patch):
        real = training.ways

        def ways(rates):
            kept = {name: real(rates)[name] for name in ("serial", "Downpour", "Adagrad")}
            return {**kept, **{name: make(rates) for name, make in changed.items()}}

        patch.setattr(training, "ways", ways)

    return switch_off


def unmatched(real, **more):
    return real(**{**more, "momentum_matching": False})


def momentum_by_number_of_workers(patch):
    """The momentum is lowered by all workers that have ever pushed, however slow they are."""
    real = tasks.Task.train

    def train(task, optimizer, *, workers=1, **more):
        if isinstance(optimizer, fastps.SGD):
            left = max(0, optimizer.momentum / (1 - optimizer.momentum) - (workers - 1))
            optimizer = dataclasses.replace(optimizer, momentum=left / (1 + left))
        return real(task, optimizer, workers=workers, **more)

    patch.setattr(tasks.Task, "train", train)


def downpour_alone(rates):
    return fastps.Adagrad(lr=rates["adagrad"]), 1, fastps.Local(1, 1, lr=rates["adagrad"])


def sync_that_does_nothing(_):
    return USELESS, 4, fastps.Sync(workers=4)


def serial_that_does_nothing(_):
    return USELESS, 1, fastps.Async()


def an_arm_as(name, other):
    """An arm of 1 bit encodes as another does."""

    def switch_off(patch):
        task_codec, gradient = codecs.ARMS[other][1:]
        patch.setitem(codecs.ARMS, name, ("", task_codec, gradient))

    return switch_off


def backups_that_lose_gradients(patch):
    """Versions that drop a gradient lose the others, too."""
    real = tasks.run

    def run(store, params, gradient, **more):
        lost = {name: np.zeros_like(values) for name, values in params.items()}
        return real(store, params, (lambda *_: lost) if more["mode"].backup else gradient, **more)

    patch.setattr(tasks, "run", run)


def a_method_as(name, method):
    return lambda patch: patch.setitem(sandblaster.METHODS, name, method)


def a_rough_search(patch):
    patch.setattr(sandblaster, "StrongWolfe", lambda c2: StrongWolfe(c2=0.9))


def another_history(patch):
    patch.setattr(sandblaster, "LBFGS", lambda history_size: LBFGS(history_size=5))


def other_bits(patch):
    """With several replicas, portions count twice as much."""
    real = sandblaster.on_shards
    patch.setattr(
        sandblaster, "on_shards", lambda problem, method, n: [n * point for point in real(problem, method, n)]
    )


def no_copies(patch):
    real = sandblaster.batch_time
    patch.setattr(sandblaster, "batch_time", lambda count, portions, _: real(count, portions, False))


def slow_portions(patch):
    """Small portions with copies take as long as the slow replica's equal share."""
    real = sandblaster.batch_time
    patch.setattr(sandblaster, "batch_time", lambda count, _, copies: real(count, 1, copies))


#: Figures of the parts of `diloco` with which it holds.
ROUNDS = {
    "measure_bits": {},
    "measure_inner": {},
    "measure_bytes": {
        name: (1.0, sent) for name, sent in {"every step": 800, "int8": 4, "fourbit": 2, "Muon": 16}.items()
    },
    "measure_uneven": {"equal": 1.0},
    "measure_disturbed": {"losses": [1.0, 1.0], "longest": 0.0, "bound": 1.0},
    "measure_robust": {"clean": 1.0, "mean": 0.1, "trimmed": 1.0, "cost": 1.0},
    "measure_link": {"fast": 1.0, "slow": 1.0},
}


def in_rounds(part, switch_off):
    """Measures only this part of `diloco`."""

    def only(patch):
        for name, figures in ROUNDS.items():
            if name != part:
                patch.setattr(diloco, name, lambda _, figures=figures: figures)
        switch_off(patch)

    return only


def another_outer_rule(patch):
    patch.setattr(diloco, "OUTER", fastps.SGD(lr=0.7, momentum=0.9))


def muon_as_adamw(patch):
    patch.setitem(diloco.INNER, "Muon", diloco.AdamW)


def without_quorum(real, every, workers=None, **_):
    return real(every=every, workers=workers)


def no_overlap(patch):
    patch.setattr(diloco, "ROUNDS_OVER", (3, 3))
    patch.setitem(slow_link.ARMS, "slow", (True, 0))


def as_the_mean(real, reduce="weighted", trim=None, **more):
    return real(**more)


def without_parts(real, **more):
    return real(**{**more, "partial": False})


def no_rounds(patch):
    patch.setitem(fleet.ARMS, "DiLoCo", fleet.ARMS["Sync"])
    patch.setattr(fleet, "QUICK", 8.0)


def whole_batches(name):
    """Each synchronous worker plays the whole batch instead of its share."""

    def switch_off(patch):
        from fastps.rl import Naive

        class Whole(Naive):
            def for_workers(self, workers):
                return dataclasses.replace(super().for_workers(workers), steps=self.steps * workers)

        own = learners.BATCHES[name]()
        settings = {field.name: getattr(own, field.name) for field in dataclasses.fields(own)}
        patch.setattr(learners, "BATCHES", {name: lambda: Whole(**settings)})
        patch.setattr(learners, "WORKERS", {name: learners.WORKERS[name]})

    return switch_off


def a_learner_that_stands_still(name):
    """Only this learner is measured, and it takes no steps."""

    def switch_off(patch):
        real = learners.LEARNERS[name]
        patch.setattr(learners, "LEARNERS", {name: lambda: dataclasses.replace(real(), lr=1e-9)})

    return switch_off


def steps_that_move_nothing(patch):
    """The trust region is a point."""
    real = trust_region.ROBOTIC["TRPO"]
    patch.setitem(trust_region.ROBOTIC, "TRPO", lambda: dataclasses.replace(real(), delta=1e-12))


def rollouts_that_depend_on_the_worker(patch):
    """Each worker draws its own actions."""
    from fastps.rl import trpo

    real, workers = trpo.TRPO.play, dict[str, int]()

    def play(self, learner, beside, version, candidate):
        own = workers.setdefault(learner.name, len(workers))
        return real(self, learner, beside, version, candidate + 1000 * own)

    patch.setattr(trpo.TRPO, "play", play)


def kept_as(name, other):
    """A tensor's values are rounded in another way."""
    return lambda patch: patch.setitem(tensors.KEPT, name, tensors.KEPT[other])


PERTURBED = {
    "implicit-momentum": [one_worker],
    "best-momentum": [one_worker],
    "momentum-matching": [replace("Async", unmatched)],
    "matching-at-small-rates": [replace("Async", unmatched)],
    "uneven": [momentum_by_number_of_workers],
    "downpour-adagrad": [one_worker, replace("Adagrad", lambda _, lr: fastps.SGD(lr=10 * lr))],
    "downpour-tuned": [replace("Adagrad", lambda _, lr: USELESS)],
    "n-push": [
        replace("Local", lambda real, _push, _pull, **more: real(1, 1, **more)),
        replace("Adagrad", lambda _, lr: fastps.SGD(lr=2 * lr)),
    ],
    "onebit": [an_arm_as("feedback", "none"), an_arm_as("none", "feedback")],
    "backup-workers": [
        replace("Sync", lambda real, workers, backup=0: real(workers=workers + backup)),
        backups_that_lose_gradients,
    ],
    "bounded-waiting": [
        replace("Bounded", lambda real, _: real(0)),
        replace("Bounded", lambda real, bound: real({0: 0, 1: 1, 4: 2, 16: 3}[bound])),
    ],
    "staleness-limit": [without("Async", "max_staleness")],
    "delay-adaptive": [without("Async", "delay_adaptive")],
    "diloco": [
        in_rounds("measure_bits", another_outer_rule),
        in_rounds("measure_inner", muon_as_adamw),
        in_rounds("measure_bytes", replace("FourBit", lambda _: fastps.Int8())),
        in_rounds("measure_uneven", replace("DiLoCo", without_parts)),
        in_rounds("measure_disturbed", replace("DiLoCo", without_quorum)),
        in_rounds("measure_robust", replace("DiLoCo", as_the_mean)),
        in_rounds("measure_link", no_overlap),
    ],
    "fleet": [no_rounds],
    "nesterov": [without("SGD", "nesterov")],
    "adam-counts-steps": [replace("Adam", lambda _, lr, eps: fastps.RMSprop(lr=lr, alpha=0.999, eps=eps))],
    "toy-problems": [
        optimizers_that_do_nothing,
        one_optimizer_that_does_nothing("Adadelta"),
        no_velocity,
        no_adaptive_rate,
    ],
    "every-way": [
        some_ways(Downpour=downpour_alone),
        some_ways(Sync=sync_that_does_nothing),
        some_ways(serial=serial_that_does_nothing),
    ],
    "sandblaster": [another_history, other_bits],
    "conjugate-gradients": [a_rough_search, a_method_as("CG, HS", GradientDescent())],
    "backup-tasks": [no_copies, slow_portions],
    "bfloat16": [kept_as("stochastic", "nearest"), kept_as("nearest", "stochastic")],
    "schedule-free": [
        replace("ScheduleFreeAdamW", lambda real, lr, warmup: real(lr=lr / 100, warmup=warmup))
    ],
    "rl-synchronous": [whole_batches("HPC")],
    "rl-learns": [a_learner_that_stands_still(name) for name in learners.LEARNERS],
    "rl-trpo": [steps_that_move_nothing, rollouts_that_depend_on_the_worker],
}


def test_every_quick_claim_is_perturbed():
    assert sorted(PERTURBED) == sorted(claim.name for claim in find(["all"], quick=True))


SLOW = (
    "backup-workers",
    "every-way",
    "fleet",
    "n-push",
    "onebit",
    "rl-learns",
    "rl-synchronous",
    "rl-trpo",
    "toy-problems",
)


@pytest.mark.parametrize(
    ("name", "perturb"),
    [
        pytest.param(name, perturb, id=f"{name}-{k}", marks=[pytest.mark.nightly] * (name in SLOW))
        for name, perturbations in PERTURBED.items()
        for k, perturb in enumerate(perturbations)
    ],
)
def test_a_claim_does_not_hold_for_a_perturbed_product(name, perturb, monkeypatch):
    claim = CLAIMS[name]
    for package in claim.packages:
        pytest.importorskip(package)
    monkeypatch.setattr(Setting, "seeds", lambda setting, _runs: [setting.seed + 1])
    perturb(monkeypatch)
    verdict = claim.judge(claim.measure(Setting(quick=True)))
    assert verdict.holds is False, verdict.measured
