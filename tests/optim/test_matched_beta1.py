"""Momentum matching of Adam and AdamW: a step of several asynchronous workers keeps less of the old mean.

`python tests/optim/test_matched_beta1.py` writes `tests/vectors/matched_beta1.json` with the NumPy reference.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fastps
from reference_momentum import matched, stale
from reference_optim import OPTIMIZERS, Array

VECTORS = Path(__file__).parent.parent / "vectors" / "matched_beta1.json"
MATCHING = fastps.Async(delay_adaptive=False, momentum_matching=True)
#: The worker that takes each step: only one, then two, then three, then one more often than the others.
ORDER = (0, 0, 1, 0, 1, 2, 1, 0, 2, 0, 0, 1, 2, 2, 1)
SETTINGS: list[tuple[str, dict[str, Any]]] = [
    ("Adam", {"lr": 0.05}),
    ("Adam", {"lr": 0.05, "betas": (0.5, 0.99), "weight_decay": 0.01, "maximize": True}),  # down to 0
    ("Adam", {"lr": 0.02, "betas": (0.0, 0.9), "amsgrad": True}),  # nothing to lower
    ("AdamW", {"lr": 0.05, "betas": (0.95, 0.999), "weight_decay": 0.1, "amsgrad": True}),
]


def gradients() -> list[Array]:
    rng = np.random.default_rng(17)
    return [(rng.standard_normal(19) * 10.0 ** rng.uniform(-3, 1)).astype(np.float32).round(5) for _ in ORDER]


def by_reference(name: str, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """beta1, values and state after each step."""
    optimizer, p, steps = OPTIMIZERS[name](**settings), np.linspace(-1, 1, 19, dtype=np.float32), []
    for k, g in enumerate(gradients()):
        beta1 = matched(optimizer.betas[0], stale(ORDER[: k + 1]))
        optimizer.matched = beta1
        optimizer.step(p, g)
        steps.append({"beta1": beta1, "values": p.copy(), **optimizer.state})
    return steps


def as_hex(step: dict[str, Any]) -> dict[str, Any]:
    return {key: x.tobytes().hex() if isinstance(x, np.ndarray) else x for key, x in step.items()}


def document() -> dict[str, Any]:
    cases = [
        {"optimizer": name, "settings": settings, "steps": [as_hex(s) for s in by_reference(name, settings)]}
        for name, settings in SETTINGS
    ]
    initial = np.linspace(-1, 1, 19, dtype=np.float32).tobytes().hex()
    head = {"initial": initial, "workers": ORDER, "gradients": [g.tobytes().hex() for g in gradients()]}
    return {**head, "cases": cases}


def found(ps: fastps.ParameterServer, name: str) -> dict[str, Array]:
    """Values and state."""
    state = {key: np.asarray(x) for key, x in ps.state(name).items() if key != "step"}
    return {"values": np.asarray(ps.pull(name)).copy(), **state}


def trained(
    ps: fastps.ParameterServer,
    optimizer: str,
    settings: dict[str, Any],
    mode: fastps.Async,
    order: Sequence[int],
    name: str = "w",
) -> Iterator[dict[str, Array]]:
    """Values and state after each step of workers that take turns."""
    ps.register(name, np.linspace(-1, 1, 19, dtype=np.float32), getattr(fastps, optimizer)(**settings))
    workers = [fastps.Worker(ps, {name: np.zeros(19, np.float32)}, mode) for _ in range(max(order) + 1)]
    for worker, g in zip(order, gradients(), strict=True):
        workers[worker].step({name: g})
        yield found(ps, name)
    for worker in workers:
        worker.close()


def test_the_golden_steps_are_those_of_the_reference() -> None:
    assert json.loads(VECTORS.read_text()) == json.loads(json.dumps(document()))


@pytest.mark.parametrize("shards", [0, 2])
def test_three_workers_take_the_golden_steps(shards: int) -> None:
    cases = json.loads(VECTORS.read_text())["cases"]
    with fastps.serve(shards=max(shards, 1)) as server, fastps.connect(server.addresses) as connection:
        ps = connection if shards else fastps.Store()
        for case in cases:
            settings = {k: tuple(v) if k == "betas" else v for k, v in case["settings"].items()}
            for k, got in enumerate(trained(ps, case["optimizer"], settings, MATCHING, ORDER)):
                expected = {key: x for key, x in case["steps"][k].items() if key != "beta1"}
                assert as_hex(got) == expected, (case["optimizer"], settings, k)
            ps.unregister("w")


def test_the_log_replays_the_golden_steps(tmp_path: Path) -> None:
    """The files of a running server are those that a kill leaves: its log, and no snapshot."""
    cases = json.loads(VECTORS.read_text())["cases"]
    names = [f"w{k}" for k in range(len(cases))]
    with (
        fastps.serve(data_dir=tmp_path / "running") as server,
        fastps.connect(server.addresses, ack="logged") as ps,
    ):
        for name, (optimizer, settings) in zip(names, SETTINGS, strict=True):
            list(trained(ps, optimizer, settings, MATCHING, ORDER, name))
        shutil.copytree(tmp_path / "running", tmp_path / "killed")
    with fastps.serve(data_dir=tmp_path / "killed") as server, fastps.connect(server.addresses) as ps:
        for name, case in zip(names, cases, strict=True):
            expected = {key: x for key, x in case["steps"][-1].items() if key != "beta1"}
            assert as_hex(found(ps, name)) == expected, case["optimizer"]


def test_a_single_worker_is_unchanged() -> None:
    for name, settings in SETTINGS:
        with fastps.Store() as store:
            alone = [0] * len(ORDER)
            plain = list(trained(store, name, settings, fastps.Async(), alone, "plain"))
            with_rule = list(trained(store, name, settings, MATCHING, alone, "matched"))
            assert [as_hex(s) for s in with_rule] == [as_hex(s) for s in plain], (name, settings)


def test_the_mean_stays_unbiased_whatever_beta1_does() -> None:
    """The corrected mean of equal gradients is that gradient after each step, with any number of workers."""
    with fastps.Store() as store:
        store.register("w", np.zeros(5, np.float32), fastps.Adam(lr=0.1))
        workers = [fastps.Worker(store, {"w": np.zeros(5, np.float32)}, MATCHING) for _ in range(12)]
        g = np.array([1.0, -2.0, 0.5, 3e-3, 70.0], np.float32)
        order = [0, 1, 0, *range(12), *[3, 0] * 200]
        for t, worker in enumerate(order, start=1):
            workers[worker].step({"w": g})
            corrected = np.asarray(store.state("w")["exp_avg"]) / (1 - 0.9**t)
            np.testing.assert_allclose(corrected, g, rtol=1e-5, err_msg=f"step {t}")
        for worker in workers:
            worker.close()


if __name__ == "__main__":
    lines = [f'"{key}": {json.dumps(value)}' for key, value in document().items() if key != "cases"]
    cases = ",\n  ".join(json.dumps(case) for case in document()["cases"])
    VECTORS.write_text("{\n" + ",\n".join(lines) + f',\n"cases": [\n  {cases}\n]\n}}\n')
