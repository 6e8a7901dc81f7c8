"""Steps that overflow are refused whole; what overflows through many ordinary steps is counted and named."""

from __future__ import annotations

import numpy as np
import pytest

import fastps
from fastps.commands import cli

SLICE = 63 * 4096
#: A finite gradient whose step overflows at the given rate.
HUGE = [
    (fastps.SGD(lr=1e30), 1e20),
    (fastps.SGD(lr=1e30, momentum=0.9), 1e20),
    (fastps.Adagrad(lr=0.1), 1e30),
    (fastps.RMSprop(lr=0.1), 1e30),
    (fastps.Adadelta(), 1e30),
    (fastps.Adam(lr=0.1), 1e25),
    (fastps.AdamW(lr=0.1), 1e25),
    (fastps.Ftrl(lr=0.1), 1e30),
]


def ones(n, value=1.0):
    return np.full(n, value, np.float32)


def snapshot(ps, name="w"):
    state = ps.state(name)
    return ps.pull(name).tobytes(), {key: np.asarray(value).tobytes() for key, value in state.items()}


@pytest.mark.parametrize(("rule", "value"), HUGE, ids=lambda v: type(v).__name__)
def test_a_step_that_overflows_changes_nothing(ps, rule, value):
    ps.register("w", ones(100), rule)
    ps.push("w", ones(100, 1e-3), lr=0.01)
    before, versions = snapshot(ps), ps.versions()
    gradient = ones(100, 1e-3)
    gradient[37] = -value
    with pytest.raises(fastps.NonFiniteError, match=r"overflows at element 37 .*tensor \"w\"") as refused:
        ps.push("w", gradient)
    name = "AdamW" if isinstance(rule, fastps.AdamW) else type(rule).__name__
    assert f"{name} with lr=" in refused.value.got
    assert refused.value.tensor == "w"
    assert snapshot(ps) == before
    assert ps.versions() == versions
    ps.push("w", ones(100, 1e-3), lr=0.01)  # and training continues
    assert np.isfinite(ps.pull("w")).all()


@pytest.mark.parametrize("codec", [fastps.BFloat16(), fastps.Int8(), fastps.OneBit()], ids=repr)
def test_every_codec_s_values_are_judged(ps, codec):
    """A refused gradient is in no residual, either."""
    ps.register("w", ones(3000), fastps.SGD(lr=1.0))
    with fastps.Worker(ps, {"w": ones(3000)}, fastps.Async(), codec=codec) as worker:
        with pytest.raises(fastps.NonFiniteError, match="overflows at element"):
            worker.step({"w": ones(3000, 1e20)}, lr=1e25)
        assert worker.stats()["rejected"] == 1
        worker.step({"w": ones(3000)}, lr=0.5)
        np.testing.assert_allclose(worker.params["w"], 0.5, rtol=1e-2)


def test_a_large_step_that_fits_is_taken_with_the_usual_bits(ps):
    """The trial uses copies, the others do not."""
    for name, n in [("a", 10), ("b", SLICE + 10)]:
        ps.register(name, ones(n), fastps.SGD(lr=1.0, momentum=0.5))
        for _ in range(2):
            ps.push(name, ones(n, 1e31))
        first = np.float32(1.0) - np.float32(1e31)
        velocity = np.float32(1e31) * np.float32(0.5) + np.float32(1e31)
        assert (ps.pull(name) == first - velocity).all()


def test_a_whole_slice_is_refused_and_the_others_are_not(ps):
    ps.register("w", ones(2 * SLICE), fastps.SGD(lr=1.0))
    gradient = ones(2 * SLICE)
    gradient[SLICE + 3] = 1e38
    with pytest.raises(fastps.PartialPush) as part:
        ps.push("w", gradient, lr=1e10)
    ((name, elements, why),) = part.value.refused
    assert (name, elements) == ("w", range(SLICE, 2 * SLICE))
    assert isinstance(why, fastps.NonFiniteError)
    assert f"element {SLICE + 3}" in str(why)
    assert (ps.pull("w")[SLICE:] == 1).all()


def test_rows_and_float64(ps):
    ps.register("table", np.ones((50, 4), np.float32), fastps.Adagrad(lr=1.0))
    rows = fastps.Sparse(np.array([3, 7]), np.array([[1, 1, 1, 1], [1, 1, 1e30, 1]], np.float32))
    with pytest.raises(fastps.NonFiniteError, match=f"element {7 * 4 + 2} "):
        ps.push("table", rows)
    assert (ps.pull("table") == 1).all()
    ps.register("wide", np.ones(5), fastps.SGD(lr=1.0))
    ps.push("wide", np.full(5, 1e275), lr=1e30)
    with pytest.raises(fastps.NonFiniteError, match="element 0"):
        ps.push("wide", np.full(5, 1e290), lr=1e30)
    assert (ps.pull("wide") == -1e275 * 1e30).all()


def test_a_version_of_several_workers(ps):
    """Each gradient is small enough, their sum times the rate is not; all of them are refused."""
    ps.register("w", ones(10), fastps.SGD(lr=1.0))
    workers = [fastps.Worker(ps, {"w": ones(10)}, fastps.Sync(workers=2, reduce="sum")) for _ in range(2)]
    for worker in workers:
        worker.begin({"w": ones(10, 3e30)}, lr=7e7)
    for worker in workers:
        with pytest.raises(fastps.NonFiniteError, match="overflows"):
            worker.step({})
    for worker in workers:
        worker.begin({"w": ones(10)}, lr=0.5)
    for worker in workers:
        worker.step({})
        assert (worker.params["w"] == 0).all()
        worker.close()


def test_a_racing_step_that_may_overflow_is_refused(ps):
    ps.register("w", ones(10), fastps.SGD(lr=1.0), apply="hogwild")
    with pytest.raises(fastps.NonFiniteError, match="cannot take back"):
        ps.push("w", ones(10, 1e20), lr=1e15)
    ps.push("w", ones(10), lr=0.5)
    assert (ps.pull("w") == 0.5).all()


@pytest.mark.parametrize(
    "mode", [fastps.Async(), fastps.Async(overlap=True), fastps.Local(2, 2, lr=0.1)], ids=str
)
def test_a_worker_drops_a_gradient_whose_step_overflows(ps, mode):
    """It is not added to the next one, which would be refused, too."""
    for name in "ab":
        ps.register(name, ones(10), fastps.SGD(lr=1.0))
    worker = fastps.Worker(ps, {"a": ones(10), "b": ones(10)}, mode)
    with pytest.raises(fastps.FastpsError, match="overflows"):
        for _ in range(6):
            worker.step({"a": ones(10, 1e20), "b": ones(10)}, lr=1e25)
    for _ in range(4):
        worker.step({"a": ones(10), "b": ones(10)}, lr=0.25)
    worker.close()
    assert np.isfinite(ps.pull("a")).all()
    assert (ps.pull("a") <= 0.5).all()


def test_many_ordinary_steps_are_counted_and_named(tmp_path, capfd):
    """Each step of a velocity that grows is small enough."""
    with fastps.serve(data_dir=tmp_path / "data") as server, fastps.connect(server.addresses) as ps:
        ps.register("w", ones(10), fastps.SGD(lr=1.0, momentum=2.0))
        ps.register("good", ones(10), fastps.SGD(lr=1.0))
        assert counter(ps) == 0
        for _ in range(130):
            ps.push("w", ones(10, -1.0))
        assert not np.isfinite(ps.pull("w")).any()
        assert counter(ps) == 1
        with pytest.raises(fastps.NonFiniteError, match=r'tensor "w"') as named:
            fastps.evaluator(ps, lambda params: {"x": 1.0}).now()
        assert named.value.__notes__ == ["evaluating version 131"]
        assert cli.main(["checkpoint", "save", server.addresses]) == 0
        assert cli.main(["checkpoint", "list", str(tmp_path / "data")]) == 0
        assert "NaN or infinity in w\n" in capfd.readouterr().out
        ps.assign("w", ones(10))
        ps.load_state("w", {**ps.state("w"), "momentum_buffer": np.zeros(10, np.float32)})
        assert counter(ps) == 0


def counter(ps):
    return sum(shard["counters"]["slices_not_finite"] for shard in ps.stats()["shards"])


def test_a_restart_has_the_same_bits(tmp_path):
    """Trials are replayed from the log."""
    for start in range(2):
        with (
            fastps.serve(data_dir=tmp_path / "data") as server,
            fastps.connect(server.addresses, ack="logged") as ps,
        ):
            if start == 0:
                ps.register("w", ones(100), fastps.Adagrad(lr=1.0))
                for value in (1e16, 1e17, 1.0):
                    ps.push("w", np.linspace(1, value, 100, dtype=np.float32))
                with pytest.raises(fastps.NonFiniteError):
                    ps.push("w", ones(100, 1e30))
                before = snapshot(ps)
            assert snapshot(ps) == before
