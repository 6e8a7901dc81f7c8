"""The judges of `fastps-lab repro figures` refuse numbers of a product with a broken part."""

from __future__ import annotations

import copy
import dataclasses
import functools

import numpy as np
import pytest

import fastps
from fastps.optimize import GradientDescent
from fastps_lab.repro.catalogue import FIGURES
from fastps_lab.repro.claim import Setting
from fastps_lab.repro.figures import accuracy, asynchrony, convnets, hogwild, parts, rules, sizes, toys
from fastps_lab.repro.figures.nets import parts_costs
from fastps_lab.repro.figures.training import epochs, methods, racing, virtual


def quick(**more):
    return Setting(quick=True, **more)


# -- toy problems --------------------------------------------------------------------------------------------

BROKEN = {
    "SGD": lambda lr: fastps.SGD(lr=lr / 2),
    "momentum": lambda lr: fastps.SGD(lr=lr, momentum=0.8),
    "Nesterov": lambda lr: fastps.SGD(lr=lr, momentum=0.9),
    "Adagrad": lambda lr: fastps.RMSprop(lr=lr, alpha=0.9),
    "RMSprop": lambda lr: fastps.RMSprop(lr=lr, alpha=0.99),
    "Adadelta": lambda lr: fastps.Adadelta(lr=10 * lr, rho=0.5),
    "Adam": lambda lr: fastps.Adam(lr=lr, betas=(0.9, 0.9)),
}


@pytest.fixture(scope="module")
def toy_numbers():
    return toys.measure(quick())


def test_the_toy_problems_hold(toy_numbers):
    assert toys.judge(toy_numbers).holds, toys.judge(toy_numbers).measured
    assert set(BROKEN) == set(toys.OPTIMIZERS) == set(rules.RULES)


@pytest.mark.parametrize("name", [*BROKEN, *toys.BATCH])
def test_a_broken_optimizer_is_refused(name, toy_numbers, monkeypatch):
    if name in BROKEN:
        monkeypatch.setitem(toys.OPTIMIZERS, name, BROKEN[name])
    else:
        monkeypatch.setitem(toys.BATCH, name, GradientDescent())
    numbers = copy.deepcopy(toy_numbers)
    for problem in ("Rosenbrock", "saddle", "quadratic"):
        numbers["table"][problem][name] = toys.run_one((problem, name, [1]))
    verdict = toys.judge(numbers)
    assert verdict.holds is False
    assert f"{name} on " in verdict.measured.partition("wrong: ")[2]


# -- accuracy against time -----------------------------------------------------------------------------------


def few(monkeypatch):
    """Only one machine and Downpour with Adagrad, and one rate: what the judges look at first."""
    kept = {name: methods.METHODS[name] for name in (methods.ONE, "Downpour, Adagrad")}
    monkeypatch.setattr(methods, "METHODS", kept)
    small = {"gradients": 1600, "evaluations": 8, "rates": 1}
    monkeypatch.setattr(accuracy, "QUICK", methods.Problem("digits", None, (4, 16), goal=10.0, **small))


def one_worker_at_a_time(real, *arguments, **more):
    return real(*arguments, **{**more, "workers": 1, "events": []})


@pytest.mark.nightly
def test_the_accuracy_of_a_perturbed_product_is_refused(monkeypatch):
    few(monkeypatch)
    good = accuracy.accuracy("mnist", quick())
    assert accuracy.judge(good).holds, accuracy.judge(good).measured
    assert good == accuracy.accuracy("mnist", quick()), "two runs give the same numbers"
    times = accuracy.times("mnist", quick(earlier={"figures/accuracy-mnist": good}))
    assert accuracy.judge_times(times).holds, accuracy.judge_times(times).measured

    with monkeypatch.context() as patch:
        patch.setattr(fastps, "Adagrad", lambda lr: fastps.SGD(lr=1e-9))
        assert accuracy.judge(accuracy.accuracy("mnist", quick())).holds is False
    with monkeypatch.context() as patch:
        patch.setattr(virtual, "run", functools.partial(one_worker_at_a_time, virtual.run))
        alone = accuracy.accuracy("mnist", quick())
    assert accuracy.judge(alone).holds is False
    times = accuracy.times("mnist", quick(earlier={"figures/accuracy-mnist": alone}))
    assert accuracy.judge_times(times).holds is False


def curve(*times):
    """Errors of 20, 10 and 5 % at these times."""
    return [(k, time, error) for k, (time, error) in enumerate(zip(times, (20.0, 10.0, 5.0), strict=True))]


def arms(**ends):
    found = {
        "one": (methods.ONE, 1),
        "fixed": ("Downpour, fixed rate", 4),
        "adagrad": ("Downpour, Adagrad", 4),
    }
    found["lbfgs"] = (methods.SANDBLASTER, 4)
    return [
        {
            "method": method,
            "workers": workers,
            "rate": 0.1,
            "grid": {"0.1": 5.0, "0.2": 6.0},
            "curves": [curve(0, 1, ends[key])],
        }
        for key, (method, workers) in found.items()
    ]


def test_the_caption_says_where_the_papers_order_does_not_come_out():
    numbers = {"goal": 5.0, "workers": [4], "arms": arms(one=40, fixed=30, adagrad=10, lbfgs=20)}
    assert "4 workers: the paper’s order to 5 %" in accuracy.caption(numbers)
    numbers["arms"] = arms(one=40, fixed=8, adagrad=10, lbfgs=20)
    said = accuracy.caption(numbers)
    assert (
        "4 workers: not the paper’s order to 5 %: Downpour, fixed rate (8 s) < Downpour, Adagrad (10 s)"
        in said
    )
    assert "at the edge of its grid for" in said
    numbers["goal"] = 1.0
    assert "one machine, SGD (not reached)" in accuracy.caption(numbers)


def test_bands_are_the_least_and_largest_error_of_the_seeds():
    first, second = [(0, 0.0, 90.0), (10, 1.0, 20.0)], [(0, 0.0, 80.0), (10, 3.0, 10.0), (20, 4.0, 5.0)]
    times, least, mean, most = accuracy.mean_curve([first, second])
    np.testing.assert_array_equal(times, [0.0, 2.0])
    np.testing.assert_array_equal(least, [80.0, 10.0])
    np.testing.assert_array_equal(mean, [85.0, 15.0])
    np.testing.assert_array_equal(most, [90.0, 20.0])


# -- speed-up against parts ----------------------------------------------------------------------------------


def test_parts_whose_messages_or_times_are_wrong_are_refused(monkeypatch):
    idle = {**parts.measure(quick()), "load": 0.1}
    for net in parts.NETS:  # two processes exactly as predicted
        idle["real"][net] = {"one": parts.speed_ups(idle, net, "this machine")[1], "quickest": 1.0}
    assert parts.judge(idle).holds
    idle["real"]["local"]["one"] *= 2.5
    assert parts.judge(idle).holds is False
    monkeypatch.setattr(parts, "message_seconds", lambda *arguments: 0.0)
    assert parts.judge({**parts.measure(quick()), "load": 20.0}).holds is False


def test_the_cost_of_a_message_is_that_of_an_exchange_without_the_rest_of_a_step(monkeypatch):
    each, bandwidth, end = 3e-4, 1e9, 8e-5

    def exchange(size, layers, _seconds):
        return end + 2 * (layers + 1) * (each + 4 * size / bandwidth)  # one more to the loss and back

    monkeypatch.setattr(parts_costs, "exchange", exchange)
    found = parts_costs.message(1.0)
    assert found == pytest.approx({"seconds": each, "bandwidth": bandwidth, "end": end}, rel=1e-3)


# -- cost of asynchrony --------------------------------------------------------------------------------------


def test_what_asynchrony_costs_needs_matching_and_batches(monkeypatch):
    good = asynchrony.measure("mnist", quick())
    assert asynchrony.judge(good).holds, asynchrony.judge(good).measured
    assert len(list(asynchrony.rows(good))) == 1 + 2 * len(good["arms"])
    larger = {**copy.deepcopy(good), "net": "mnist"}  # where matching need not help, but makes a difference
    assert asynchrony.judge(larger).holds
    stale = [arm for arm in larger["arms"] if arm["kind"] == "staleness"]
    matched = {arm["staleness"]: arm["updates"] for arm in stale if arm["matching"]}
    for arm in stale:
        arm["updates"] = matched[arm["staleness"]]
    assert asynchrony.judge(larger).holds is False
    real = fastps.Async

    def unmatched(**more):
        return real(**{**more, "momentum_matching": False})

    with monkeypatch.context() as patch:
        patch.setattr(fastps, "Async", unmatched)
        assert asynchrony.judge(asynchrony.measure("mnist", quick())).holds is False
    with monkeypatch.context() as patch:
        patch.setattr(asynchrony, "QUICK", dataclasses.replace(asynchrony.QUICK, batches=(32, 32, 32)))
        assert asynchrony.judge(asynchrony.measure("mnist", quick())).holds is False


def test_the_critical_batch_is_the_least_samples_over_the_least_updates():
    arms = [
        {"kind": "batch", "batch": batch, "updates": updates}
        for batch, updates in ((8, [100, 120]), (64, [30, 30]), (512, [20, 20]), (4096, [10, None]))
    ]
    assert asynchrony.critical_batch({"arms": arms}) == 8 * 110 / 20


# -- convolutional nets --------------------------------------------------------------------------------------


@pytest.mark.timeout(600)  # it imports torch
def test_a_convolutional_net_needs_every_share_and_the_bits_of_torch(monkeypatch):
    recipe = dataclasses.replace(convnets.QUICK.recipe, epochs=2)
    size = dataclasses.replace(convnets.QUICK, recipe=recipe, compared=1)
    monkeypatch.setattr(convnets, "QUICK", size)
    good = convnets.measure("mnist", quick())
    assert convnets.judge(good).holds, convnets.judge(good).measured
    assert "not within the margin" in convnets.caption({**good, "margin": -100.0})

    def broken(way, of, name, product):
        """The numbers, with one way trained once more while the product is another one."""
        with monkeypatch.context() as patch:
            patch.setattr(of, name, product)
            job = epochs.Job(recipe, None, way, good["seeds"][0], 1)
            return {**good, "ways": {**good["ways"], way: [epochs.train(job)]}}

    sgd, begin = fastps.SGD, fastps.Worker.begin
    serial = broken("serial", fastps, "SGD", lambda **settings: sgd(**{**settings, "nesterov": False}))
    verdict = convnets.judge(serial)
    assert verdict.holds is False
    assert "not the bits of plain torch" in verdict.measured
    still = broken("Sync", fastps.Worker, "begin", lambda worker, grads, lr: begin(worker, grads, lr=1e-9))
    verdict = convnets.judge(still)
    assert verdict.holds is False
    assert "one worker has the bits" in verdict.measured


@pytest.mark.timeout(600)
@pytest.mark.parametrize("way", ["serial", "Sync"])
def test_a_run_that_is_cut_continues_as_if_it_had_not_been(way, monkeypatch, tmp_path):
    recipe = dataclasses.replace(convnets.QUICK.recipe, epochs=2)
    job = epochs.Job(recipe, None, way, 1, 2)
    whole = epochs.train(job)
    kept = dataclasses.replace(job, kept=str(tmp_path))
    first = epochs.train(dataclasses.replace(kept, epochs=1))
    assert first == whole[:1]
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".safetensors"}
    with monkeypatch.context() as patch:
        real, seen = epochs.epoch_of, []
        patch.setattr(epochs, "epoch_of", lambda *a: (seen.append(a[-1]), real(*a)))
        assert epochs.train(kept) == whole
    assert seen == [1], "the first epoch is not trained again"
    assert len(list(tmp_path.iterdir())) == 2
    other = dataclasses.replace(kept, recipe=dataclasses.replace(recipe, rate=0.01))
    assert epochs.train(other) != whole, "the state of another recipe is not used"


# -- threads with locks and without --------------------------------------------------------------------------


def test_threads_that_lose_updates_are_refused(monkeypatch):
    monkeypatch.setattr(hogwild, "SIZES", {True: (80, 1)})
    good = hogwild.measure(quick())
    assert hogwild.judge(good).holds, hogwild.judge(good).measured
    assert len(list(hogwild.rows(good))) == 1 + 2 * 2 * len(hogwild.THREADS)
    real = fastps.Store.push

    def forgetful(store, name, grad):
        if grad.values.shape[0] % 2:
            real(store, name, grad)

    with monkeypatch.context() as patch:
        patch.setattr(fastps.Store, "push", forgetful)
        refused = hogwild.judge(hogwild.measure(quick()))
    assert refused.holds is False
    assert "with locks some updates lost" in refused.measured

    idle = {**copy.deepcopy(good), "free": {"1": 1.0, "2": 2.0, "4": 2.0}}
    assert "busy machine" not in hogwild.caption(idle)
    assert "busy machine" in hogwild.caption({**idle, "free": {"1": 1.0, "2": 1.4, "4": 1.4}})


def test_the_sparsity_of_examples_is_nius():
    starts = np.array([0, 2, 3, 5, 6])  # coordinates 0 1, 1, 2 3, 3
    examples = racing.Examples(5, starts, np.array([0, 1, 1, 2, 3, 3]))
    assert racing.sparsity(examples) == {"omega": 2.0, "delta": 0.5, "rho": 0.5}
    few = racing.made_up(20_000, 2, 640, 1)
    assert 0 < racing.overlap(few) < 0.02
    assert racing.overlap(racing.made_up(10, 5, 640, 1)) == 1.0


def test_every_figure_has_a_perturbed_product_here():
    judged = {accuracy.judge, accuracy.judge_times, toys.judge, parts.judge, asynchrony.judge}
    judged |= {convnets.judge, hogwild.judge, sizes.judge}
    assert {figure.judge for figure in FIGURES.values()} == judged


# -- sizes of data and model ---------------------------------------------------------------------------------


def few_sizes(monkeypatch):
    """One rate and one seed."""
    small = dataclasses.replace(sizes.QUICK["digits"], gradients=500, rates=1, seeds=1)
    monkeypatch.setitem(sizes.QUICK, "digits", small)


def test_an_error_that_does_not_fall_with_more_data_or_a_larger_model_is_refused(monkeypatch):
    few_sizes(monkeypatch)
    good = sizes.measure(quick())
    assert sizes.judge(good).holds, sizes.judge(good).measured
    assert good == sizes.measure(quick()), "two runs give the same numbers"

    def refused(name, broken):
        with monkeypatch.context() as patch:
            patch.setattr(*broken)
            verdict = sizes.judge(sizes.measure(quick()))
        assert verdict.holds is False, (name, verdict.measured)

    first, net_of = sizes._first, sizes.net_of
    refused("the same images in each run", (sizes, "_first", lambda data, _: first(data, 48)))
    refused("the same model in each run", (sizes, "net_of", lambda name, data, _: net_of(name, data, 8)))
    refused("nothing is learned", (fastps, "Adagrad", lambda lr: fastps.SGD(lr=1e-12)))


def test_rates_are_chosen_without_the_test_images_and_no_run_trains_with_those_for_it(monkeypatch):
    few_sizes(monkeypatch)
    jobs = []
    monkeypatch.setattr(sizes, "train", lambda job: jobs.append(job) or 10.0)
    sizes.measure(quick())
    assert [job.validation for job in jobs] == [True] * 7 + [False] * 7
    chosen, judged = sizes.net_for(jobs[0]), sizes.net_for(jobs[7])
    whole = sizes.images_of("digits", None)
    np.testing.assert_array_equal(chosen.data.test_x, whole.train_x[::10])
    np.testing.assert_array_equal(judged.data.test_x, whole.test_x)
    for net in (chosen, judged):
        images = {image.tobytes() for image in net.data.train_x}
        assert not images & {image.tobytes() for image in whole.train_x[::10]}
    assert [len(sizes.net_for(job).data.train_y) for job in jobs[:4]] == [1297, 432, 144, 48]
