"""Rows are assigned as NumPy assigns them, in process, over the network and after restarts."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

import fastps

SLICE = 63 * 4096
# One slice; rows over borders of slices; a flat tensor; one row over several slices; rows of no elements.
TABLE = (3 * SLICE // 1000 + 5, 1000)
SHAPES: list[tuple[int, ...]] = [(50, 3), TABLE, (2 * SLICE + 7,), (3, SLICE + 3), (4, 0)]
# With state, without, and some that take no sparse pushes.
OPTIMIZERS = [
    fastps.SGD(lr=0.5),
    fastps.SGD(lr=0.5, momentum=0.9, weight_decay=0.1),
    fastps.Adagrad(lr=0.5),
    fastps.RMSprop(lr=0.1),
]


def rows_of(rng: np.random.Generator, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Rows in any order, around borders of slices, with repeats, sometimes none."""
    n = int(rng.choice([0, 1, 2, 40])) if np.prod(shape[1:]) < 10_000 else int(rng.choice([0, 1, 4]))
    width = max(1, int(np.prod(shape[1:])))
    borders = np.arange(0, shape[0] * width + 1, SLICE) // width
    near = np.clip(rng.choice(borders, n) + rng.integers(-1, 2, n), 0, shape[0] - 1)
    indices = np.where(rng.random(n) < 0.5, near, rng.integers(0, shape[0], n))
    return indices, rng.standard_normal((n, *shape[1:]), np.float32)


def touched(indices: np.ndarray, shape: tuple[int, ...]) -> set[int]:
    """The slices that have elements of these rows."""
    width = int(np.prod(shape[1:]))
    ends = ((int(row) * width, (int(row) + 1) * width) for row in indices)
    return {k for start, end in ends for k in range(start // SLICE, -(-end // SLICE)) if start < end}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_numpy(ps: fastps.ParameterServer, rng: np.random.Generator, shape: tuple[int, ...]) -> None:
    optimizer = OPTIMIZERS[len(shape) + shape[0] % 3 - 1]
    expected = rng.standard_normal(shape, np.float32)
    ps.register("w", expected, optimizer=optimizer)
    ps.push("w", np.ones(shape, np.float32))
    expected, state, steps = ps.pull("w"), ps.state("w"), ps.versions("w").slices("w")
    for _ in range(8):
        indices, values = rows_of(rng, shape)
        receipt = ps.assign("w", fastps.Sparse(indices, values))
        expected[indices] = values  # of a repeated row, NumPy also keeps the last
        slices = touched(indices, shape)
        steps = tuple(version + (k in slices) for k, version in enumerate(steps))
        assert ps.versions("w").slices("w") == steps
        assert receipt.version == min((steps[k] for k in slices), default=0)
        assert (receipt.duplicate, receipt.staleness, receipt.scale) == (False, None, 1.0)
    np.testing.assert_array_equal(ps.pull("w"), expected)
    for name, values in ps.state("w").items():
        np.testing.assert_array_equal(values, state[name])


def test_the_last_of_repeated_rows_remains(ps: fastps.ParameterServer) -> None:
    ps.register("w", np.zeros((5, 2), np.float32), optimizer=fastps.RMSprop())
    values = np.arange(10, dtype=np.float32).reshape(5, 2)
    assert ps.assign("w", fastps.Sparse([3, 0, 3, 0, 3], values)).version == 2
    np.testing.assert_array_equal(ps.pull("w"), [values[3], [0, 0], [0, 0], values[4], [0, 0]])


BAD = [
    (fastps.Sparse([5], np.ones((1, 2), np.float32)), fastps.ShapeError, "index 0 is out of range"),
    (fastps.Sparse([1, -1], np.ones((2, 2), np.float32)), fastps.ShapeError, "index 1 is out of range"),
    (
        fastps.Sparse([1, 2], np.ones((1, 2), np.float32)),
        fastps.ShapeError,
        r"\(2, 2\), got \(1, 2\)",
    ),
    (fastps.Sparse([1], np.ones((1, 3), np.float32)), fastps.ShapeError, r"expected \(1, 2\), got \(1, 3\)"),
    (fastps.Sparse([1], np.ones((1, 2))), fastps.DTypeError, "float64"),
    (fastps.Sparse([0.5], np.ones((1, 2), np.float32)), fastps.DTypeError, "float64"),
    (fastps.Sparse([1], np.array([[0, np.nan]], np.float32)), fastps.NonFiniteError, "index 1"),
    # A value that a later one replaces is refused, too, as in a push.
    (fastps.Sparse([1, 1], np.array([[np.inf, 0], [0, 0]], np.float32)), fastps.NonFiniteError, "index 0"),
]


@pytest.mark.parametrize(("rows", "error", "text"), BAD)
def test_bad_rows_change_nothing(
    ps: fastps.ParameterServer, rows: fastps.Sparse, error: type[fastps.FastpsError], text: str
) -> None:
    ps.register("w", np.zeros((5, 2), np.float32), optimizer=fastps.SGD())
    with pytest.raises(error, match=text) as caught:
        ps.assign("w", rows)
    assert caught.value.tensor == "w"
    assert ps.versions("w")["w"] == 1
    assert not ps.pull("w").any()


def test_what_has_no_rows_to_assign(ps: fastps.ParameterServer) -> None:
    ps.register("h", np.zeros((5, 2), np.float32), optimizer=fastps.SGD(), apply="hogwild")
    ps.register("s", np.float32(0), optimizer=fastps.SGD())
    with pytest.raises(fastps.ConfigError, match=r'"h".*apply="exact", got apply="hogwild"'):
        ps.assign("h", fastps.Sparse([1], np.ones((1, 2), np.float32)))
    ps.register("d", np.zeros((5, 2)), optimizer=fastps.SGD())
    for values in (np.ones((1, 2)), np.ones((1, 2), np.float32)):
        with pytest.raises(fastps.DTypeError) as caught:
            ps.assign("d", fastps.Sparse([1], values))
        assert caught.value.tensor == "d"
    with pytest.raises(fastps.ShapeError, match="a scalar has no rows"):
        ps.assign("s", fastps.Sparse([0], np.ones(1, np.float32)))
    with pytest.raises(fastps.UnknownTensorError):
        ps.assign("x", fastps.Sparse([0], np.ones(1, np.float32)))
    assert [ps.versions()[name] for name in "hsd"] == [1, 1, 1]


def test_pushes_and_pulls_go_on_around_it(ps: fastps.ParameterServer) -> None:
    """A pull that has begun keeps its version; the gradient after an assignment steps the new values."""
    ps.register("w", np.zeros((4, 2), np.float32), optimizer=fastps.SGD(lr=1.0, momentum=0.5))
    ps.push("w", np.ones((4, 2), np.float32))
    before = ps.pull("w")
    ps.assign("w", fastps.Sparse([2], np.full((1, 2), 7, np.float32)))
    assert (before == -1).all()
    ps.push("w", np.ones((4, 2), np.float32))
    np.testing.assert_array_equal(ps.pull("w"), [[-2.5] * 2, [-2.5] * 2, [7 - 1.5] * 2, [-2.5] * 2])


def test_restarts_replay_rows(tmp_path: Path, rng: np.random.Generator) -> None:
    """From the log that a killed server leaves, and from the snapshot of a stopped one."""
    expected, versions = np.zeros(TABLE, np.float32), ()
    folders = [tmp_path / f"{k}" for k in range(4)]
    for k, folder in enumerate(folders):
        with fastps.serve(shards=2, data_dir=folder) as server, fastps.connect(server, ack="logged") as ps:
            if k == 0:
                ps.register("w", expected, optimizer=fastps.RMSprop())
            assert ps.versions("w").slices("w") == (versions or ps.versions("w").slices("w"))
            np.testing.assert_array_equal(ps.pull("w"), expected)
            for _ in range(3):
                indices, values = rows_of(rng, TABLE)
                ps.assign("w", fastps.Sparse(indices, values))
                expected[indices] = values
            versions = ps.versions("w").slices("w")
            if k in (0, 2):  # what is on disk now is what a kill would leave
                shutil.copytree(folder, folders[k + 1])
        if k == 1:
            shutil.copytree(folder, folders[2])


def test_a_worker_sees_rows_that_another_client_sets(ps: fastps.ParameterServer) -> None:
    ps.register("w", np.zeros(3, np.float32), optimizer=fastps.SGD(lr=1.0))
    with fastps.Worker(ps, {"w": np.zeros(3)}, mode=fastps.Async()) as worker:
        assert worker.versions is not None
        assert worker.versions["w"] == 1
        ps.assign("w", fastps.Sparse([1], np.array([4.0], np.float32)))
        worker.step({"w": np.ones(3, np.float32)})
        assert worker.params["w"].tolist() == [-1, 3, -1]
        assert worker.versions["w"] == 3
        receipt = ps.push("w", np.zeros(3, np.float32), based_on=worker.versions)
        assert receipt.staleness is None or receipt.staleness == 0
