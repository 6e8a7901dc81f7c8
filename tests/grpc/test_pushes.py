"""Foreign bytes, native pushes and the in-process store agree bit for bit."""

from __future__ import annotations

import itertools
from typing import Any

import encoders
import numpy as np
import pytest
from encoders import FLOAT32, INT8, ONEBIT
from foreign_client import ForeignClient, Refused, slice_of
from samples import BIG, PLAIN, SHAPES, SMALL, Float32, FreshName, normal

import fastps
from cases import case

OPTIMIZERS: list[tuple[str, dict[str, float], Any]] = [
    ("sgd", {"lr": 0.5}, fastps.SGD(lr=0.5)),
    ("sgd", {"lr": 0.1, "momentum": 0.9, "nesterov": 1}, fastps.SGD(lr=0.1, momentum=0.9, nesterov=True)),
    ("adagrad", {"lr": 0.1}, fastps.Adagrad(lr=0.1)),
    ("adam", {"lr": 1e-3, "beta1": 0.8, "beta2": 0.99}, fastps.Adam(lr=1e-3, betas=(0.8, 0.99))),
]


def test_foreign_bytes_native_push_and_store_agree(
    foreign: ForeignClient, native: fastps.ParameterServer, fresh_name: FreshName
) -> None:
    for rule_of, codecs, shape in itertools.product(OPTIMIZERS, PLAIN, SHAPES):
        (rule, settings, optimizer), (codec, native_codec) = rule_of, codecs
        with case(optimizer, native_codec, shape):
            theirs, ours = fresh_name("theirs"), fresh_name("ours")
            initial = normal(shape, 4)
            foreign.register(foreign.spec(theirs, shape, rule, settings), initial)
            native.register(ours, initial, optimizer=optimizer)
            expected = initial.copy()
            with fastps.Store() as store:
                store.register("w", initial, optimizer=optimizer)
                for step in range(3):
                    gradient = normal(shape, 10 + step, scale=10.0 ** (step - 1))
                    foreign.push(theirs, gradient, codec)
                    native.push(ours, gradient, codec=native_codec)
                    store.push("w", gradient, codec=native_codec)
                    expected -= np.float32(0.5) * decoded_by_slice(codec, gradient)
                values, versions = foreign.pull(theirs)
                pulled = [native.pull(theirs), native.pull(ours), foreign.pull(ours)[0], store.pull("w")]
                assert [p.tobytes() for p in pulled] == [values.tobytes()] * 4
                assert versions == foreign.pull(ours)[1]
                # lr = 0.5 makes the product exact: plain NumPy says the same.
                assert settings != {"lr": 0.5} or values.tobytes() == expected.tobytes()
                assert all(step == 3 for step, _ in foreign.pull_state(theirs))
                states = [np.concatenate([s for _, s in foreign.pull_state(name)]) for name in (theirs, ours)]
                assert states[0].tobytes() == states[1].tobytes()


def decoded_by_slice(codec: int, gradient: Float32, **where: Any) -> Float32:
    """The values that a server decodes from the bodies of a gradient."""
    flat = gradient.reshape(-1)
    starts = range(0, max(flat.size, 1), encoders.SLICE_LEN)
    parts = [flat[start : start + encoders.SLICE_LEN] for start in starts]
    bodies = [encoders.encode(codec, p, first=s, **where) for p, s in zip(parts, starts, strict=True)]
    values = [encoders.decode(codec, b, p.size) for b, p in zip(bodies, parts, strict=True)]
    return np.concatenate(values).reshape(gradient.shape)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_onebit_with_error_feedback_agrees(
    foreign: ForeignClient, native: fastps.ParameterServer, fresh_name: FreshName, shape: tuple[int, ...]
) -> None:
    theirs, ours = fresh_name("theirs"), fresh_name("ours")
    initial = normal(shape, 5)
    foreign.register(foreign.spec(theirs, shape, "adam", {"lr": 0.1}), initial)
    native.register(ours, initial, optimizer=fastps.Adam(lr=0.1))
    buffer = np.zeros(shape, np.float32)
    residual = np.zeros(shape, np.float32)
    bound = native.bind({ours: buffer}, codec=fastps.OneBit())
    with fastps.Store() as store:
        store.register(ours, initial, optimizer=fastps.Adam(lr=0.1))
        local = store.bind({ours: buffer}, codec=fastps.OneBit())
        for step in range(4):
            buffer[...] = normal(shape, 20 + step)
            native.push(bound)
            store.push(local)
            wanted = buffer + residual
            foreign.push(theirs, wanted, ONEBIT)
            residual = wanted - decoded_by_slice(ONEBIT, wanted)
        values = foreign.pull(theirs)[0]
        assert native.pull(ours).tobytes() == store.pull(ours).tobytes() == values.tobytes()


def test_stochastic_int8_agrees(
    foreign: ForeignClient, native: fastps.ParameterServer, fresh_name: FreshName
) -> None:
    """The bytes depend on the push's number, which a native client does not show: one small one must fit."""
    seed = 0x0123_4567_89AB_CDEF
    ours, theirs = fresh_name("ours"), fresh_name("theirs")
    zero, gradient = np.zeros(BIG, np.float32), normal((BIG,), 6)
    native.register(ours, zero, optimizer=fastps.SGD(lr=1.0))
    native.push(ours, gradient, codec=fastps.Int8(stochastic=True, seed=seed))
    drawn = zero - native.pull(ours)  # not its negative: no zero is negative
    assert drawn.tobytes() != decoded_by_slice(INT8, gradient).tobytes()
    fits = [
        sequence
        for sequence in range(1, 100)
        if decoded_by_slice(INT8, gradient[:1024], seed=seed, sequence=sequence).tobytes()
        == drawn[:1024].tobytes()
    ]
    assert len(fits) == 1, "the native client's bytes are those of the contract"
    assert decoded_by_slice(INT8, gradient, seed=seed, sequence=fits[0]).tobytes() == drawn.tobytes()
    foreign.register(foreign.spec(theirs, (BIG,), "sgd", {"lr": 1.0}), zero)
    foreign.sequence = max(fits[0] - 1, foreign.sequence)
    foreign.push(theirs, gradient, INT8, seed=seed)
    expected = decoded_by_slice(INT8, gradient, seed=seed, sequence=foreign.sequence)
    assert (zero - foreign.pull(theirs)[0]).tobytes() == expected.tobytes()


def test_a_push_may_carry_lr_and_scale(
    foreign: ForeignClient, native: fastps.ParameterServer, fresh_name: FreshName
) -> None:
    name = fresh_name("w")
    foreign.register(foreign.spec(name, (SMALL,), "sgd", {"lr": 0.5}), np.zeros(SMALL, np.float32))
    gradient = normal((SMALL,), 7)
    (receipt,) = foreign.push(name, gradient, lr=2.0, scale=0.25)
    assert receipt.scale == 0.25
    assert foreign.pull(name)[0].tobytes() == (gradient * np.float32(-0.5)).tobytes()
    native.push(name, gradient, lr=0.0)
    assert native.pull(name).tobytes() == (gradient * np.float32(-0.5)).tobytes()


def test_push_and_pull_in_one(foreign: ForeignClient, fresh_name: FreshName) -> None:
    name = fresh_name("w")
    foreign.register(foreign.spec(name, (BIG,), "sgd", {"lr": 1.0}), np.zeros(BIG, np.float32))
    gradient = normal((BIG,), 8)
    answers = foreign.exchange(name, foreign.gradient_frames(name, gradient, want_values=True))
    versions = foreign.pull(name)[1]
    for k, answer in enumerate(answers):
        part = gradient[slice_of(foreign.entry(name), k)]
        header = foreign.accepted(answer)
        assert header.kind == foreign.pb.KIND_VALUES
        assert (header.version, header.step, header.count) == (versions[k], 1, part.size)
        assert answer.payload == (-part).tobytes()


def test_frames_of_one_stream_keep_their_order(foreign: ForeignClient, fresh_name: FreshName) -> None:
    name = fresh_name("w")
    foreign.register(foreign.spec(name, (SMALL,), "sgd", {"lr": 1.0}), np.zeros(SMALL, np.float32))
    frames = []
    for _ in range(20):
        frames += foreign.gradient_frames(name, np.full(SMALL, -1, np.float32))
        frames.append(foreign.frame(foreign.pb.KIND_PULL, foreign.entry(name), 0))
    answers = foreign.exchange(name, frames)
    pulled = [np.frombuffer(a.payload, "<f4")[0] for a in answers[1::2]]
    assert pulled == list(range(1, 21))


def test_assign_and_state(
    foreign: ForeignClient, native: fastps.ParameterServer, fresh_name: FreshName
) -> None:
    name = fresh_name("w")
    foreign.register(foreign.spec(name, (BIG,), "adam", {"lr": 0.1}), normal((BIG,), 9))
    foreign.push(name, normal((BIG,), 10))
    entry, pb = foreign.entry(name), foreign.pb
    saved, before = foreign.pull_state(name), foreign.pull(name)[1]
    values = normal((BIG,), 11)
    foreign.sequence += 1
    for answer in foreign.exchange(name, [foreign.assign_frame(entry, k, values) for k in range(3)]):
        assert foreign.accepted(answer).kind == pb.KIND_RECEIPT
    assert native.pull(name).tobytes() == values.tobytes()
    assert foreign.pull(name)[1] == [version + 1 for version in before]
    # An assignment is not a step, and does not change the state.
    again = foreign.pull_state(name)
    assert [(n, s.tobytes()) for n, s in again] == [(n, s.tobytes()) for n, s in saved]
    foreign.sequence += 1
    frames = [
        foreign.body_frame(pb.KIND_ASSIGN_STATE, entry, k, FLOAT32, (2 * state).tobytes(), step=step + 6)
        for k, (step, state) in enumerate(saved)
    ]
    for answer in foreign.exchange(name, frames):
        foreign.accepted(answer)
    again = foreign.pull_state(name)
    assert [(n, s.tobytes()) for n, s in again] == [(n + 6, (2 * s).tobytes()) for n, s in saved]
    state = native.state(name)
    exp_avg = np.concatenate([s.reshape(2, -1)[0] for _, s in again])
    assert np.asarray(state["exp_avg"]).tobytes() == exp_avg.tobytes()


@pytest.mark.parametrize("shape", [(2 * encoders.FLOAT64_SLICE_LEN + 1027,), (3, 5), (), (0,)], ids=str)
def test_float64_tensors_agree(
    foreign: ForeignClient, native: fastps.ParameterServer, fresh_name: FreshName, shape: tuple[int, ...]
) -> None:
    rng, name = np.random.default_rng(3), fresh_name("float64")
    initial = np.asarray(rng.standard_normal(shape))
    settings = {"lr": 0.1, "momentum": 0.9}
    spec = foreign.spec(name, shape, "sgd", settings, dtype=foreign.pb.DTYPE_FLOAT64)
    assert foreign.register(spec, initial)
    native.register(name, initial, optimizer=fastps.SGD(**settings))
    with fastps.Store() as store:
        store.register("w", initial, optimizer=fastps.SGD(**settings))
        for _ in range(2):
            gradient = np.asarray(rng.standard_normal(shape))
            foreign.push(name, gradient, encoders.FLOAT64, lr=1 / 3)
            native.push(name, gradient)
            store.push("w", gradient, lr=1 / 3)
            store.push("w", gradient)
        values = foreign.pull(name)[0]
        assert values.dtype == np.float64
        assert values.tobytes() == native.pull(name).tobytes() == store.pull("w").tobytes()
        state = np.concatenate([s for _, s in foreign.pull_state(name)])
        assert state.tobytes() == store.state("w")["momentum_buffer"].tobytes()
    for refused in (FLOAT32, INT8, ONEBIT):
        with pytest.raises(Refused) as caught:
            foreign.push(name, np.zeros(shape, np.float32), refused)
        assert (caught.value.refusal.kind, caught.value.refusal.tensor) == ("dtype", name)
    assert foreign.pull(name)[0].tobytes() == values.tobytes()
