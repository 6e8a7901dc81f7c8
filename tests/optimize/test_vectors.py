"""`fastps.optimize.Vectors` on a store: operations against NumPy, sums against exact rationals, refusals."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest

import fastps
import fastps.optimize
from fastps._fastps import VectorSpaces
from fastps.optimize import Vectors

#: Elements of a slice of float32.
SLICE = 63 * 4096
SHAPES = {"a": (3, 5), "b": (SLICE + 7,), "c": (), "d": (0, 4)}


@pytest.fixture(params=[np.float32, np.float64])
def dtype(request):
    return request.param


@pytest.fixture
def store(dtype):
    with fastps.Store(threads=2) as store:
        rng = np.random.default_rng(1)
        for name, shape in SHAPES.items():
            store.register(name, rng.normal(size=shape).astype(dtype), fastps.SGD(lr=1.0))
        yield store


@pytest.fixture
def v(store):
    with Vectors(store, list(SHAPES), ["g", "p", "q"], space="mine") as v:
        yield v


class Portions:
    """A replica's calls for portions, without the table of replicas."""

    def __init__(self, store, v):
        self.native, self.v = VectorSpaces(store._native), v

    def add(self, batch, portion, gradients):
        return self.native.push_portion(self.v._id, batch, portion, gradients, None)[0]

    def put(self, vector, gradients):
        """Writes values into a vector: a sum of one portion."""
        batch = self.v.next_number
        largest = max(float(np.abs(g).max(initial=0)) for g in gradients.values())
        self.v.run(self.v.begin_sum(batch, 1, largest=largest))
        assert self.add(batch, 0, gradients) == "added"
        self.v.run(self.v.end_sum(vector))


@pytest.fixture
def portions(store, v):
    return Portions(store, v)


@pytest.fixture
def random_arrays(dtype):
    def make(seed, scale=1.0):
        rng = np.random.default_rng(seed)
        return {n: (scale * rng.normal(size=s)).astype(dtype) for n, s in SHAPES.items()}

    return make


def exact_dot(x, y):
    """The inner product of all tensors, rounded once."""
    pairs = itertools.chain.from_iterable(zip(x[n].ravel(), y[n].ravel(), strict=True) for n in x)
    return math.fsum(float(a) * float(b) for a, b in pairs)


def test_operations_are_those_of_numpy(store, v, portions, dtype, random_arrays):
    g, p = random_arrays(2), random_arrays(3)
    w = store.pull(list(SHAPES))
    portions.put("g", g)
    portions.put("p", p)
    # Rounding to a sum's grid is exact in float32, and nearly so in float64.
    given, g, p = g, v.pull("g"), v.pull("p")
    for n in SHAPES:
        np.testing.assert_allclose(g[n], given[n], rtol=0, atol=0 if dtype == np.float32 else 2.0**-57)

    results = v.run(
        v.dot("g", "p"),
        v.axpy("p", -0.5, "g"),
        v.combine("q", {"w": 1.0, "g": 0.25, "p": -3.0, "q": 7.0}),
        v.max_abs("q"),
        v.block(["g", "p"], ["w", "g", "q"]),
        v.multiply("g", "g", "p"),
        v.scale("p", 1 / 3),
    )
    wide = {n: {k: x[n].astype(np.float64) for k, x in {"w": w, "g": g, "p": p}.items()} for n in SHAPES}
    new_p = {n: (x["p"] - 0.5 * x["g"]).astype(dtype) for n, x in wide.items()}
    new_q = {n: (x["w"] + 0.25 * x["g"] - 3.0 * new_p[n].astype(np.float64)) for n, x in wide.items()}
    found_q = v.pull("q")
    for n in SHAPES:
        # Fused multiply-adds may differ from NumPy's separate roundings in float64, so by some last places.
        eps = float(np.finfo(dtype).eps)
        np.testing.assert_allclose(found_q[n], new_q[n].astype(dtype), rtol=2 * eps, atol=20 * eps)
        assert np.array_equal(v.pull("g")[n], g[n] * new_p[n])
        assert np.array_equal(v.pull("p")[n], (new_p[n].astype(np.float64) * (1 / 3)).astype(dtype))
    dot, largest, block = results
    assert dot == pytest.approx(exact_dot(g, p), rel=1e-13, abs=1e-9)
    assert largest == max(float(np.abs(q).max(initial=0)) for q in found_q.values())
    rows, columns = (g, new_p), (w, g, found_q)
    assert block == [
        [pytest.approx(exact_dot(row, column), rel=1e-12, abs=1e-9) for column in columns] for row in rows
    ]
    # A block has the bits of its products one by one.
    names = ["g", "p", "q"]
    block, *single = v.run(v.block(names, names), *(v.dot(x, y) for x in names for y in names))
    assert [x for row in block for x in row] == single
    v.run(v.zero("q"), v.copy("p", "w"))
    assert v.run(v.dot("q", "q"), v.max_abs("q"), v.dot("p", "w"), v.dot("w", "w"))[:2] == (0.0, 0.0)
    assert all(np.array_equal(v.pull("p")[n], store.pull(n)) for n in SHAPES)


def test_results_of_values_that_are_not_finite_are_not_finite(v, portions, dtype):
    huge = {n: np.full(s, np.finfo(dtype).max, dtype) for n, s in SHAPES.items()}
    portions.put("g", huge)
    v.run(v.scale("g", 2.0), v.copy("p", "g"), v.scale("p", -1.0))
    assert v.run(v.dot("g", "g"), v.max_abs("p"), v.dot("g", "p")) == (math.inf, math.inf, -math.inf)
    v.run(v.combine("q", {"g": 1.0, "p": 1.0}))
    assert all(math.isnan(x) for x in v.run(v.dot("q", "q"), v.max_abs("q")))


def test_a_sum_is_exact_within_its_quanta_whatever_the_order(store, dtype):
    count, rng = 24, np.random.default_rng(7)
    portions = [
        {n: (10.0 ** rng.integers(-7, 1) * rng.normal(size=s)).astype(dtype) for n, s in SHAPES.items()}
        for _ in range(count)
    ]
    largest = max(float(np.abs(x).max(initial=0)) for portion in portions for x in portion.values())
    seen = None
    for order in range(3):
        with Vectors(store, list(SHAPES), ["g"], space="sums") as v:
            calls = Portions(store, v)
            v.run(v.begin_sum(1, 1))
            assert calls.add(1, 0, portions[0]) == "added"
            (magnitude,) = v.run(v.end_sum("g"), v.max_abs("g"))
            v.run(v.begin_sum(2, count, largest=magnitude))
            turn = np.random.default_rng(order).permutation(count).tolist()
            for k in turn:
                assert calls.add(2, k, portions[k]) == "added"
                # A backup task brings the same portion again.
                assert calls.add(2, k, portions[k]) == "duplicate"
            v.run(v.end_sum("g"))
            sums = v.pull("g")
        seen = seen or sums
        assert all(seen[n].tobytes() == sums[n].tobytes() for n in SHAPES)
    for name in ("a", "c"):
        for index in np.ndindex(SHAPES[name]):
            expected = sum(Fraction(float(portion[name][index])) for portion in portions)
            found = seen[name][index]
            # The sum itself, and its rounding to the dtype.
            bound = count * Fraction(largest) / 2**60 + Fraction(float(np.spacing(abs(found)))) / 2
            assert abs(Fraction(float(found)) - expected) <= bound


def test_values_outside_the_grid_need_a_coarser_one(v, portions, dtype, random_arrays):
    small, large = random_arrays(4), random_arrays(5, 2.0**24)
    v.run(v.begin_sum(1, 1))
    assert portions.add(1, 0, small) == "added"
    (magnitude,) = v.run(v.end_sum("g"), v.max_abs("g"))
    assert portions.add(1, 0, small) == "stale"
    v.run(v.begin_sum(2, 2, largest=magnitude))
    assert portions.add(1, 0, small) == "stale"
    assert portions.add(2, 0, large) == "outside"
    v.run(v.begin_sum(3, 1, largest=magnitude, coarser=1))
    assert portions.add(3, 0, large) == "added"
    v.run(v.end_sum("g"))
    pulled = v.pull("g")
    assert all(np.allclose(pulled[n], large[n], rtol=1e-6) for n in SHAPES)
    v.run(v.begin_sum(4, 1, largest=magnitude))
    bad = {**small, "a": np.full(SHAPES["a"], np.nan, dtype)}
    assert portions.add(4, 0, bad) == "not_finite"


def test_refused_programs_change_nothing(v, portions, random_arrays):
    portions.put("g", random_arrays(2))
    before = {name: v.pull(name) for name in ["w", "g", "p", "q"]}
    with pytest.raises(fastps.NonFiniteError, match="not finite") as error:
        v.run(v.copy("p", "g"), v.scale("w", 1e300), v.scale("w", 1e300), v.zero("q"))
    assert error.value.tensor in SHAPES
    begin = v.begin_sum(99, 2, largest=1.0)
    for operations, expected in [
        ([v.zero("q"), v.end_sum("p")], "no sum is open"),
        ([v.zero("q"), v.scale("p", math.nan)], "invalid factor"),
        ([v.zero("q"), begin, begin], "cannot keep apart"),
        ([v.zero("q"), v.begin_sum(99, 0)], "invalid number of portions"),
        ([v.zero("q"), v.begin_sum(99, 65_537)], "invalid number of portions"),
        ([v.zero("q")] * 257, "too many operations"),
        ([v.zero("q"), v.block(["g"] * 65, ["g"] * 65)], "too many results"),
        ([v.zero("q"), fastps.optimize.Operation(2, 9)], "no such vector"),
        ([fastps.optimize.Operation(3, 1, (), (1.0, 2.0))], "malformed operation"),
    ]:
        with pytest.raises((fastps.ConfigError, fastps.FrameError), match=expected):
            v.run(*operations)
    for make in (v.zero, v.max_abs, v.end_sum):
        with pytest.raises(fastps.ConfigError, match="no such vector: expected one of"):
            make("none")
    with pytest.raises(fastps.ConfigError, match="lacks portions"):
        v.run(begin)
        v.run(v.zero("q"), v.end_sum("p"))
    for name, arrays in before.items():
        after = v.pull(name)
        assert all(after[n].tobytes() == arrays[n].tobytes() for n in SHAPES), name


def test_a_program_runs_once_and_earlier_ones_not_again(v):
    first = v.run(v.axpy("w", 1.0, "w"), v.dot("w", "w"))
    number = v.next_number - 1
    again = v.run(v.axpy("w", 1.0, "w"), v.dot("w", "w"), number=number)
    assert again == first == v.run(v.dot("w", "w"))
    assert v.run(v.axpy("w", 1.0, "w"), v.dot("w", "w"), number=number) == ()
    assert v.run(v.dot("w", "w")) == first


def test_an_open_space_keeps_other_changes_out(store, v, dtype):
    grad = np.ones(SHAPES["a"], dtype)
    before = store.pull("a")
    # A float64 tensor takes no sparse gradients anyway.
    row = fastps.Sparse([1], grad[:1]) if dtype == np.float32 else grad
    for change in (
        lambda: store.push("a", grad),
        lambda: store.push("a", row),
        lambda: store.assign("a", grad),
        lambda: store.unregister("a"),
    ):
        with pytest.raises(fastps.ConfigError, match='space "mine" is open'):
            change()
    assert np.array_equal(store.pull("a"), before)
    with pytest.raises(fastps.ConfigError, match='space "mine" is open'):
        Vectors(store, ["a"], ["g"], space="other")
    v.close()
    assert store.push("a", grad).version > 1
    with pytest.raises(fastps.ConfigError, match="no such space"):
        v.run(v.zero("g"))


def test_a_second_coordinator_takes_over_when_the_first_has_gone(store, dtype):
    first = Vectors(store, ["a"], ["g"], space="s")
    with pytest.raises(fastps.ConfigError, match="has a coordinator: expected a free seat"):
        Vectors(store, ["a"], ["g"], space="s")
    first.save("at iteration 7")
    first.run(first.copy("g", "w"))
    with pytest.raises(fastps.ConfigError, match="too long"):
        first.save("x" * 65_537)
    with pytest.raises(fastps.ConfigError, match="has others"):
        Vectors(store, ["a"], ["g", "p"], space="s")
    number = first.next_number
    # Its client ends, as when its process dies, while it still holds the object.
    first._ps.close()
    with Vectors(store, ["a"], ["g"], space="s") as second:
        assert (second.found, second.stored, second.next_number) == (True, "at iteration 7", number + 65_536)
        assert second.term > first.term
        assert np.array_equal(second.pull("g")["a"], store.pull("a"))
        second.run(second.zero("g"))
        old = VectorSpaces(store._native)
        with pytest.raises(fastps.FencedError, match="another coordinator"):
            old.run(second._id, first.term, number + 5, [], None)
        with pytest.raises(fastps.FencedError, match="another coordinator"):
            old.store(second._id, first.term, b"mine", None)
        second.leave()
        third = Vectors(store, ["a"], ["g"], space="s")
        assert third.found
        assert third.term > second.term
        third.leave()
    assert fastps.optimize.drop(store, "s")
    assert not fastps.optimize.drop(store, "s")
    store.push("a", np.ones(SHAPES["a"], dtype))


def test_programs_of_a_former_coordinator_do_not_answer_for_those_of_the_next(store):
    """The former one still runs programs after the next one has learnt the last number."""
    with Vectors(store, ["a"], ["g"], space="s") as first:
        first.run(first.zero("g"))
        first._native.leave(first._id, first.term, None)  # its lease has ended
        with Vectors(store, ["a"], ["g"], space="s") as second:
            for _ in range(3):
                assert first.run(first.dot("w", "w"))[0] > 0
            for _ in range(5):
                assert second.run(second.dot("g", "g")) == (0.0,)


def test_a_fenced_coordinator_does_not_close_the_space_of_the_next(store):
    first = Vectors(store, ["a"], ["g"], space="s")
    first._native.leave(first._id, first.term, None)  # its lease has ended
    with Vectors(store, ["a"], ["g"], space="s") as second:
        second.run(second.copy("g", "w"))
        second.save("kept")
        with first:  # it has not noticed
            pass
        assert second.run(second.dot("g", "g"))[0] > 0
        second.leave()
    with Vectors(store, ["a"], ["g"], space="s") as third:
        assert third.stored == "kept"
    assert not fastps.optimize.drop(store, "s")


@pytest.mark.parametrize("dtype", [np.float32])
def test_what_cannot_have_vectors_is_refused_by_name(store):
    store.register("h", np.zeros(3, np.float32), fastps.SGD(lr=1.0), apply="hogwild")
    store.register("wide", np.zeros(3), fastps.SGD(lr=1.0))
    for names, vectors, error, match in [
        (["a", "none"], ["g"], fastps.UnknownTensorError, "none"),
        (["a", "h"], ["g"], fastps.ConfigError, 'hogwild.*"h"'),
        (["a", "wide"], ["g"], fastps.DTypeError, 'one dtype.*"wide".*: expected float32, got float64'),
        (["a", "a"], ["g"], fastps.ConfigError, 'twice.*"a"'),
        ("ab", ["g"], fastps.ConfigError, "invalid names: expected a list of names, got 'ab'"),
        (["a"], "gh", fastps.ConfigError, "invalid vectors: expected a list of names, got 'gh'"),
        ([], ["g"], fastps.ConfigError, "without tensors"),
        (["a"], [], fastps.ConfigError, "1 to 64 vectors"),
        (["a"], ["w"], fastps.ConfigError, "different names"),
        (["a"], ["g", "g"], fastps.ConfigError, "different names"),
        (["a"], [str(k) for k in range(65)], fastps.ConfigError, "1 to 64 vectors"),
    ]:
        with pytest.raises(error, match=match):
            Vectors(store, names, vectors, space="s")
    # Nothing is left over each tensor.
    store.push("a", np.zeros(SHAPES["a"], np.float32))
    with Vectors(store, ["a"], ["g"], space="s"):
        pass


def test_vectors_count_against_the_memory_limit():
    with fastps.Store(memory_limit=6_000_000) as store:
        for name in ("x", "y"):
            store.register(name, np.zeros(SLICE, np.float32), fastps.SGD(lr=1.0))
        used = lambda: store.stats()["shards"][0]["counters"]  # noqa: E731
        before = used()["memory_used"]
        with pytest.raises(fastps.CapacityError, match="memory is full"):
            Vectors(store, ["x", "y"], ["g"], space="s")
        assert used()["memory_used"] == before
        assert used()["memory_vectors"] == 0
        store.push("x", np.ones(SLICE, np.float32))
        with Vectors(store, ["x"], ["g"], space="s"):
            assert used()["memory_vectors"] >= 4 * SLICE
        assert used()["memory_used"] == before


def test_replicas_and_a_coordinator_meet(store, v):
    """The calls under `Replica` and `minimize`, from one thread."""
    replica = VectorSpaces(store._native)
    ask = lambda report=None, then="take", wait=0.0: replica.portion(  # noqa: E731
        "mine", 1, "r", report, then, wait, None
    )
    assert replica.portion("not open yet", 1, "r", None, "take", 0.01, None) is None
    assert ask() is None
    v.run(v.copy("p", "w"), v.begin_sum(1, 2, largest=10.0))
    task = {"vector": "p", "portions": 2, "samples": 10}
    report = v.batch(1, 2, **task, wait=0.0)
    assert (report.over, report.replicas, report.finished) == (False, 1, [None, None])
    given = ask()
    for k in range(2):
        space, tensors, (batch, *_), portion, likely = given
        assert (tensors, batch, portion) == (list(SHAPES), 1, k)
        assert likely == (1 if k == 0 else 0)
        point = replica.pull(space, tensors, 2, batch, None, None)
        assert replica.push_portion(space, batch, portion, point, None) == ("added", "")
        given = ask((batch, portion, 0.5 + k, None, ""), "take" if k == 0 else "rest")
    report = v.batch(1, 2, **task, wait=10.0)
    assert (report.over, report.finished) == (True, [(0.5, "r"), (1.5, "r")])
    v.run(v.end_sum("g"), v.combine("q", {"g": 1.0, "w": -2.0}))
    # The magnitude given is 10: a quantum is 2^-57, and each portion is rounded to it.
    assert v.run(v.max_abs("q"))[0] <= 2.0**-57
    v.run(v.begin_sum(2, 2, largest=10.0))
    v.batch(2, 2, **task, wait=0.0)
    assert ask()[3] == 0
    ask((2, 0, math.nan, "not_finite", "a"), "leave")
    report = v.batch(2, 2, **task, wait=10.0)
    assert (report.over, report.failures) == (True, [("r", 0, "not_finite", "a")])
    with pytest.raises(fastps.StalePush, match="later batch"):
        v.batch(1, 2, **task, wait=0.0)
    for bad in ({"portions": 0}, {"portions": 11}, {"samples": 0}, {"min_replicas": 0}):
        with pytest.raises(fastps.ConfigError, match="of a batch"):
            v.batch(3, 2, **{**task, **bad}, wait=0.0)
