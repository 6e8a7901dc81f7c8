"""Sparse pushes and pulls: against a dictionary of rows, against torch, and refused input.

`python tests/store/test_sparse.py` prints a digest per case, on the instruction set in `FASTPS_ISA`.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import fastps
from instruction_sets import ISAS, printed_on
from reference_optim import F32, Adagrad, Array, Ftrl, Reference, add

SLICE = 63 * 4096
Indices = NDArray[np.int64]


class SparseSGD(Reference):
    def update(self, p: Array, g: Array, lr: float) -> Array:
        return add(p, g, -lr)


class SparseAdam(Reference):
    """Written from torch's `sparse_adam` in `torch/optim/_functional.py`."""

    names = ("exp_avg", "exp_avg_sq")

    def __init__(self, lr: float, betas: tuple[float, float], eps: float, *, maximize: bool = False) -> None:
        super().__init__(lr, 0, maximize)
        self.betas, self.eps = betas, eps

    def update(self, p: Array, g: Array, lr: float) -> Array:
        beta1, beta2 = self.betas
        mean, square = self.state["exp_avg"], self.state["exp_avg_sq"]
        mean = mean + (g - mean) * F32(1 - beta1)
        square = square + (g * g - square) * F32(1 - beta2)
        self.state = {"exp_avg": mean, "exp_avg_sq": square}
        size = lr * math.sqrt(1 - beta2**self.steps) / (1 - beta1**self.steps)
        return p + F32(-size) * (mean / (np.sqrt(square) + F32(self.eps)))


# The registered optimizer, and the rule of one step.
RULES: list[tuple[fastps.Optimizer, Callable[[], Reference]]] = [
    (fastps.SGD(lr=0.3), lambda: SparseSGD(0.3, 0, False)),
    (fastps.SGD(lr=0.1, maximize=True), lambda: SparseSGD(0.1, 0, True)),
    (fastps.Adagrad(lr=0.5, lr_decay=0.2), lambda: Adagrad(0.5, 0.2)),
    (fastps.Adam(lr=0.1, betas=(0.8, 0.99)), lambda: SparseAdam(0.1, (0.8, 0.99), 1e-8)),
    (
        fastps.AdamW(lr=0.1, weight_decay=0.0, maximize=True),
        lambda: SparseAdam(0.1, (0.9, 0.999), 1e-8, maximize=True),
    ),
    (fastps.Ftrl(lr=0.2, beta=0.5, l1=0.3, l2=0.1), lambda: Ftrl(0.2, 0.5, 0.3, 0.1)),
]
IDS = ["sgd", "sgd-max", "adagrad", "adam", "adamw-max", "ftrl"]
# One slice; rows that straddle borders; elements of a flat tensor; one row over several slices; small rows
# of several dimensions; rows of no elements.
SHAPES: list[tuple[int, ...]] = [
    (1000, 3),
    (3 * SLICE // 1000 + 5, 1000),
    (2 * SLICE + 7,),
    (2, SLICE + 3),
    (7, 5, 4),
    (4, 0),
]


class Rows:
    """A dictionary of rows: what was never touched is not there. Each slice counts its own steps."""

    def __init__(self, initial: Array, rule: Callable[[], Reference]) -> None:
        self.width = int(np.prod(initial.shape[1:], dtype=np.int64))
        self.initial = initial.reshape(len(initial), self.width)
        self.rule = rule
        self.rows: dict[int, Array] = {}
        self.state: dict[int, dict[str, Array]] = {}
        self.steps: dict[int, int] = {}

    def push(self, indices: Sequence[int], values: Array, **how: float) -> None:
        summed: dict[int, Array] = {}
        for index, value in zip(indices, values.reshape(len(indices), self.width), strict=True):
            summed[int(index)] = summed[int(index)] + value if int(index) in summed else value.copy()
        touched = set()
        for row, gradient in sorted(summed.items()):
            p = self.rows.setdefault(row, self.initial[row].copy())
            for start, end in self.pieces(row):
                k = (row * self.width + start) // SLICE
                touched.add(k)
                rule = self.rule()
                rule.steps = self.steps.get(k, 0)
                piece = p[start:end]
                state = self.state.setdefault(row, rule.initial(p))
                rule.state = {name: x[start:end] for name, x in state.items()}
                rule.step(piece, gradient[start:end], **how)
                for name, x in rule.state.items():
                    state[name][start:end] = x
        for k in touched:
            self.steps[k] = self.steps.get(k, 0) + 1

    def pieces(self, row: int) -> list[tuple[int, int]]:
        begin, end = row * self.width, (row + 1) * self.width
        cuts = [begin, *range(begin // SLICE * SLICE + SLICE, end, SLICE), end]
        return [(a - begin, b - begin) for a, b in itertools.pairwise(cuts) if a < b]

    def pull(self) -> Array:
        values = self.initial.copy()
        for row, p in self.rows.items():
            values[row] = p
        return values


def draw(rng: np.random.Generator, shape: tuple[int, ...]) -> tuple[Indices, Array]:
    """Rows in any order, with repeats, around borders of slices and at both ends; sometimes none."""
    n = int(rng.choice([0, 1, 2, 17, 300]))
    width = max(1, int(np.prod(shape[1:], dtype=np.int64)))
    if width > 10000:
        n = min(n, 3)
    near = [b // width + d for b in range(0, shape[0] * width + 1, SLICE) for d in (-1, 0, 1)]
    near = [row for row in [*near, 0, shape[0] - 1] if 0 <= row < shape[0]]
    spread = rng.integers(0, shape[0], n)
    indices = np.where(rng.random(n) < 0.3, rng.choice(near, n), spread)
    if n and rng.random() < 0.5:
        indices = rng.choice(indices, n)
    values = rng.standard_normal((n, *shape[1:]), np.float32) * F32(10.0 ** rng.uniform(-3, 3))
    return indices, values


def pushes(seed: int, shape: tuple[int, ...], count: int = 5) -> list[tuple[Indices, Array, dict[str, Any]]]:
    rng = np.random.default_rng([11, seed])
    how: list[dict[str, Any]] = [{}, {"lr": 0.25}, {"scale": 0.3}]
    return [(*draw(rng, shape), how[int(rng.integers(len(how)))]) for _ in range(count)]


def initial(shape: tuple[int, ...]) -> Array:
    return np.random.default_rng(3).standard_normal(shape, np.float32)


def trained(
    ps: fastps.ParameterServer, name: str, case: int, apply: str, codec: Any = None
) -> dict[str, Array]:
    """Values and state after some sparse pushes, one dense one, and an exact repeat of what was pulled."""
    (optimizer, _), shape = RULES[case % len(RULES)], SHAPES[case % len(SHAPES)]
    ps.register(name, initial(shape), optimizer=optimizer, apply=apply)
    for indices, values, how in pushes(case, shape):
        ps.push(name, fastps.Sparse(indices, values), codec=codec, **how)
    ps.push(name, initial(shape))
    for indices, values, how in pushes(case + 100, shape, 2):
        ps.push(name, fastps.Sparse(indices.tolist(), values), codec=codec, **how)
    state = {slot: np.asarray(x) for slot, x in ps.state(name).items()}
    steps = state.pop("step").astype(np.float32)
    return {"values": ps.pull(name), "steps": steps, **state}


def digest(result: dict[str, Array]) -> str:
    sha = hashlib.sha256()
    for name, x in sorted(result.items()):
        sha.update(f"{name}:{x.shape}".encode())
        sha.update(np.ascontiguousarray(x).tobytes())
    return sha.hexdigest()


CASES = range(len(RULES) * 2 + 1)


def codec_of(case: int) -> Any:
    return [None, fastps.BFloat16(), fastps.Int8(), fastps.Int8(stochastic=True, seed=7)][case % 4]


def all_digests(make: Callable[[int], dict[str, Array]] | None = None) -> dict[str, str]:
    with fastps.Store() as store:
        applied = ["exact", "hogwild"]
        local = make or (lambda case: trained(store, f"w{case}", case, applied[case % 2], codec_of(case)))
        return {str(case): digest(local(case)) for case in CASES}


@pytest.mark.parametrize("apply", ["exact", "hogwild"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("optimizer", "rule"), RULES, ids=IDS)
def test_equals_a_dictionary_of_rows(
    store: fastps.Store,
    optimizer: fastps.Optimizer,
    rule: Callable[[], Reference],
    shape: tuple[int, ...],
    apply: str,
) -> None:
    store.register("w", initial(shape), optimizer=optimizer, apply=apply)
    model = Rows(initial(shape), rule)
    for indices, values, how in pushes(len(shape) * shape[0], shape):
        receipt = store.push("w", fastps.Sparse(indices, values), **how)
        model.push(indices, values, **how)
        assert receipt.duplicate is False
        assert receipt.version == (0 if values.size == 0 else receipt.version)
        asked = indices[::-1]
        expected = model.pull()[asked].reshape(len(asked), *shape[1:])
        assert store.pull("w", indices=asked).tobytes() == expected.tobytes()
    assert store.pull("w").tobytes() == model.pull().tobytes()
    state = store.state("w")
    assert state.pop("step").tolist() == [
        model.steps.get(k, 0) for k in range(len(store.versions("w").slices("w")))
    ]
    for slot, x in state.items():
        for row, of_row in model.state.items():
            assert np.asarray(x).reshape(model.initial.shape)[row].tobytes() == of_row[slot].tobytes()


@pytest.mark.parametrize("isa", ISAS)
def test_every_instruction_set_gives_the_same_bits(isa: str) -> None:
    assert printed_on(isa, __file__) == all_digests()


@pytest.mark.parametrize("shards", [1, 2, 5])
def test_every_number_of_shards_gives_the_same_bits(shards: int) -> None:
    with fastps.serve(shards=shards) as server, fastps.connect(server.addresses) as ps:
        remote = lambda case: trained(ps, f"w{case}", case, ["hogwild", "exact"][case % 2], codec_of(case))  # noqa: E731
        # Stochastic rounding counts a client's pushes.
        assert {k: v for k, v in all_digests(remote).items() if int(k) % 4 != 3} == {
            k: v for k, v in all_digests().items() if int(k) % 4 != 3
        }


def test_what_travels_in_many_messages(ps: fastps.ParameterServer, rng: np.random.Generator) -> None:
    shape = (40000, 64)
    ps.register("w", np.zeros(shape, np.float32), optimizer=fastps.SGD(lr=1.0))
    indices = rng.permutation(np.repeat(np.arange(0, 40000, 2), 2))
    values = rng.integers(-8, 8, (indices.size, 64)).astype(np.float32)
    before = ps.versions("w")
    receipt = ps.push({"w": fastps.Sparse(indices, values)}, based_on=before)["w"]
    assert (receipt.version, receipt.staleness, receipt.duplicate) == (2, 0, False)
    expected = np.zeros(shape, np.float32)
    np.subtract.at(expected, indices, values)
    assert ps.pull("w").tobytes() == expected.tobytes()
    rows = rng.integers(0, 40000, 30000).astype(np.uint16)
    out = np.empty((30000, 64), np.float32)
    values, versions = ps.pull("w", indices=rows, out=out, versions=True)
    assert values is out
    assert out.tobytes() == expected[rows].tobytes()
    assert set(versions.slices("w")) == {2}
    one = fastps.Sparse([39999], np.ones((1, 64), np.float32))
    assert ps.push("w", one, based_on=versions).staleness == 0


def test_every_element_of_a_slice(ps: fastps.ParameterServer, rng: np.random.Generator) -> None:
    """The largest possible part, beside a small one."""
    n = SLICE + 3
    ps.register("w", np.zeros(n, np.float32), optimizer=fastps.SGD(lr=1.0))
    gradient = rng.integers(-8, 8, n).astype(np.float32)
    ps.push("w", fastps.Sparse(np.arange(n), gradient))
    ps.push("w", fastps.Sparse(np.arange(n), gradient), codec=fastps.BFloat16())
    assert np.array_equal(ps.pull("w", indices=np.arange(n)), -2 * gradient)


def test_dense_and_sparse_in_one_push(ps: fastps.ParameterServer) -> None:
    ps.register("dense", np.zeros(3, np.float32), optimizer=fastps.Adam(lr=0.5))
    ps.register("table", np.zeros((5, 2), np.float32), optimizer=fastps.Adagrad(lr=0.5))
    ps.register("rest", np.zeros(2, np.float32), optimizer=fastps.SGD(lr=0.5))
    table = fastps.Sparse(np.array([4, 1], np.int32), np.ones((2, 2), np.float32))
    for codec in (None, fastps.Int8()):
        grads = {"dense": np.ones(3, np.float32), "table": table, "rest": np.ones(2, np.float32)}
        receipts = ps.push_async(grads, codec=codec).result(timeout=30)
        assert sorted(receipts) == ["dense", "rest", "table"]
    assert ps.pull("rest").tolist() == [-1, -1]
    got = ps.pull(["rest", "table"], indices={"table": [1, 1, 0], "rest": [0]})
    assert got["table"].tolist()[0] == got["table"].tolist()[1] != [0, 0]
    assert got["table"].tolist()[2] == [0, 0]
    assert got["rest"].tolist() == [-1]


def test_a_push_of_no_rows_changes_nothing(ps: fastps.ParameterServer) -> None:
    ps.register("w", np.ones((3, 2), np.float32), optimizer=fastps.Adagrad())
    receipt = ps.push("w", fastps.Sparse([], np.empty((0, 2), np.float32)))
    assert receipt == fastps.Receipt(0, None, False, 1.0)
    assert ps.pull("w", indices=[]).shape == (0, 2)
    assert ps.versions("w")["w"] == 1


BAD: list[tuple[Any, type[fastps.FastpsError], str]] = [
    ([0, 3], fastps.ShapeError, "out of range"),
    ([-1, 0], fastps.ShapeError, "out of range"),
    ([2**62, 0], fastps.ShapeError, "out of range"),
    (np.array([0, 2**64 - 1], np.uint64), fastps.ShapeError, f"index 1 is out of range.*got {2**64 - 1}"),
    ([0.0, 1.0], fastps.DTypeError, "integers"),
    ([True, False], fastps.DTypeError, "integers"),
    (["0", "1"], fastps.DTypeError, "integers"),
    ([2**70, 0], fastps.DTypeError, "integers"),
    ([[0, 1]], fastps.ShapeError, "one dimension"),
    (5, fastps.ShapeError, "one dimension"),
]


@pytest.mark.parametrize(("indices", "error", "text"), BAD, ids=lambda x: str(x)[:20])
def test_bad_indices_change_nothing(
    ps: fastps.ParameterServer, indices: Any, error: type[fastps.FastpsError], text: str
) -> None:
    ps.register("w", np.zeros((3, 2), np.float32), optimizer=fastps.SGD(lr=1.0))
    ps.register("other", np.zeros(1, np.float32), optimizer=fastps.SGD(lr=1.0))
    sparse = fastps.Sparse(indices, np.ones((2, 2), np.float32))
    with pytest.raises(error, match=text) as raised:
        ps.push({"other": np.ones(1, np.float32), "w": sparse})
    assert raised.value.tensor == "w"
    with pytest.raises(error, match=text) as raised:
        ps.pull("w", indices=indices)
    assert raised.value.tensor == "w"
    assert not ps.pull("w").any()
    assert not ps.pull("other").any()


def test_bad_values_change_nothing(ps: fastps.ParameterServer) -> None:
    ps.register("w", np.zeros((3, 2), np.float32), optimizer=fastps.SGD(lr=1.0))
    ps.register("scalar", np.float32(0), optimizer=fastps.SGD(lr=1.0))
    huge = np.full((2, 2), 3e38, np.float32)
    for indices, values, error in [
        ([0, 1], np.full((2, 2), np.nan, np.float32), fastps.NonFiniteError),
        ([1, 1], huge, fastps.NonFiniteError),
        ([0, 1], np.ones((2, 3), np.float32), fastps.ShapeError),
        ([0, 1], np.ones(4, np.float32), fastps.ShapeError),
        ([0], np.ones((2, 2), np.float32), fastps.ShapeError),
        ([0, 1], np.ones((2, 2)), fastps.DTypeError),
    ]:
        with pytest.raises(error) as raised:
            ps.push("w", fastps.Sparse(indices, values))
        assert raised.value.tensor == "w"
    with pytest.raises(fastps.ShapeError, match="scalar"):
        ps.push("scalar", fastps.Sparse([0], np.ones(1, np.float32)))
    with pytest.raises(fastps.ShapeError):
        ps.pull("w", indices=[0], out=np.empty((2, 2), np.float32))
    assert not ps.pull("w").any()


@pytest.mark.parametrize(
    ("optimizer", "why"),
    [
        (fastps.SGD(momentum=0.9), "momentum"),
        (fastps.SGD(weight_decay=0.1), "weight_decay"),
        (fastps.Adagrad(weight_decay=0.1), "weight_decay"),
        (fastps.Adam(amsgrad=True), "amsgrad"),
        (fastps.Adam(weight_decay=0.1), "weight_decay"),
        (fastps.AdamW(), "weight_decay"),
        (fastps.RMSprop(), "decay in every row"),
        (fastps.Adadelta(), "decay in every row"),
    ],
    ids=str,
)
def test_other_optimizers_say_why_not(
    ps: fastps.ParameterServer, optimizer: fastps.Optimizer, why: str
) -> None:
    ps.register("w", np.zeros((3, 2), np.float32), optimizer=optimizer)
    with pytest.raises(fastps.ConfigError, match=why) as raised:
        ps.push("w", fastps.Sparse([0], np.ones((1, 2), np.float32)))
    assert raised.value.tensor == "w"
    assert ps.pull("w", indices=[2, 0]).tolist() == [[0, 0], [0, 0]]
    ps.push("w", np.zeros((3, 2), np.float32))


def test_where_a_sparse_gradient_has_no_place(ps: fastps.ParameterServer) -> None:
    ps.register("w", np.zeros((3, 2), np.float32), optimizer=fastps.SGD())
    sparse = fastps.Sparse([0, 1, 2], np.ones((3, 2), np.float32))
    with pytest.raises(fastps.ConfigError, match="OneBit"):
        ps.push("w", sparse, codec=fastps.OneBit())
    for call in (ps.bind, ps.push_pull):
        with pytest.raises(fastps.ConfigError, match="sparse"):
            call({"w": sparse})
    with pytest.raises(fastps.DTypeError):
        ps.register("v", sparse, optimizer=fastps.SGD())
    with pytest.raises(fastps.ConfigError, match="indices"):
        ps.pull(["w"], indices={"v": [0]})


def test_pulls_of_rows_pin_nothing(store: fastps.Store) -> None:
    store.register("w", np.zeros((100, 10), np.float32), optimizer=fastps.Adagrad())
    for k in range(50):
        store.pull("w", indices=[k, 99 - k])
        store.push("w", fastps.Sparse([k], np.ones((1, 10), np.float32)))
    assert store.stats()["shards"][0]["counters"]["slice_copies"] == 0


@pytest.mark.parametrize("apply", ["exact", "hogwild"])
def test_many_clients_at_once(server: fastps.Server, apply: str) -> None:
    """Each has its own rows in the same slices: nothing is lost, in either kind of memory."""
    shape, steps = (3000, 250), 30

    def work(client: int) -> None:
        with fastps.connect(server.addresses, timeout=60) as ps:
            rows = np.arange(client, 3000, 4)
            for _ in range(steps):
                ps.push("w", fastps.Sparse(rows, np.ones((rows.size, 250), np.float32)))
                ps.pull("w", indices=rows)

    with fastps.connect(server.addresses) as ps:
        ps.register("w", np.zeros(shape, np.float32), optimizer=fastps.SGD(lr=1.0), apply=apply)
        threads = [threading.Thread(target=work, args=(k,), daemon=True) for k in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=100)
        assert (ps.pull("w") == -steps).all()


TORCH: list[tuple[fastps.Optimizer, Callable[[Any, Any], Any]]] = [
    (fastps.Adam(lr=0.1, betas=(0.8, 0.99)), lambda o, p: o.SparseAdam([p], lr=0.1, betas=(0.8, 0.99))),
    (fastps.SGD(lr=0.3), lambda o, p: o.SGD([p], lr=0.3, foreach=False)),
    (fastps.Adagrad(lr=0.3, lr_decay=0.1), lambda o, p: o.Adagrad([p], lr=0.3, lr_decay=0.1, foreach=False)),
]


@pytest.mark.parametrize(("optimizer", "make"), TORCH, ids=["SparseAdam", "SGD", "Adagrad"])
def test_follows_torchs_sparse_optimizers(
    store: fastps.Store, optimizer: fastps.Optimizer, make: Any
) -> None:
    """Ten steps of a tensor of one slice; at most some units in the last place each, as with dense ones."""
    torch = pytest.importorskip("torch")
    shape = (500, 8)
    p = torch.nn.Parameter(torch.tensor(initial(shape)))
    theirs = make(torch.optim, p)
    store.register("w", initial(shape), optimizer=optimizer)
    rng = np.random.default_rng(6)
    for _ in range(10):
        indices = rng.integers(0, 500, 60)
        values = rng.standard_normal((60, 8), np.float32)
        store.push("w", fastps.Sparse(torch.tensor(indices), torch.tensor(values)))
        with torch.sparse.check_sparse_tensor_invariants():
            p.grad = torch.sparse_coo_tensor(torch.tensor(indices)[None], torch.tensor(values), shape)
            theirs.step()
        np.testing.assert_allclose(store.pull("w"), p.detach().numpy(), rtol=2e-6, atol=2e-6)


if __name__ == "__main__":
    json.dump(all_digests(), sys.stdout)


def test_a_partial_push_has_a_receipt_for_a_gradient_without_rows(ps):
    """As a push has that was applied completely."""
    for name, shape in (("rows", (4, 2)), ("w", (3,)), ("late", (3,))):
        ps.register(name, np.zeros(shape, np.float32), optimizer=fastps.SGD(lr=1.0))
    base = ps.versions()
    ones = np.ones(3, np.float32)
    with fastps.Worker(ps, {"late": ones}, mode=fastps.Async()) as other:
        other.step({"late": ones})
    reject = fastps.Async(max_staleness=0, on_stale="reject")
    settings = fastps._fastps.PushSettings(None, None, None, base, None, reject.correction)
    none = fastps.Sparse(np.zeros(0, np.int64), np.zeros((0, 2), np.float32))
    with pytest.raises(fastps.PartialPush) as caught:
        ps._native.push({"rows": none, "w": ones, "late": ones}, None, settings)
    receipts = caught.value.receipts
    assert {name: (r.version, r.scale) for name, r in receipts.items()} == {"rows": (0, 1.0), "w": (2, 1.0)}
    assert isinstance(caught.value.error, fastps.StalePush)
