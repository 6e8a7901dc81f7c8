"""Calls of the module besides running: going back, other settings, bad numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest

pytest.importorskip("wasmtime", reason="wasmtime is not installed")

from module import Module

INFINITY = math.inf


@pytest.fixture(scope="module")
def module():
    return Module()


def everything(module, run):
    """The whole state of a run, as bytes."""
    found = []
    for call in (module.read, module.values, module.curve, module.staleness):
        call(run)
        found.append(module.output_bytes())
    module.steps(run, 0.0)
    return [*found, module.output_bytes()]


def test_going_back_repeats_all_that_was_done(module):
    run = module.started(workers=6, lr=0.001, codec=4, seed=11)
    module.advance(run, 5.0, INFINITY, 1 << 20)
    module.act(run, 0, 2, 0.0)
    module.advance(run, 8.0, INFINITY, 1 << 20)
    module.give(module.settings(workers=6, lr=0.0005, codec=4, seed=11))
    assert module.set(run) == 0
    module.advance(run, 12.0, INFINITY, 1 << 20)
    module.give(module.settings(workers=3, lr=0.0005, mode=3, seed=11))
    assert module.set(run) == 1
    module.advance(run, 20.0, INFINITY, 1 << 20)
    there = everything(module, run)
    module.rewind(run, 20.0)
    assert everything(module, run) == there
    module.rewind(run, 3.0)
    assert module.state(run)[0][0] == 3.0
    assert len(module.state(run)[1]) == 6
    module.destroy(run)


def sent(module, run):
    """Pushes and bytes of each codec."""
    module.bytes(run)
    return module.numbers(2).tolist()


def test_bytes_count_for_the_codec_that_sent_them(module):
    run = module.started(workers=4, lr=0.001, codec=0, seed=5)
    module.advance(run, INFINITY, 30.0, 1 << 20)
    module.give(module.settings(workers=4, lr=0.001, codec=1, seed=5))
    assert module.set(run) == 1
    module.advance(run, INFINITY, 50.0, 1 << 20)
    assert sent(module, run) == [[30, 30 * 8], [20, 20 * 4], [0, 0], [0, 0], [0, 0]]
    head, workers = module.state(run)
    assert head[7] == 30 * 8 + 20 * 4
    # The workers have restarted, and each has been present since.
    assert workers[:, 8].sum() == 20
    assert 0 < workers[0, 12] < head[0]
    assert workers[:, 13].tolist() == [INFINITY] * 4
    module.messages(run, 0.0)
    assert "set\t-1\tthe workers were restarted from the present point" in module.text()
    module.destroy(run)


def test_pushes_of_workers_that_leave_while_they_wait_are_counted(module):
    run = module.started(workers=4, lr=0.001, mode=2, bound=1, straggler=10, lease=2, seed=5)
    module.advance(run, 6.0, INFINITY, 1 << 20)
    head, workers = module.state(run)
    waiting = np.flatnonzero(workers[:, 1] == 3)
    assert head[1] == head[9] + len(waiting) > head[9]
    module.act(run, 0, int(waiting[0]), 0.0)
    module.advance(run, 8.5, INFINITY, 1 << 20)  # it has lost its place
    module.give(module.settings(workers=4, lr=0.001, mode=2, bound=1, codec=1, lease=2, seed=5))
    assert module.set(run) == 1
    head, _ = module.state(run)
    assert head[1] == head[9] == sent(module, run)[0][0]
    module.destroy(run)


def test_a_worker_that_pauses_keeps_the_version_of_its_gradient(module):
    run = module.started(workers=4, lr=0.001, mode=3, backup=2, durations=0, spread=2, lease=INFINITY)
    module.advance(run, 1.1, INFINITY, 1 << 20)  # worker 0 has pushed, and waits
    module.act(run, 1, 0, 20.0)
    module.advance(run, 30.0, INFINITY, 1 << 20)
    module.steps(run, 0.0)
    rows = module.numbers(20)
    late = rows[(rows[:, 1] == 0) & (rows[:, 2] == 1)][0]
    assert late[7] == 21.1
    assert late[13] == 1
    module.destroy(run)


def test_a_step_keeps_the_delay_that_it_began_with(module):
    run = module.started(workers=3, lr=0.001, delay=0, seed=2)
    module.advance(run, 2.0, INFINITY, 1 << 20)
    module.give(module.settings(workers=3, lr=0.001, delay=5, seed=2))
    assert module.set(run) == 0
    module.advance(run, 40.0, INFINITY, 1 << 20)
    module.steps(run, 0.0)
    times = module.numbers(20)[:, 3:8]
    assert (np.diff(times, axis=1) >= 0).all()
    module.destroy(run)


def test_a_nan_is_refused_in_the_products_words_and_training_continues(module):
    for mode in range(5):
        run = module.started(workers=4, lr=0.001, mode=mode, seed=3)
        module.act(run, 3, 0, 0.0)
        module.advance(run, INFINITY, 40.0, 1 << 20)
        head, _ = module.state(run)
        assert head[1] == 40
        assert head[10] >= 1
        module.messages(run, 0.0)
        refused = [line.split("\t") for line in module.text().splitlines() if "\trefused\t" in line]
        assert refused[0][3] == "0"
        assert 'tensor "w"' in refused[0][4]
        assert "worker 0, step 1, virtual time" in refused[0][4]
        module.destroy(run)


def test_a_run_that_leaves_all_bounds_says_at_which_update(module):
    run = module.started(lr=10.0)
    module.advance(run, 30.0, INFINITY, 1 << 20)
    head, _ = module.state(run)
    assert 0 < head[14] <= head[1]
    assert head[0] == 30.0
    module.destroy(run)


def test_workers_that_wait_for_a_dead_one_stand_still(module):
    run = module.started(workers=3, mode=3, lease=INFINITY)
    module.act(run, 0, 1, 0.0)
    module.advance(run, INFINITY, INFINITY, 1 << 20)
    assert module.state(run)[0][20] == 1
    module.messages(run, 0.0)
    assert "for worker 1 (killed)" in module.text()
    module.destroy(run)


@pytest.mark.parametrize(
    ("named", "text"),
    [
        ({"workers": 1e9}, "invalid workers: expected an integer from 1 to 64, got 1000000000"),
        ({"workers": math.nan}, "invalid workers"),
        ({"lr": INFINITY}, "invalid lr"),
        ({"problem": -1}, "invalid problem"),
        ({"mode": 3, "workers": 2, "backup": 2}, "invalid backup"),
        ({"mean": 0}, "invalid mean: expected a finite number > 0, got 0"),
    ],
    ids=["many", "NaN", "rate", "problem", "backup", "mean"],
)
def test_bad_settings_are_refused_by_name(module, named, text):
    module.give(module.settings(**named))
    with pytest.raises(ValueError, match=text):
        module.make()


def test_bad_calls_are_refused(module):
    for call in (
        lambda: module.read(63),
        lambda: module.destroy(1 << 31),
        lambda: module.contours(0, 0.0, 1.0, 1 << 16, 0.0, 1.0, 1 << 16),
        lambda: module.contours(9, 0.0, 1.0, 2, 0.0, 1.0, 2),
    ):
        with pytest.raises(ValueError, match="expected"):
            call()
    module.give([0.0] * 3)
    with pytest.raises(ValueError, match="wrong number of settings: expected 56, got 3"):
        module.make()
    assert module.input((1 << 16) + 1) == 0


def test_contours_are_the_function_on_a_grid(module):
    assert module.contours(5, -1.0, 2.0, 4, 0.0, 1.0, 2) == 8
    x, y = np.meshgrid([-1.0, 0.0, 1.0, 2.0], [0.0, 1.0])
    expected = (x + 2 * y - 7) ** 2 + (2 * x + y - 5) ** 2
    np.testing.assert_allclose(module.numbers(4), expected, rtol=1e-12)
