"""`fastps.torch.Encoded`: gradients that are encoded already are pushed as they are."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import fastps
from fastps.torch import Encoded, encode

CODECS = [fastps.Float32(), fastps.BFloat16(), fastps.Int8(), fastps.OneBit()]
#: Of three slices, the last one with pad bits; and small ones.
SHAPES = {"big": (2 * encode.SLICE + 1027,), "matrix": (3, 5), "scalar": (), "none": (0,)}


def register(ps, shapes=SHAPES):
    for name, shape in shapes.items():
        ps.register(name, np.zeros(shape, np.float32), optimizer=fastps.SGD(lr=1.0))


def encoded(codec, grads):
    if isinstance(codec, fastps.Float32):
        bodies = {name: torch.from_numpy(grad.reshape(-1).view(np.uint8)) for name, grad in grads.items()}
    else:
        bodies = encode.encode(codec, {name: torch.from_numpy(grad) for name, grad in grads.items()})
    return {name: Encoded(codec, body, grads[name].shape) for name, body in bodies.items()}


def gradients(rng):
    return {name: np.asarray(rng.standard_normal(shape), np.float32) for name, shape in SHAPES.items()}


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_the_values_are_those_that_the_body_says(ps, codec, rng):
    register(ps)
    grads = gradients(rng)
    expected = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
    made = encoded(codec, grads)
    bound = ps.bind(made)

    def check(receipts):
        for name, one in made.items():
            expected[name] -= np.asarray(one)
            np.testing.assert_array_equal(ps.pull(name), expected[name])
            assert one.nbytes == encode.body_len(codec, grads[name].size)
        assert receipts.bytes == sum(one.nbytes for one in made.values())

    check(ps.push(made))
    check(ps.push(made, codec=fastps.BFloat16()))  # which is that of the others
    check(ps.push_async(made).result())
    check(ps.push_pull(made).receipts)
    check(ps.push(bound))
    for name, one in made.items():
        assert ps.push(name, one).version == 7
        expected[name] -= np.asarray(one)
    for name, again in encoded(codec, gradients(rng)).items():  # the same memory, filled again
        made[name].body.copy_(again.body)
    check(ps.push(bound))


def test_a_list_mixes_all_kinds(ps):
    register(ps, {"encoded": (70,), "whole": (70,), "rows": (70,)})
    ps.register("double", np.zeros(3), optimizer=fastps.SGD(lr=1.0))
    ones = np.ones(70, np.float32)
    some = {**encoded(fastps.Int8(), {"encoded": ones}), "whole": ones, "double": np.ones(3)}
    for _ in range(2):
        ps.push(some)
        some["rows"] = fastps.Sparse([3], ones[:1])
    ps.push({name: some[name] for name in ("encoded", "whole", "rows")}, codec=fastps.BFloat16())
    assert {name: ps.pull(name).sum() for name in some} == {
        "encoded": -210,
        "whole": -210,
        "double": -6,
        "rows": -2,
    }


def wrong(codec, body, shape=(70,)):
    return Encoded(codec, torch.tensor(body, dtype=torch.uint8), shape)


INT8 = [127, 127, *[64] * 70]
REFUSED = {
    "too short": (wrong(fastps.Int8(), INT8[:-1]), fastps.FrameError, "72 bytes, got 71 bytes"),
    "too long": (wrong(fastps.Int8(), [*INT8, 0]), fastps.FrameError, "72 bytes, got 73 bytes"),
    "a forbidden scale": (wrong(fastps.Int8(), [127, 31, *INT8[2:]]), fastps.FrameError, "scale"),
    "-128": (wrong(fastps.Int8(), [*INT8[:-1], 128]), fastps.FrameError, "-128"),
    "of another codec": (wrong(fastps.BFloat16(), INT8), fastps.FrameError, "140 bytes, got 72 bytes"),
    "bfloat16 as int8": (wrong(fastps.Int8(), [0, 64] * 36), fastps.FrameError, "int8"),
    "not finite": (wrong(fastps.BFloat16(), [128, 127] * 70), fastps.NonFiniteError, "finite"),
    "a pad bit": (wrong(fastps.OneBit(), [0] * 16 + [128]), fastps.FrameError, "pad bits"),
    "of another shape": (wrong(fastps.Int8(), INT8, (7, 10)), fastps.ShapeError, r"\(70,\)"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_body_of_the_tensor_is_refused(ps, case):
    bad, kind, text = REFUSED[case]
    register(ps, {"a": (2,), "w": (70,)})
    grads = {"a": np.ones(2, np.float32), "w": bad}
    with fastps.Worker(ps, ps.pull(list(grads)), codec=fastps.Int8()) as worker:
        for push in (
            lambda: ps.push(grads),
            lambda: ps.push_async(grads, codec=fastps.Int8()),
            lambda: ps.push_pull(grads),
            lambda: ps.push("w", bad),
            lambda: worker.step(grads),
        ):
            with pytest.raises(kind, match=text) as refused:
                push()
            assert refused.value.tensor == "w"
        worker.step({"a": grads["a"], "w": wrong(fastps.Int8(), INT8)})  # the refused ones have left nothing
    assert [ps.pull(name).sum() for name in grads] == [-2, -70 * 64 / 64]


def test_a_body_that_was_bound_is_checked_at_each_push(ps):
    register(ps, {"w": (70,)})
    one = wrong(fastps.Int8(), INT8)
    bound = ps.bind({"w": one})
    one.body[0] = 31
    with pytest.raises(fastps.FrameError, match="scale"):
        ps.push(bound)
    one.body[0] = 127
    assert ps.push(bound)["w"].version == 2


def test_arguments_are_checked(store):
    for codec, body in ((None, torch.zeros(1)), ("int8", torch.zeros(2, dtype=torch.uint8))):
        with pytest.raises(fastps.ConfigError, match="invalid codec"):
            Encoded(codec, body, (1,))
    for body in (torch.zeros(2), torch.zeros(2, 1, dtype=torch.uint8), b"12"):
        with pytest.raises(fastps.DTypeError, match="uint8"):
            Encoded(fastps.Int8(), body, (1,))
    store.register("double", np.zeros(1), optimizer=fastps.SGD(lr=1.0))
    with pytest.raises(fastps.DTypeError, match="float64"):
        store.push("double", wrong(fastps.BFloat16(), [0, 0], (1,)))
    register(store, {"w": (1,)})
    worker = fastps.Worker(store, store.pull(["w"]), mode=fastps.Local(push_every=2, lr=0.1))
    with worker, pytest.raises(fastps.DTypeError, match=r"w.*Encoded"):
        worker.step({"w": wrong(fastps.BFloat16(), [0, 0], (1,))})


@pytest.mark.parametrize("codec", [None, fastps.Int8()], ids=str)
@pytest.mark.parametrize(
    "mode", [fastps.Async(), fastps.Async(overlap=True), fastps.Sync(workers=1)], ids=str
)
def test_a_worker_pushes_bodies_whatever_its_codec(ps, codec, mode, rng):
    register(ps, {"a": (300,), "b": (300,)})
    given = dict.fromkeys("ab", 0.0)
    with fastps.Worker(ps, ps.pull(["a", "b"]), mode, codec) as worker:
        for _ in range(6):
            grads = {name: rng.standard_normal(300, dtype=np.float32) for name in "ab"}
            some = encoded(fastps.OneBit(), grads)
            for name, one in some.items():
                given[name] = given[name] + np.asarray(one)
            worker.step(some)
        worker.flush()
        for name in "ab":
            np.testing.assert_allclose(ps.pull(name), -given[name], rtol=1e-5, atol=1e-5)
        assert worker.stats()["bytes_pushed"] == 6 * 2 * encode.body_len(fastps.OneBit(), 300)
        assert worker.stats()["bytes_saved"] == 6 * 2 * 1200 - worker.stats()["bytes_pushed"]
