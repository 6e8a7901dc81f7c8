"""Objectives that return means, or add something to each portion, are refused at the first point."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import fastps
from fastps.optimize import Replica, minimize

SAMPLES = 1000
rng = np.random.default_rng(0)
x = rng.standard_normal((SAMPLES, 4))
y = x @ rng.standard_normal(4) + 0.1 * rng.standard_normal(SAMPLES)


def total(params, indices):
    away = x[indices] @ params["w"] - y[indices]
    return float(away @ away), {"w": 2 * (away @ x[indices]).astype(params["w"].dtype)}


def mean(params, indices):
    loss, gradients = total(params, indices)
    return loss / len(indices), {name: value / len(indices) for name, value in gradients.items()}


def means_of_batches(params, indices, size=8):
    """Splits the samples into its own batches, and sums their means."""
    found = [mean(params, batch) for batch in np.split(indices, range(size, len(indices), size))]
    return sum(loss for loss, _ in found), {"w": sum(gradients["w"] for _, gradients in found)}


def decayed(params, indices):
    """Adds weight decay to each portion."""
    loss, gradients = total(params, indices)
    return loss + 10.0, gradients


def start(dtype=np.float64, samples=SAMPLES):
    store = fastps.Store()
    store.register("w", np.zeros(4, dtype), optimizer=fastps.SGD(lr=1.0))
    return store


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("portions", [None, 1, 2, 63, 65, 700])
@pytest.mark.parametrize("objective", [mean, means_of_batches, decayed])
def test_what_is_no_sum_is_refused_before_any_step(objective, portions, dtype):
    with start(dtype) as store:
        with pytest.raises(fastps.ConfigError, match=r"no sum over samples: .* no means") as raised:
            minimize(store, ["w"], objective, samples=SAMPLES, portions=portions, check_gradient=True)
        assert float(raised.value.expected.split(",")[0]) != float(raised.value.got.split(";")[0])
        assert not store.pull("w").any()
        store.push("w", np.zeros(4, dtype))  # the space is closed
        assert minimize(store, ["w"], total, samples=SAMPLES, portions=portions, tol=1e-3).success


def test_a_replica_of_another_process_refuses_its_own_objective_and_others_go_on():
    with start() as store, store.another() as own, store.another() as other:
        errors = []

        def wrong():
            try:
                Replica(own, mean).run()
            except fastps.ConfigError as error:
                errors.append(error)
            right.start()

        right = threading.Thread(target=Replica(other, total).run, daemon=True)
        thread = threading.Thread(target=wrong, daemon=True)
        thread.start()
        result = minimize(store, ["w"], samples=SAMPLES, timeout=60)
        thread.join()
        right.join()
    assert "no sum over samples" in str(errors[0])
    assert result.success
    assert len(result.replicas) == 1


@pytest.mark.parametrize("samples", [1, 3, 100])
def test_portions_are_at_most_as_many_as_samples(samples):
    with start() as store:
        result = minimize(store, ["w"], total, samples=samples, max_iterations=1)
        assert sum(result.replicas.values()) == min(64, samples) * result.nfev + 1


def test_a_fit_whose_loss_is_rounding_is_a_point_like_others():
    def objective(params, indices):
        """Rounds in another way in each batch, as a BLAS does."""
        noise = np.random.default_rng(len(indices)).standard_normal(len(indices))
        away = params["w"][0] - 1 + 1e-15 * noise
        return float(away @ away), {"w": np.array([2 * away.sum(), 0, 0, 0])}

    with start() as store:
        store.assign("w", np.ones(4))
        assert minimize(store, ["w"], objective, samples=SAMPLES, portions=2).success
