"""Typed uses of the package: checked by mypy and `test_stub`, and run."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, assert_type

import numpy as np
import pytest
from numpy.typing import NDArray

import fastps


def test_verbs(store: fastps.Store) -> None:
    gradient = np.ones(3, np.float32)
    store.register("w", gradient, optimizer=fastps.Adagrad(lr=0.1), apply="exact")
    assert_type(store.push("w", gradient), fastps.Receipt)
    receipts = store.push({"w": gradient}, codec=fastps.Int8(), lr=None, based_on=None)
    mapping: Mapping[str, fastps.Receipt] = receipts
    assert_type(mapping["w"].staleness, int | None)
    assert_type(store.pull("w"), NDArray[np.float32])
    values, versions = store.pull(["w"], versions=True)
    assert_type(values, dict[str, NDArray[np.float32]])
    assert_type(versions, fastps.Versions)
    handle = store.push_async("w", gradient)
    assert_type(handle, fastps.PushHandle[fastps.Receipt])
    assert_type(handle.result(1.0).version, int)
    assert_type(store.push_async({"w": gradient}).result(), fastps.Receipts)
    bound = store.bind({"w": gradient}, codec=fastps.OneBit())
    assert_type(store.push(bound), fastps.Receipts)
    assert_type(store.spec("w").shape, tuple[int, ...])
    assert_type(store.another(), fastps.Store)


def test_worker(store: fastps.Store) -> None:
    store.register("w", np.ones(3, np.float32), optimizer=fastps.SGD())
    mode = fastps.Local(push_every=1, pull_every=4, lr=0.05, overlap=True)
    with fastps.Worker(store, {"w": np.zeros(3)}, mode=mode, codec=fastps.Int8()) as worker:
        assert_type(worker.params, dict[str, NDArray[np.float32]])
        worker.step({"w": np.ones(3, np.float32)})


def test_subpackages(store: fastps.Store) -> None:
    portions = fastps.data.Portions(store, n=5)
    assert_type(portions, fastps.data.Portions)
    assert_type(portions.epoch, int)
    for rows in portions:
        assert_type(rows, NDArray[np.int64])
    assert_type(fastps.optimize.LBFGS(), fastps.optimize.LBFGS)
    assert_type(fastps.torch.seed(0, store), int)


def test_minimize(store: fastps.Store) -> None:
    def objective(params: dict[str, NDArray[Any]], rows: NDArray[np.int64]) -> tuple[float, dict[str, Any]]:
        return float(np.square(params["w"] - 1).sum()) * len(rows), {"w": 2 * (params["w"] - 1) * len(rows)}

    store.register("w", np.zeros(2, np.float32), optimizer=fastps.SGD())
    result = fastps.optimize.minimize(store, ["w"], objective, samples=4)
    assert_type(result, fastps.optimize.OptimizeResult)
    np.testing.assert_allclose(store.pull("w"), 1.0, atol=1e-3)


def test_a_misspelled_name_is_an_error_of_the_checker_and_names_the_near_one() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'Adamw'; did you mean fastps\.AdamW"):
        fastps.Adamw  # type: ignore[attr-defined]  # noqa: B018


def test_connect() -> None:
    with fastps.serve(shards=2) as server:
        assert_type(server.addresses, str)
        ps = fastps.connect(server.addresses, timeout=30.0, check_finite=True)
        assert_type(ps, fastps.ParameterServer)
        ps.close()


# As for a user without torch and JAX, whose own types take most of the time to check.
MYPY = """
[mypy]
strict = True
[mypy-torch.*,jax.*,flax.*,optax.*]
ignore_missing_imports = True
follow_imports = skip
"""


@pytest.fixture(scope="module")
def configuration(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("mypy") / "mypy.ini"
    path.write_text(MYPY)
    return str(path)


@pytest.mark.timeout(320)
def test_this_file_is_well_typed(configuration: str) -> None:
    code = [sys.executable, "-m", "mypy", "--config-file", configuration, "--no-incremental"]
    code.append(str(Path(__file__).resolve()))
    done = subprocess.run(code, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.timeout(320)
def test_stub(configuration: str) -> None:
    """The stub is the compiled module."""
    code = [sys.executable, "-m", "mypy.stubtest", "--mypy-config-file", configuration, "fastps._fastps"]
    done = subprocess.run(code, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout
