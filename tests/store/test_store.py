"""The calls, in process and remote: their arguments, results and errors."""

import time

import numpy as np
import pytest

import fastps


def f32(*values):
    return np.array(values, np.float32)


@pytest.fixture
def w(ps):
    ps.register("w", f32(1, 2, 3), optimizer=fastps.SGD(lr=0.5))
    return ps


def test_push_single_gives_a_receipt(w):
    receipt = w.push("w", f32(2, 0, -2))
    assert receipt == fastps.Receipt(2, None, False, 1.0)
    assert (
        repr(receipt)
        == "Receipt(version=2, staleness=None, duplicate=False, scale=1.0, duplicates=0, momentum=None)"
    )
    np.testing.assert_array_equal(w.pull("w"), f32(0, 2, 4))


def test_push_dict_gives_a_mapping_that_owns_its_numbers(w):
    w.register("b", f32(0), optimizer=fastps.SGD(lr=1.0))
    receipts = w.push({"w": f32(1, 1, 1), "b": f32(1)})
    w.push({"w": f32(1, 1, 1)})
    assert list(receipts) == ["w", "b"]
    assert len(receipts) == 2
    assert receipts["w"].version == 2
    assert dict(receipts)["b"].version == 2
    assert "x" not in receipts
    with pytest.raises(KeyError):
        receipts["x"]
    assert receipts.bytes == 16


def test_push_of_nothing(w):
    assert dict(w.push({})) == {}


def test_pull_one_and_several(w):
    w.register("b", np.float32(7), optimizer=fastps.SGD())
    both = w.pull(["b", "w"])
    assert list(both) == ["b", "w"]
    assert both["b"].shape == ()
    value, versions = w.pull("w", versions=True)
    assert value.dtype == np.float32
    assert versions["w"] == 1
    assert versions == w.versions("w") or versions.names() == ["w"]
    assert w.pull([]) == {}


def test_pull_into_the_callers_memory(w):
    buffer = np.zeros(3, np.float32)
    assert w.pull("w", out=buffer) is buffer
    np.testing.assert_array_equal(buffer, f32(1, 2, 3))
    buffer[:] = 0
    result, versions = w.pull(["w"], out={"w": buffer}, versions=True)
    assert result["w"] is buffer
    np.testing.assert_array_equal(buffer, f32(1, 2, 3))
    assert "w" in versions
    with pytest.raises(fastps.ConfigError, match="out="):
        w.pull(["w"], out={})
    with pytest.raises(fastps.ShapeError) as caught:
        w.pull("w", out=np.zeros(4, np.float32))
    assert (caught.value.expected, caught.value.got) == ("(3,)", "(4,)")


def test_push_pull_contains_the_push(w):
    values, receipt, versions = w.push_pull("w", f32(2, 2, 2))
    np.testing.assert_array_equal(values, f32(0, 1, 2))
    assert receipt.version == 2
    assert versions["w"] == 2
    out = np.zeros(3, np.float32)
    result = w.push_pull({"w": f32(2, 2, 2)}, out={"w": out})
    np.testing.assert_array_equal(out, f32(-1, 0, 1))
    assert result.values["w"] is out
    assert result.receipts["w"].version == 3


def test_lr_and_scale_of_a_push(w):
    w.push("w", f32(1, 1, 1), lr=2.0)
    np.testing.assert_array_equal(w.pull("w"), f32(-1, 0, 1))
    assert w.push("w", f32(1, 1, 1), scale=4.0).scale == 4.0
    np.testing.assert_array_equal(w.pull("w"), f32(-3, -2, -1))
    for bad in ({"lr": float("nan")}, {"lr": -1.0}, {"scale": float("inf")}):
        with pytest.raises(fastps.FastpsError):
            w.push("w", f32(1, 1, 1), **bad)
    np.testing.assert_array_equal(w.pull("w"), f32(-3, -2, -1))


def test_staleness_counts_the_pushes_of_others(w):
    _, versions = w.pull("w", versions=True)
    with w.another() as other:
        other.push("w", f32(1, 1, 1))
        other.push("w", f32(1, 1, 1))
    assert w.push("w", f32(1, 1, 1), based_on=versions).staleness == 2
    assert w.push("w", f32(1, 1, 1)).staleness is None


def test_register_same_spec_keeps_the_value_and_other_spec_raises(w):
    w.push("w", f32(2, 2, 2))
    w.register("w", f32(9, 9, 9), optimizer=fastps.SGD(lr=0.5))
    np.testing.assert_array_equal(w.pull("w"), f32(0, 1, 2))
    others = [
        (f32(9, 9, 9), {"optimizer": fastps.Adam()}),
        (f32(9, 9), {"optimizer": fastps.SGD(lr=0.5)}),
        (f32(9, 9, 9), {"optimizer": fastps.SGD(lr=0.5), "apply": "hogwild"}),
        (f32(9, 9, 9), {"optimizer": fastps.SGD(lr=0.5), "group": "other"}),
    ]
    for array, spec in others:
        with pytest.raises(fastps.ConfigError) as caught:
            w.register("w", array, **spec)
        assert caught.value.tensor == "w"
    np.testing.assert_array_equal(w.pull("w"), f32(0, 1, 2))


@pytest.mark.parametrize(
    "optimizer",
    [
        fastps.SGD(lr=0.1, momentum=0.9, dampening=0.1, weight_decay=0.2, maximize=True),
        fastps.SGD(momentum=0.5, nesterov=True),
        fastps.Adagrad(lr=0.2, lr_decay=0.1, initial_accumulator_value=0.5, eps=1e-3, eps_mode="inside"),
        fastps.RMSprop(alpha=0.5, centered=True, momentum=0.1, eps_mode="both"),
        fastps.Adadelta(rho=0.5, eps=1e-3, weight_decay=0.1),
        fastps.Adam(betas=(0.5, 0.6), amsgrad=True),
        fastps.AdamW(lr=0.5, weight_decay=0.5, maximize=True),
    ],
)
def test_spec_gives_the_optimizer_back(store, optimizer):
    store.register("t", np.zeros((2, 3), np.float32), optimizer=optimizer, apply="hogwild", group="g")
    assert store.spec("t") == fastps.TensorSpec("t", (2, 3), "float32", "hogwild", "g", optimizer)


def test_names_unregister_and_unknown_names(w):
    w.register("a", f32(1), optimizer=fastps.SGD())
    assert w.names() == ["a", "w"]
    w.unregister("a")
    assert w.names() == ["w"]
    calls = [
        lambda: w.pull("a"),
        lambda: w.pull(["w", "a"]),
        lambda: w.push("a", f32(1)),
        lambda: w.push({"w": f32(0, 0, 0), "a": f32(1)}),
        lambda: w.push_pull("a", f32(1)),
        lambda: w.bind({"a": f32(1)}),
        lambda: w.assign("a", f32(1)),
        lambda: w.state("a"),
        lambda: w.spec("a"),
        lambda: w.versions("a"),
        lambda: w.unregister("a"),
    ]
    for call in calls:
        with pytest.raises(fastps.UnknownTensorError) as caught:
            call()
        assert caught.value.tensor == "a"
        assert isinstance(caught.value, KeyError)
    assert w.versions("w")["w"] == 1


def test_assign(w):
    assert w.assign("w", f32(5, 6, 7)).version == 2
    np.testing.assert_array_equal(w.pull("w"), f32(5, 6, 7))
    with pytest.raises(fastps.ShapeError):
        w.assign("w", f32(5, 6))
    with pytest.raises(fastps.NonFiniteError):
        w.assign("w", f32(5, 6, np.nan))


def test_state_round_trip(ps):
    rng = np.random.default_rng(1)
    for name in ("a", "b"):
        ps.register(name, np.ones((2, 2), np.float32), optimizer=fastps.Adam(lr=0.1))
    for _ in range(3):
        ps.push("a", rng.standard_normal((2, 2), dtype=np.float32))
    state = ps.state("a")
    assert list(state) == ["step", "exp_avg", "exp_avg_sq"]
    assert state["step"].tolist() == [3]
    assert state["exp_avg"].shape == (2, 2)
    ps.assign("b", ps.pull("a"))
    ps.load_state("b", state)
    gradient = rng.standard_normal((2, 2), dtype=np.float32)
    ps.push({"a": gradient, "b": gradient})
    np.testing.assert_array_equal(ps.pull("a"), ps.pull("b"))
    ps.load_state("b", {**state, "step": 3})
    for bad in (
        {},
        {"step": 1},
        {**state, "sum": state["exp_avg"]},
        {**state, "step": -1},
        {**state, "step": "a"},
        {**state, "step": None},
        {**state, "step": np.nan},
        {**state, "step": 2**64},
        {**state, "step": 2.0**64},
        {**state, "step": [1, 2]},
    ):
        with pytest.raises(fastps.ConfigError):
            ps.load_state("b", bad)
    for array, error, message in (
        (np.zeros(4, np.float32), fastps.ShapeError, "state exp_avg has another shape"),
        (np.zeros((2, 2), np.int32), fastps.DTypeError, "state exp_avg: "),
        (state["exp_avg"].T, fastps.ShapeError, "state exp_avg: "),
    ):
        with pytest.raises(error, match=message) as caught:
            ps.load_state("b", {**state, "exp_avg": array})
        assert caught.value.tensor == "b"


@pytest.mark.parametrize(
    ("slices", "expected"),
    [
        (1, "one number, as the tensor has one slice"),
        (2, "one number for all slices, or 2, one for each"),
    ],
)
def test_a_state_with_another_number_of_steps(ps, slices, expected):
    n = (slices - 1) * 63 * 4096 + 1
    ps.register("w", np.zeros(n, np.float32), optimizer=fastps.SGD(momentum=0.9))
    state = ps.state("w")
    for steps in ([1] * slices, 7):
        ps.load_state("w", {**state, "step": steps})
    with pytest.raises(fastps.ConfigError, match="number of steps") as caught:
        ps.load_state("w", {**state, "step": [1, 2, 3]})
    assert (caught.value.tensor, caught.value.expected, caught.value.got) == ("w", expected, "3")


@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0, 2), (1, 1, 1), (2, 3, 5), (3 * 63 * 4096 + 5,)])
@pytest.mark.parametrize("apply", ["exact", "hogwild"])
def test_shapes(ps, shape, apply):
    rng = np.random.default_rng(3)
    initial = rng.standard_normal(shape, dtype=np.float32) if shape else np.float32(2)
    gradient = rng.standard_normal(shape, dtype=np.float32) if shape else np.array(3, np.float32)
    ps.register("t", initial, optimizer=fastps.SGD(lr=1.0), apply=apply)
    assert ps.push("t", gradient).version == 2
    value = ps.pull("t")
    assert value.shape == shape
    np.testing.assert_array_equal(value, np.float32(initial - gradient))
    assert len(ps.versions("t").slices("t")) == max(1, -(-value.size // (63 * 4096)))


def test_stats(w):
    w.push("w", f32(1, 1, 1))
    stats = w.stats()
    assert set(stats) == {"client", "groups", "shards", "workers"}
    assert all(isinstance(n, int) for n in stats["client"].values())
    assert all(set(shard) == {"address", "counters"} for shard in stats["shards"])


def test_closed(w):
    w.close()
    w.close()
    assert w.closed
    with pytest.raises(fastps.ConfigError, match="closed"):
        w.pull("w")


def test_wrong_arguments(w):
    for call in (
        lambda: w.push("w"),
        lambda: w.push([f32(1)]),
        lambda: w.push("w", f32(1, 1, 1), codec="int8"),
        lambda: w.push("w", f32(1, 1, 1), codec=fastps.Int8),
        lambda: w.register("x", f32(1), optimizer="adam"),
        lambda: w.register("x", f32(1), optimizer=fastps.Adam),
        lambda: w.register("x", f32(1), optimizer=fastps.Adam(), apply="fast"),
        lambda: w.register("", f32(1), optimizer=fastps.Adam()),
        lambda: w.register("n" * 2000, f32(1), optimizer=fastps.Adam()),
        lambda: w.pull("w", timeout=-1),
        lambda: fastps.Store(threads=0),
        lambda: fastps.Adam(lr=-1),
        lambda: fastps.Adam(betas=(0.5, 1.0)),
        lambda: fastps.SGD(nesterov=True),
        lambda: fastps.Adagrad(eps_mode="sideways"),
        lambda: fastps.RMSprop(lr="fast"),
        lambda: fastps.Adadelta(rho=2),
        lambda: fastps.Local(lr=-1),
        lambda: fastps.Local(push_every=0, lr=1),
        lambda: fastps.Local(pull_every=1.5, lr=1),
    ):
        with pytest.raises(fastps.ConfigError):
            call()


@pytest.mark.parametrize("number", [-1, 2**64, 1.5])
@pytest.mark.parametrize(
    ("make", "name"),
    [
        (fastps.Store, "threads"),
        (fastps.Store, "memory_limit"),
        (fastps.serve, "shards"),
        (fastps.serve, "memory_limit"),
        (fastps.serve, "keep"),
    ],
)
def test_numbers_that_are_none(make, name, number):
    with pytest.raises(fastps.ConfigError, match=f"invalid {name}: expected an integer from 0"):
        make(**{name: number})


def test_check_finite_can_be_skipped():
    with fastps.Store(check_finite=False) as store:
        store.register("w", f32(0), optimizer=fastps.SGD(lr=1.0))
        assert store.push("w", f32(np.inf)).version == 2
        assert store.push(store.bind({"w": f32(1)}))["w"].version == 3
        assert store.pull("w").tolist() == [-np.inf]


def test_codecs_feedback_and_assign_always_look():
    with fastps.Store(check_finite=False) as store:
        store.register("w", f32(0), optimizer=fastps.SGD(lr=1.0))
        for call in (
            *(lambda c=c: store.push("w", f32(np.inf), codec=c) for c in (fastps.BFloat16(), fastps.Int8())),
            lambda: store.push(store.bind({"w": f32(np.inf)}, codec=fastps.OneBit())),
            lambda: store.assign("w", f32(np.inf)),
        ):
            with pytest.raises(fastps.NonFiniteError, match="index 0") as caught:
                call()
            error = caught.value
            assert (error.tensor, error.shard, error.expected, error.got) == (
                "w",
                None,
                "finite values",
                "inf",
            )
        assert store.versions("w")["w"] == 1


def test_a_server_looks_where_the_client_does_not(server):
    with fastps.connect(server.addresses, check_finite=False) as ps:
        ps.register("w", f32(0, 0), optimizer=fastps.SGD(lr=1.0))
        with pytest.raises(fastps.NonFiniteError, match="element 1") as caught:
            ps.push("w", f32(0, np.nan))
        error = caught.value
        assert (error.tensor, error.shard) == ("w", 0)
        assert (error.expected, error.got) == ("finite float32 values", "NaN")
        assert ps.pull("w").tolist() == [0, 0]


def test_memory_limit():
    with fastps.Store(memory_limit=1 << 20) as store:
        with pytest.raises(fastps.CapacityError) as caught:
            store.register("w", np.zeros(1 << 20, np.float32), optimizer=fastps.Adam())
        assert isinstance(caught.value, MemoryError)
        assert store.names() == []


def test_connect_errors(server):
    with pytest.raises(fastps.ConfigError):
        fastps.connect("")
    with pytest.raises((fastps.ConnectionLostError, fastps.DeadlineError), match=r"127\.0\.0\.1:1"):
        fastps.connect("127.0.0.1:1", timeout=0.5)
    with fastps.connect(server.address_list) as a, fastps.connect(server.addresses) as b:
        a.register("w", f32(1), optimizer=fastps.SGD())
        assert b.names() == ["w"]


def test_serve_errors(server):
    with pytest.raises(fastps.ConfigError, match="of this process uses it"):
        fastps.serve(listen=server.address_list[0])
    with pytest.raises(fastps.ConfigError):
        fastps.serve(listen="0.0.0.0:0")
    with pytest.raises(fastps.ConfigError):
        fastps.serve(shards=0)
    with fastps.serve(listen="0.0.0.0:0", insecure=True, advertise="127.0.0.1") as open_server:
        assert open_server.addresses.startswith("127.0.0.1:")
    server.stop()
    server.stop()


def test_the_versions_of_many_tensors_are_found_by_name():
    """The last of 500 tensors as fast as the first."""
    names = [f"tensor {k:03}" for k in range(500)]
    with fastps.Store() as store:
        for name in names:
            store.register(name, np.zeros(1, np.float32), optimizer=fastps.SGD())
        versions = store.versions(names)

    def seconds(name):
        def once():
            begin = time.perf_counter()
            for _ in range(200):
                assert versions[name] == 1
            return time.perf_counter() - begin

        return min(once() for _ in range(20))

    assert seconds(names[-1]) < 5 * seconds(names[0])
    assert "tensor" not in versions
    with pytest.raises(KeyError):
        versions["tensor"]
