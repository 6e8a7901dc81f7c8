"""Refused calls: each error names the tensor, what was expected and what it got; nothing changes."""

import copy
import itertools
import pickle

import numpy as np
import pytest

import fastps
from cases import case


def f32(*values):
    return np.array(values, np.float32)


@pytest.fixture
def w(ps):
    ps.register("w", np.zeros((2, 3), np.float32), optimizer=fastps.SGD(lr=1.0))
    ps.register("b", np.zeros(3, np.float32), optimizer=fastps.SGD(lr=1.0))
    yield ps
    assert ps.versions(["b", "w"])["b"] == 1
    assert not ps.pull("w").any()


BAD = [
    (np.zeros((2, 3)), fastps.DTypeError, "float64"),
    (np.zeros((2, 3), np.float16), fastps.DTypeError, "float16"),
    (np.zeros((2, 3), np.int32), fastps.DTypeError, "int32"),
    (np.zeros((2, 3), ">f4"), fastps.DTypeError, "byte order"),
    (np.zeros((2, 3), object), fastps.DTypeError, "object"),
    (np.zeros((2, 3), "M8[s]"), fastps.DTypeError, "datetime64"),
    ([[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]], fastps.DTypeError, "list"),
    (0.0, fastps.DTypeError, "float"),
    ("text", fastps.DTypeError, "str"),
    (b"bytes", fastps.DTypeError, "bytes"),
    (np.zeros((2, 3), np.float32, order="F"), fastps.ShapeError, "column-major"),
    (np.zeros((2, 6), np.float32)[:, ::2], fastps.ShapeError, "strides"),
    (np.zeros((3, 2), np.float32), fastps.ShapeError, "(3, 2)"),
    (np.zeros(6, np.float32), fastps.ShapeError, "(6,)"),
    (np.float32(0), fastps.ShapeError, "()"),
]


def test_wrong_arrays(w):
    calls = {
        "push": lambda array: w.push("w", array),
        "push_async": lambda array: w.push_async("w", array).result(),
        "push_pull": lambda array: w.push_pull("w", array),
        "dict": lambda array: w.push({"b": np.zeros(3, np.float32), "w": array}),
        "bind": lambda array: w.bind({"w": array}),
        "assign": lambda array: w.assign("w", array),
    }
    for verb, (array, error, got) in itertools.product(calls, BAD):
        with case(verb, got):
            with pytest.raises(error) as caught:
                calls[verb](array)
            assert caught.value.tensor == "w"
            assert got in caught.value.got
            assert caught.value.expected
            assert "'w'" in str(caught.value) or '"w"' in str(caught.value)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_non_finite_names_tensor_and_index(w, value):
    bad = np.zeros((2, 3), np.float32)
    bad[1, 1] = value
    for call in (
        lambda: w.push("w", bad),
        lambda: w.push({"b": f32(1, 1, 1), "w": bad}),
        lambda: w.push_async({"b": f32(1, 1, 1), "w": bad}),
        lambda: w.push_pull({"b": f32(1, 1, 1), "w": bad}, codec=fastps.Int8()),
        lambda: w.register("new", bad, optimizer=fastps.SGD()),
    ):
        with pytest.raises(fastps.NonFiniteError, match="index 4"):
            call()
    assert w.names() == ["b", "w"]


def test_onebit_needs_error_feedback(w):
    for call in (
        lambda: w.push("w", np.zeros((2, 3), np.float32), codec=fastps.OneBit()),
        lambda: w.push_async({"b": f32(1, 1, 1)}, codec=fastps.OneBit()),
        lambda: w.push_pull({"b": f32(1, 1, 1)}, codec=fastps.OneBit()),
    ):
        with pytest.raises(fastps.ConfigError, match="feedback"):
            call()


def test_readable_text_and_attributes():
    error = fastps.UnknownTensorError("no tensor", tensor="w", shard=1)
    assert str(error) == 'no tensor (tensor "w", shard 1)'
    assert (error.message, error.advice) == ("no tensor", None)
    assert (error.tensor, error.shard, error.expected, error.got, error.retry_after) == (
        "w",
        1,
        None,
        None,
        None,
    )


TEXTS = [
    ({}, "x"),
    ({"tensor": "w"}, 'x (tensor "w")'),
    ({"tensor": 'a"\\\n'}, r'x (tensor "a\"\\\n")'),
    ({"tensor": "\N{GREEK SMALL LETTER LAMDA}"}, 'x (tensor "\N{GREEK SMALL LETTER LAMDA}")'),
    ({"shard": 0}, "x (shard 0)"),
    ({"tensor": "w", "expected": "a", "got": "b"}, 'x (tensor "w"): expected a, got b'),
    ({"expected": "a"}, "x"),
    ({"got": "b"}, "x"),
    ({"advice": "do y"}, "x; do y"),
    ({"retry_after": 0.25}, "x; try again in 250 ms"),
    (
        {
            "tensor": "w",
            "shard": 1,
            "expected": "a",
            "got": "b",
            "advice": "do y",
            "retry_after": 1.0,
        },
        'x (tensor "w", shard 1): expected a, got b; do y; try again in 1000 ms',
    ),
]


@pytest.mark.parametrize(("fields", "text"), TEXTS, ids=[text for _, text in TEXTS])
def test_the_text_is_composed_of_the_fields(fields, text):
    for kind in (fastps.ConfigError, fastps.UnknownTensorError, fastps.DeadlineError, fastps.VersionsLost):
        error = kind("x", **fields)
        assert str(error) == text
        for again in (error, copy.copy(error), copy.deepcopy(error), pickle.loads(pickle.dumps(error))):
            assert type(again) is kind
            assert (str(again), again.message) == (text, "x")
            assert {name: getattr(again, name) for name in fields} == fields


def test_the_text_of_a_partial_push_is_not_composed_again():
    refusal = fastps.UnavailableError("busy", tensor="w", shard=1, expected="a", got="b", retry_after=0.5)
    for error in (fastps.PartialPush(error=refusal), fastps.PartialPush(f"half: {refusal}", error=refusal)):
        for again in (error, copy.copy(error), pickle.loads(pickle.dumps(error))):
            assert str(again).removeprefix("half: ") == str(refusal)
            assert (again.tensor, again.shard, again.expected, again.got) == ("w", 1, "a", "b")
            assert (again.retry_after, str(again.error)) == (0.5, str(refusal))


def test_errors_with_more_arguments_can_be_copied():
    lost = fastps.VersionsLost("x", lost=[("w", 0, 3, 12, 9)], tensor="w")
    gradient = fastps.simulate.GradientError("bad", 1, 2, 0.5)
    deadlock = fastps.simulate.DeadlockError("all wait", {0: [1]}, 2.0)
    for error in (lost, gradient, deadlock):
        for again in (copy.copy(error), pickle.loads(pickle.dumps(error))):
            assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))


def test_an_error_of_the_core_has_the_text_of_its_fields(w):
    with pytest.raises(fastps.UnknownTensorError) as caught:
        w.pull('no "such"')
    error = caught.value
    assert (error.tensor, error.shard, error.got) == ('no "such"', None, r'"no \"such\""')
    assert str(error) == f"{error.message} (tensor {error.got}): expected {error.expected}, got {error.got}"
    with pytest.raises(fastps.ShapeError) as caught:
        w.push("w", np.zeros((3, 2), np.float32))
    error = caught.value
    assert error.message
    assert str(error) == f'{error.message} (tensor "w"): expected {error.expected}, got {error.got}'


def test_bases():
    bases = {
        "UnknownTensorError": KeyError,
        "ShapeError": ValueError,
        "DTypeError": TypeError,
        "NonFiniteError": ValueError,
        "FrameError": ValueError,
        "ConfigError": ValueError,
        "CapacityError": MemoryError,
        "PermissionDeniedError": PermissionError,
        "DeadlineError": TimeoutError,
        "ConnectionLostError": ConnectionError,
    }
    for name, base in bases.items():
        assert issubclass(getattr(fastps, name), base)
        assert issubclass(getattr(fastps, name), fastps.FastpsError)
    error = fastps.PartialPush("half", error=fastps.UnavailableError("gone", shard=2))
    assert (error.shard, error.receipts, error.in_doubt) == (2, {}, ())
    assert error.__cause__ is error.error


def test_servers_that_go_away(leaving):
    grads, (one, other) = leaving.grads, leaving.clients
    plain, onebit = one.bind(grads), other.bind(grads, codec=fastps.OneBit())
    leaving.stop()
    for call in (
        lambda: one.push("w", grads["w"]),
        lambda: one.push(plain),
        lambda: one.push_pull(grads, codec=fastps.Int8()),
        lambda: other.push(onebit),
        lambda: other.pull(grads),
        lambda: other.assign("w", grads["w"]),
    ):
        with pytest.raises(fastps.ConnectionLostError) as caught:
            call()
        leaving.check(caught.value)
    with pytest.raises(fastps.ConnectionLostError, match="if that server has stopped, start it again"):
        one.push("w", grads["w"], timeout=0.5)
    # A gradient that was never sent is in the residual, whole.
    for name, rest in onebit.feedback.state_dict().items():
        np.testing.assert_array_equal(rest, grads[name], name)


def test_what_is_no_text_is_named(ps):
    w = np.zeros(3, np.float32)
    half = fastps.SGD(lr=0.5)
    ps.register("text", w, half)
    calls = {
        "apply": lambda bad: ps.register("new", w, half, apply=bad),
        "group": lambda bad: ps.register("new", w, half, group=bad),
        "dtype": lambda bad: ps.register("new", w, half, dtype=bad),
        "rounding": lambda bad: ps.register("new", w, half, dtype="bfloat16", rounding=bad),
        "name": ps.mark,
        "note": lambda bad: ps.push("text", w, note=bad),
        "refuse_worker": lambda bad: fastps.serve(refuse_worker=[bad]),
    }
    for argument, call in calls.items():
        for bad in (3, np.float32, "\ud800"):
            with (
                case(argument, bad),
                pytest.raises(fastps.ConfigError, match=f"invalid {argument}: expected a str"),
            ):
                call(bad)
    with pytest.raises(fastps.ConfigError, match="invalid name: expected a str"):
        ps.register("\ud800", w, half)
    with pytest.raises(fastps.ConfigError, match="invalid refuse_worker: expected a str, or several"):
        fastps.serve(refuse_worker=3)
    with fastps.Worker(ps, {"text": w}, fastps.Async()) as worker:
        for bad in (3, "\ud800"):
            with pytest.raises(fastps.ConfigError, match="invalid note: expected a str"):
                worker.step({"text": w}, note=bad)
    assert ps.versions("text")["text"] == 1
    assert "new" not in ps.names()


def test_register_says_what_comes_where_and_what_is_missing(ps):
    w, sgd = f32(0, 0), fastps.SGD(lr=1.0)
    for arguments, text in (
        (
            (w, "w", sgd),
            "invalid name: expected a str, got ndarray; the name comes first: register(name, array,",
        ),
        (
            ({"w": w}, sgd),
            "a mapping has all arrays: expected register({name: array, ...}, optimizer=...)",
        ),
        (({"w": w, 3: w}, None, sgd), "invalid name: expected a str, got int"),
        (({"w": w},), "no optimizer"),
        (({"w": w, "v": w}, None, {"w": sgd}), "no optimizer"),
        (({"w": w}, None, {"w": sgd, "v": sgd}), "an optimizer is for no tensor of the call"),
        (("w", w), "fastps.SGD(lr=0.1)"),
    ):
        with case(text), pytest.raises(fastps.ConfigError) as caught:
            ps.register(*arguments)
        assert text in str(caught.value)
    assert ps.names() == []


NO_ARRAY = "an array with the name"
NO_NAME = "a tensor's name with the array"


@pytest.mark.parametrize("verb", ["push", "push_async", "push_pull"])
def test_a_name_comes_with_an_array_and_a_mapping_without(w, verb):
    array = np.zeros((2, 3), np.float32)
    bound = w.bind({"w": array})
    for arguments, tensor, expected, got in (
        (("w",), "w", NO_ARRAY, "None"),
        (("w", None), "w", NO_ARRAY, "None"),
        (({"w": array}, array), None, NO_NAME, "dict"),
        ((bound, array), None, NO_NAME, "Bound"),
        ((7, array), None, NO_NAME, "int"),
        ((7,), None, "a mapping of names to arrays", "int"),
    ):
        with pytest.raises(fastps.ConfigError) as caught:
            getattr(w, verb)(*arguments)
        error = caught.value
        assert (error.tensor, error.shard, error.expected, error.got) == (tensor, None, expected, got)
        assert expected in str(error)
