"""What `protos/README.md` promises, seen by a client that knows nothing else."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import encoders
import numpy as np
import pytest
from encoders import BFLOAT16, FLOAT32, INT8, ONEBIT
from foreign_client import (
    TIMEOUT,
    ForeignClient,
    Message,
    Refused,
    Stream,
    Stubs,
    slice_of,
    wire_fields,
    wire_message,
)
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

import fastps
import grpc

VECTORS = json.loads((Path(__file__).resolve().parents[1] / "vectors" / "codecs.json").read_text())
NativeCodec = Any
Float32 = np.ndarray[Any, np.dtype[np.float32]]
FreshName = Callable[[str], str]

# Three slices, the last one short and with pad bits; and small ones.
BIG = 2 * encoders.SLICE_LEN + 1027
SMALL = 13
PLAIN = [(FLOAT32, fastps.Float32()), (BFLOAT16, fastps.BFloat16()), (INT8, fastps.Int8())]
SHAPES = [(BIG,), (SMALL,), (3, 5), (), (0,), (encoders.SLICE_LEN,)]


def normal(shape: tuple[int, ...], seed: int, scale: float = 1.0) -> Float32:
    return np.asarray(np.random.default_rng(seed).normal(scale=scale, size=shape), np.float32)


# The encoders themselves


def number(case: dict[str, Any], key: str) -> int | None:
    return int(case[key], 16) if key in case else None


def encoded(name: str, case: dict[str, Any], values: Float32) -> bytes:
    first, sequence = number(case, "first_element") or 0, number(case, "sequence") or 0
    codec = VECTORS["codecs"][name.removesuffix("_stochastic")]
    return encoders.encode(codec, values, seed=number(case, "seed"), first=first, sequence=sequence)


@pytest.mark.parametrize("name", VECTORS["golden"]["bodies"])
def test_encoders_give_the_golden_digests(name: str) -> None:
    case = VECTORS["golden"]["bodies"][name]
    values = encoders.golden_input()

    def digest(data: bytes) -> str:
        return hashlib.sha256(data).hexdigest()[:32]

    assert digest(values.tobytes()) == VECTORS["golden"]["input_sha256"] == "63e0afea80970880b9e253abf4fa9964"
    body = encoded(name, case, values)
    codec = VECTORS["codecs"][name.removesuffix("_stochastic")]
    decoded = encoders.decode(codec, body, values.size)
    assert (len(body), digest(body)) == (case["bytes"], case["sha256"])
    assert digest(decoded.tobytes()) == case["decoded_sha256"]
    published = {"int8": "7575b6f2b8df2440eb672e754af62fba", "onebit": "2123c88f841979d5413d7841b9ecdbda"}
    assert published.get(name, case["sha256"]) == case["sha256"]


@pytest.mark.parametrize("case", VECTORS["cases"], ids=lambda case: f"{case['codec']}, {case['name']}")
def test_encoders_give_the_vectors(case: dict[str, Any]) -> None:
    values = np.frombuffer(bytes.fromhex(case["input"]), "<f4")
    if "residual" in case:
        values = values + np.frombuffer(bytes.fromhex(case["residual"]), "<f4")
    body = encoded(case["codec"], case, values)
    decoded = encoders.decode(VECTORS["codecs"][case["codec"]], body, case["n"])
    assert body.hex() == case["body"]
    assert decoded.tobytes().hex() == case["decoded"]


def test_philox_gives_the_known_answers() -> None:
    def words(key: int, counter: int, high: int) -> str:
        return " ".join(f"{w:08x}" for w in encoders.philox(key, np.array([counter], np.uint64), high)[0])

    ones = 2**64 - 1
    assert words(0, 0, 0) == "6627e8d5 e169c58d bc57ac4c 9b00dbd8"
    assert words(ones, ones, ones) == "408f276d 41c83b0e a20bc7c6 6d5451fd"
    pi = words(0x299F31D0A4093822, 0x85A308D3243F6A88, 0x0370734413198A2E)
    assert pi == "d16cfe09 94fdcceb 5001e420 24126ea1"


def test_crc32c_gives_the_known_answer() -> None:
    assert encoders.crc32c(b"123456789") == 0xE3069283


@pytest.mark.parametrize("n", [0, 1, 63, 64, 65, 1023, 1025, 4097, 70_001])
def test_encoders_give_what_the_library_gives(n: int) -> None:
    seed, first, sequence = 0xFEDC_BA98_7654_3210, encoders.SLICE_LEN, (1 << 33) + 5
    values = normal((n,), n) * np.float32(2.0) ** np.random.default_rng(n).integers(-120, 100, n)
    values = values.astype(np.float32)
    for codec, ours in [*PLAIN, (ONEBIT, fastps.OneBit())]:
        assert ours.encode(values) == encoders.encode(codec, values)
    drawn = fastps.Int8(stochastic=True, seed=seed).encode(values, first_element=first, sequence=sequence)
    assert drawn == encoders.encode(INT8, values, seed=seed, first=first, sequence=sequence)


# Registration, both ways


@pytest.mark.parametrize("apply", ["exact", "hogwild"])
def test_a_foreign_tensor_is_native_and_a_native_one_foreign(
    foreign: ForeignClient, native: fastps.ParameterServer, fresh_name: FreshName, apply: str
) -> None:
    for shape in SHAPES:
        theirs, ours = fresh_name("theirs"), fresh_name("ours")
        initial = normal(shape, 1)
        number = {"exact": foreign.pb.APPLY_EXACT, "hogwild": foreign.pb.APPLY_HOGWILD}[apply]
        spec = foreign.spec(theirs, shape, "adagrad", {"lr": 0.25, "eps": 1e-8}, apply=number)
        assert foreign.register(spec, initial)
        native.register(ours, initial, optimizer=fastps.Adagrad(lr=0.25, eps=1e-8), apply=apply)
        assert {theirs, ours} <= set(native.names())
        assert {theirs, ours} <= set(foreign.names())
        for name in (theirs, ours):
            values, versions = foreign.pull(name)
            assert values.shape == shape
            assert values.tobytes() == initial.tobytes()
            assert native.pull(name).tobytes() == initial.tobytes()
            assert len(versions) == max(1, -(-initial.size // encoders.SLICE_LEN))
            assert len(set(versions)) == 1
        # The same spec again is a no-op for either side; the values stay.
        native.register(theirs, initial + 1, optimizer=fastps.Adagrad(lr=0.25, eps=1e-8), apply=apply)
        same = foreign.spec(ours, shape, "adagrad", {"lr": 0.25, "eps": 1e-8}, apply=number)
        assert not foreign.register(same, initial + 1)
        assert native.pull(theirs).tobytes() == foreign.pull(ours)[0].tobytes() == initial.tobytes()


def test_the_slices_of_a_tensor_are_spread(foreign: ForeignClient, fresh_name: FreshName) -> None:
    name = fresh_name("spread")
    foreign.register(foreign.spec(name, (BIG,)), normal((BIG,), 2))
    placement = foreign.entry(name).placement
    assert set(placement.shards) == {0, 1}
    assert len(set(placement.slices)) == len(placement.slices) == 3


def test_versions_come_without_values(
    foreign: ForeignClient, native: fastps.ParameterServer, fresh_name: FreshName
) -> None:
    name, pb = fresh_name("versions"), foreign.pb
    foreign.register(foreign.spec(name, (BIG,)), normal((BIG,), 2))
    native.push(name, normal((BIG,), 3))
    entry = foreign.entry(name)
    asked = [foreign.frame(pb.KIND_PULL_VERSION, entry, k) for k in range(3)]
    answers = foreign.exchange(name, asked)
    assert [answer.payload for answer in answers] == [b""] * 3
    wanted = pb.Header(kind=pb.KIND_VERSION, version=2, own=1)
    for frame, answer in zip(asked, answers, strict=True):
        wanted.tag = frame.header.tag
        assert answer.header == wanted
    assert native.versions(name).slices(name) == (2, 2, 2)
    spoilt = foreign.frame(pb.KIND_PULL_VERSION, entry, 0, payload=b"x")
    assert foreign.exchange(name, [spoilt])[0].header.refusal.kind == "frame"


def test_an_unsealed_tensor_does_not_exist(
    foreign: ForeignClient, stubs: Stubs, server: fastps.Server, fresh_name: FreshName
) -> None:
    name, ones = fresh_name("half"), np.ones(BIG, np.float32)
    pb, spec = foreign.pb, foreign.spec(name, (BIG,))
    first = foreign.call(0, "Register", pb.RegisterRequest(spec=spec, client=foreign.client))
    entry = pb.MapEntry(spec=spec, placement=first.placement)
    mine = {shard: [k for k, s in enumerate(entry.placement.shards) if s == shard] for shard in (0, 1)}
    seal = pb.SealRequest(reservation=first.reservation)
    commit = pb.CommitRequest(reservation=first.reservation, client=foreign.client)
    with ForeignClient(stubs, server.address_list) as other:
        again = other.call(0, "Register", pb.RegisterRequest(spec=spec, client=other.client))
        assert again.under_way
        assert again.retry_after_ms > 0
    # Every step may be repeated.
    repeated = foreign.call(0, "Register", pb.RegisterRequest(spec=spec, client=foreign.client))
    assert (repeated.reservation, repeated.placement) == (first.reservation, first.placement)
    for shard in (0, 1, 0, 1):
        answer = foreign.call(shard, "Reserve", foreign.reserve_request(spec, first, mine[shard]))
        assert answer.lease_ms > 0
    # Nothing but initial values goes in or out.
    foreign.sequence += 1
    gradient = foreign.assign_frame(entry, mine[0][0], ones)
    gradient.header.kind = pb.KIND_GRADIENT
    reads = [foreign.frame(k, entry, mine[0][0]) for k in (pb.KIND_PULL, pb.KIND_PULL_VERSION)]
    for refused in foreign.stream(0).exchange([gradient, *reads]):
        assert refused.header.refusal.kind == "unknown_tensor"
        assert refused.header.refusal.retry_after_ms > 0
    # Not all values have come: neither sealed nor committed.
    for shard, method, request in [(0, "Seal", seal), (1, "Seal", seal), (0, "Commit", commit)]:
        with pytest.raises(Refused) as early:
            foreign.call(shard, method, request)
        assert early.value.refusal.kind == "config"
    for shard in (0, 1):
        frames = [foreign.assign_frame(entry, k, ones, first.reservation) for k in mine[shard]]
        for duplicate in (False, True):
            answers = [foreign.accepted(a) for a in foreign.stream(shard).exchange(frames)]
            assert {a.kind for a in answers} == {pb.KIND_RECEIPT}
            assert {a.duplicate for a in answers} == {duplicate}
        assert name not in foreign.names()
        for _ in range(2):
            foreign.call(shard, "Seal", seal)
    assert name not in foreign.names()
    for _ in range(2):
        foreign.call(0, "Commit", commit)
    assert name in foreign.names()
    assert foreign.pull(name)[0].tobytes() == ones.tobytes()


def test_unregister(foreign: ForeignClient, native: fastps.ParameterServer, fresh_name: FreshName) -> None:
    name = fresh_name("gone")
    foreign.register(foreign.spec(name, (BIG,)), normal((BIG,), 3))
    entry = foreign.entry(name)
    gone = foreign.call(0, "Unregister", foreign.pb.UnregisterRequest(name=name)).placement
    assert gone == entry.placement
    for shard in set(gone.shards):
        slices = [s for s, at in zip(gone.slices, gone.shards, strict=True) if at == shard]
        foreign.call(shard, "Drop", foreign.pb.DropRequest(slices=slices))
    assert name not in foreign.names()
    assert name not in native.names()
    answers = foreign.exchange(name, [foreign.frame(foreign.pb.KIND_PULL, entry, k) for k in range(3)])
    assert [a.header.refusal.kind for a in answers] == ["unknown_tensor"] * 3
    # The name is free again; slice identifiers never recur.
    foreign.register(foreign.spec(name, (BIG,)), normal((BIG,), 3))
    assert not set(gone.slices) & set(
        foreign.call(0, "GetMap", foreign.pb.GetMapRequest(names=[name])).entries[0].placement.slices
    )


# One gradient's way, bit for bit

OPTIMIZERS: list[tuple[str, dict[str, float], Any]] = [
    ("sgd", {"lr": 0.5}, fastps.SGD(lr=0.5)),
    ("sgd", {"lr": 0.1, "momentum": 0.9, "nesterov": 1}, fastps.SGD(lr=0.1, momentum=0.9, nesterov=True)),
    ("adagrad", {"lr": 0.1}, fastps.Adagrad(lr=0.1)),
    ("adam", {"lr": 1e-3, "beta1": 0.8, "beta2": 0.99}, fastps.Adam(lr=1e-3, betas=(0.8, 0.99))),
]
OPTIMIZER_IDS = ["sgd", "nesterov", "adagrad", "adam"]


@pytest.mark.parametrize(("rule", "settings", "optimizer"), OPTIMIZERS, ids=OPTIMIZER_IDS)
@pytest.mark.parametrize(("codec", "native_codec"), PLAIN, ids=["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_foreign_bytes_native_push_and_store_agree(
    foreign: ForeignClient,
    native: fastps.ParameterServer,
    fresh_name: FreshName,
    rule: str,
    settings: dict[str, float],
    optimizer: Any,
    codec: int,
    native_codec: NativeCodec,
    shape: tuple[int, ...],
) -> None:
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
    """What a server makes of the bodies of a gradient."""
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
    # An assignment is not a step, and leaves the state alone.
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


# Identity


def test_duplicates_are_answered_not_applied(foreign: ForeignClient, fresh_name: FreshName) -> None:
    name = fresh_name("w")
    foreign.register(foreign.spec(name, (BIG,), "sgd", {"lr": 1.0}), np.zeros(BIG, np.float32))
    frames = foreign.gradient_frames(name, np.full(BIG, -1, np.float32))
    first = [foreign.accepted(a) for a in foreign.exchange(name, frames)]
    again = [foreign.accepted(a) for a in foreign.exchange(name, frames)]
    assert [h.duplicate for h in first] == [False] * 3
    assert [h.duplicate for h in again] == [True] * 3
    assert [h.version for h in again] == [h.version for h in first] == foreign.pull(name)[1]
    assert foreign.pull(name)[0].tobytes() == np.ones(BIG, np.float32).tobytes()


def test_resolve_tells_or_fences(foreign: ForeignClient, fresh_name: FreshName) -> None:
    name = fresh_name("w")
    foreign.register(foreign.spec(name, (BIG,), "sgd", {"lr": 1.0}), np.zeros(BIG, np.float32))
    entry, pb = foreign.entry(name), foreign.pb
    frames = foreign.gradient_frames(name, np.full(BIG, -1, np.float32))
    applied = foreign.accepted(foreign.exchange(name, frames[:1])[0])
    asked = [foreign.frame(pb.KIND_RESOLVE, entry, k, sequence=foreign.sequence) for k in range(3)]
    answers = [a.header for a in foreign.exchange(name, asked)]
    assert [h.kind for h in answers] == [pb.KIND_RECEIPT, pb.KIND_FENCED, pb.KIND_FENCED]
    assert answers[0].duplicate
    assert answers[0].version == applied.version
    # What is fenced stays fenced, for a late frame and for a second question.
    late = foreign.exchange(name, frames)
    kinds = [a.header.refusal.kind for a in late]
    assert kinds == ["", "fenced", "fenced"]
    assert late[0].header.duplicate
    assert [a.header.kind for a in foreign.exchange(name, asked)] == [h.kind for h in answers]
    values = foreign.pull(name)[0]
    assert values[: encoders.SLICE_LEN].min() == 1
    assert not values[encoders.SLICE_LEN :].any()
    foreign.push(name, np.full(BIG, -1, np.float32))
    assert foreign.pull(name)[0][-1] == 1


def test_a_push_older_than_the_window_is_unknown(foreign: ForeignClient, fresh_name: FreshName) -> None:
    name = fresh_name("w")
    foreign.register(foreign.spec(name, (SMALL,), "sgd", {"lr": 1.0}), np.zeros(SMALL, np.float32))
    frames = [foreign.gradient_frames(name, np.full(SMALL, -1, np.float32))[0] for _ in range(70)]
    foreign.exchange(name, frames)
    (old,) = foreign.exchange(name, frames[:1])
    assert old.header.refusal.kind == "unknown_outcome"
    assert old.header.refusal.tensor == name
    question = foreign.frame(
        foreign.pb.KIND_RESOLVE, foreign.entry(name), 0, sequence=frames[0].header.sequence
    )
    (answer,) = foreign.exchange(name, [question])
    assert answer.header.refusal.kind == "unknown_outcome"
    (recent,) = foreign.exchange(name, frames[-1:])
    assert recent.header.duplicate
    assert foreign.pull(name)[0].tobytes() == np.full(SMALL, 70, np.float32).tobytes()


def test_staleness_counts_the_pushes_of_others(
    foreign: ForeignClient, native: fastps.ParameterServer, fresh_name: FreshName
) -> None:
    name = fresh_name("w")
    gradient = np.ones(SMALL, np.float32)
    foreign.register(foreign.spec(name, (SMALL,)), np.zeros(SMALL, np.float32))
    pull = foreign.frame(foreign.pb.KIND_PULL, foreign.entry(name), 0)
    base = foreign.accepted(foreign.exchange(name, [pull])[0])
    for _ in range(3):
        native.push(name, gradient)
    foreign.push(name, gradient)
    (receipt,) = foreign.push(name, gradient, base_version=base.version, base_own=base.own)
    assert receipt.staleness == 3
    assert (receipt.version, receipt.own) == (base.version + 5, base.own + 2)
    (receipt,) = foreign.push(name, gradient)
    assert not receipt.HasField("staleness")


# Bad input. Every case leaves values and versions alone, and the server goes on.


@pytest.fixture
def target(foreign: ForeignClient) -> ForeignClient:
    """A client of two tensors, one of three slices and a small one."""
    foreign.register(foreign.spec("target", (BIG,), "adam", {"lr": 0.1}), normal((BIG,), 12))
    foreign.register(foreign.spec("small", (SMALL,), "sgd", {"lr": 0.5}), normal((SMALL,), 13))
    return foreign


@contextmanager
def unharmed(client: ForeignClient) -> Iterator[None]:
    """Values, versions, state and map are as before; then a good push is applied."""

    def look() -> list[Any]:
        pulled = [client.pull(name) for name in ("target", "small")]
        states = [(n, s.tobytes()) for n, s in client.pull_state("target")]
        return [(values.tobytes(), versions) for values, versions in pulled] + [states, client.names()]

    before = look()
    yield
    assert look() == before
    for name, shape in (("target", (BIG,)), ("small", (SMALL,))):
        versions = client.pull(name)[1]
        receipts = client.push(name, normal(shape, 14))
        assert [r.version for r in receipts] == [v + 1 for v in versions]


Spoil = Callable[[ForeignClient, Message], object]
SLICE1 = encoders.SLICE_LEN
NAN = np.float32("nan")


def header(**fields: Any) -> Spoil:
    """Sets header fields."""

    def spoil(client: ForeignClient, frame: Message) -> None:
        for field, value in fields.items():
            setattr(frame.header, field, value(client, frame) if callable(value) else value)

    return spoil


def float32_body(at: int, value: float) -> Spoil:
    def spoil(client: ForeignClient, frame: Message) -> None:
        values = np.frombuffer(frame.payload, "<f4").copy()
        values[at] = value
        frame.payload = values.tobytes()

    return spoil


def cut(by: int) -> Spoil:
    return lambda client, frame: setattr(frame, "payload", frame.payload[:by])


def add(tail: bytes) -> Spoil:
    return lambda client, frame: setattr(frame, "payload", frame.payload + tail)


def body_byte(codec: int, at: int, byte: int, name: str = "small") -> tuple[str, int, Spoil]:
    def spoil(client: ForeignClient, frame: Message) -> None:
        body = bytearray(frame.payload)
        body[at] = byte
        frame.payload = bytes(body)

    return name, codec, spoil


def zero_scale(client: ForeignClient, frame: Message) -> None:
    frame.payload = b"\0" + b"\0" * 4 + b"\1" + b"\0" * (SMALL - 5)


def negative_mean(client: ForeignClient, frame: Message) -> None:
    frame.payload = np.array([-1, 1], "<f4").tobytes() + frame.payload[8:]


def nan_mean(client: ForeignClient, frame: Message) -> None:
    frame.payload = np.array([NAN, 1], "<f4").tobytes() + frame.payload[8:]


def bfloat16_infinity(client: ForeignClient, frame: Message) -> None:
    frame.payload = frame.payload[:-2] + b"\x80\x7f"


def parts(client: ForeignClient, frame: Message) -> None:
    frame.header.parts.add(slice=frame.header.slice, count=1)


def refusal_field(client: ForeignClient, frame: Message) -> None:
    frame.header.refusal.kind = "x"


def drop_field(*names: str) -> Spoil:
    return lambda client, frame: [frame.header.ClearField(name) for name in names]


def wrong_crc(client: ForeignClient, frame: Message) -> None:
    frame.header.crc32c = encoders.crc32c(frame.payload) ^ 1


def pull_with(**fields: Any) -> Spoil:
    def spoil(client: ForeignClient, frame: Message) -> None:
        clean = client.frame(client.pb.KIND_PULL, client.entry("small"), 0)
        clean.header.tag = frame.header.tag
        for field, value in fields.items():
            setattr(clean if field == "payload" else clean.header, field, value)
        frame.CopyFrom(clean)

    return spoil


def compressed_assign(client: ForeignClient, frame: Message) -> None:
    frame.header.kind = client.pb.KIND_ASSIGN


# what: (tensor, codec of the good frame, what spoils it, kind, whether the tensor is named, expected, got)
BAD_FRAMES: dict[str, tuple[str, int, Spoil, str, bool, str, str]] = {
    "unknown slice": ("small", FLOAT32, header(slice=2**63 + 5), "unknown_tensor", False, "", ""),
    "too many elements": ("small", FLOAT32, header(count=14), "shape", True, "13", "14"),
    "2^60 elements": ("small", FLOAT32, header(count=1 << 60), "shape", True, "13", str(1 << 60)),
    "2^60 elements, int8": ("small", INT8, header(count=1 << 60), "shape", True, "13", str(1 << 60)),
    "2^60 elements, onebit": (
        "target",
        ONEBIT,
        header(count=1 << 60),
        "shape",
        True,
        str(SLICE1),
        str(1 << 60),
    ),
    "2^64 - 1 elements": ("small", FLOAT32, header(count=2**64 - 1), "shape", True, "13", str(2**64 - 1)),
    "no count": ("small", FLOAT32, drop_field("count"), "shape", True, "13", "0"),
    "NaN": ("target", FLOAT32, float32_body(77, np.nan), "non_finite", True, "finite", "NaN"),
    "infinity in the last element": (
        "small",
        FLOAT32,
        float32_body(-1, np.inf),
        "non_finite",
        True,
        "finite",
        "inf",
    ),
    "bfloat16 infinity": ("small", BFLOAT16, bfloat16_infinity, "non_finite", True, "finite", "inf"),
    "body cut short": ("small", FLOAT32, cut(-1), "frame", True, "52", "51"),
    "body cut to nothing": ("small", INT8, cut(0), "frame", True, "14", "0"),
    "body too long": ("small", FLOAT32, add(b"\0" * 4), "frame", True, "52", "56"),
    "int8 body too long": ("small", INT8, add(b"\0"), "frame", True, "14", "15"),
    "onebit body cut short": ("target", ONEBIT, cut(-1), "frame", True, "34272", "34271"),
    "wrong CRC": ("small", FLOAT32, wrong_crc, "frame", True, "CRC", "0x"),
    "unknown codec": ("small", FLOAT32, header(codec=9), "frame", True, "1, 2, 3 or 4", "9"),
    "no codec": ("small", FLOAT32, header(codec=0), "frame", True, "1, 2, 3 or 4", "0"),
    "another codec than the body's": ("small", FLOAT32, header(codec=INT8), "frame", True, "14", "52"),
    "unknown kind": ("small", FLOAT32, header(kind=99), "frame", True, "", "99"),
    "no kind": ("small", FLOAT32, header(kind=0), "frame", True, "", "UNSPECIFIED"),
    "an answer's kind": ("small", FLOAT32, header(kind=16), "frame", True, "", "KIND_RECEIPT"),
    "reserved kind DELTA": ("small", FLOAT32, header(kind=7), "frame", True, "", "KIND_DELTA"),
    "reserved kind VECTOR": ("small", FLOAT32, header(kind=8), "frame", True, "", "KIND_VECTOR"),
    "int8 -128": (*body_byte(INT8, 6, 0x80), "frame", True, "-127", "-128"),
    "int8 scale 1": (*body_byte(INT8, 0, 1), "frame", True, "32 to 254", "1"),
    "int8 scale 31": (*body_byte(INT8, 0, 31), "frame", True, "32 to 254", "31"),
    "int8 scale 255": (*body_byte(INT8, 0, 255), "frame", True, "32 to 254", "255"),
    "int8 non-zero under scale 0": ("small", INT8, zero_scale, "frame", True, "0", "1"),
    "onebit pad bits": (*body_byte(ONEBIT, 9, 0xFF), "frame", True, "zero", "0xff"),
    "onebit negative mean": ("small", ONEBIT, negative_mean, "frame", True, "finite", "-1"),
    "onebit NaN mean": ("small", ONEBIT, nan_mean, "frame", True, "finite", "NaN"),
    "reserved field weight": ("small", FLOAT32, header(weight=0.0), "frame", True, "unset", ""),
    "reserved field have_version": ("small", FLOAT32, header(have_version=1), "frame", True, "unset", ""),
    "reserved field min_version": ("small", FLOAT32, header(min_version=1), "frame", True, "unset", ""),
    "reserved field parts": ("small", FLOAT32, parts, "frame", True, "unset", ""),
    "answer field version": ("small", FLOAT32, header(version=1), "frame", True, "unset", ""),
    "answer field own": ("small", FLOAT32, header(own=0), "frame", True, "unset", ""),
    "answer field staleness": ("small", FLOAT32, header(staleness=0), "frame", True, "unset", ""),
    "answer field duplicate": ("small", FLOAT32, header(duplicate=True), "frame", True, "unset", ""),
    "answer field refusal": ("small", FLOAT32, refusal_field, "frame", True, "unset", ""),
    "step on a gradient": ("small", FLOAT32, header(step=1), "frame", True, "unset", ""),
    "reservation on a gradient": ("small", FLOAT32, header(reservation=1), "frame", True, "unset", ""),
    "pull with a body": ("small", FLOAT32, pull_with(payload=b"\0"), "frame", True, "unset", ""),
    "pull with a count": ("small", FLOAT32, pull_with(count=13), "frame", True, "unset", ""),
    "pull with a sequence": ("small", FLOAT32, pull_with(sequence=1), "frame", True, "unset", ""),
    "base_own alone": ("small", FLOAT32, header(base_own=1), "frame", True, "", ""),
    "no sequence": ("small", FLOAT32, drop_field("sequence"), "frame", True, "1 or more", "0"),
    "float64": ("small", FLOAT32, header(dtype=2), "dtype", True, "FLOAT32", "FLOAT64"),
    "unknown dtype": ("small", FLOAT32, header(dtype=77), "dtype", True, "FLOAT32", "77"),
    "no dtype": ("small", FLOAT32, drop_field("dtype"), "dtype", True, "FLOAT32", "UNSPECIFIED"),
    "wrong epoch": ("small", FLOAT32, header(epoch=lambda c, f: c.epoch + 1), "stale_epoch", True, "", ""),
    "no epoch": ("small", FLOAT32, drop_field("epoch"), "stale_epoch", True, "", "0"),
    "wrong group": ("small", FLOAT32, header(group=4711), "frame", True, "", "4711"),
    "no client": ("small", FLOAT32, drop_field("client"), "frame", True, "", ""),
    "a client without a hello": ("small", FLOAT32, header(client=0xDEAD), "lease", True, "", ""),
    "lr NaN": ("small", FLOAT32, header(lr=np.nan), "config", True, "finite", "NaN"),
    "lr below 0": ("small", FLOAT32, header(lr=-1.0), "config", True, ">= 0", "-1"),
    "scale infinite": ("small", FLOAT32, header(scale=np.inf), "config", True, "finite", "inf"),
    "a compressed assignment": ("small", INT8, compressed_assign, "frame", True, "float32", "Int8"),
}


@pytest.mark.parametrize("case", BAD_FRAMES)
def test_a_bad_frame_is_refused(target: ForeignClient, case: str) -> None:
    name, codec, spoil, kind, names_tensor, expected, got = BAD_FRAMES[case]
    shape = (BIG,) if name == "target" else (SMALL,)
    shard = target.entry(name).placement.shards[0]
    with unharmed(target):
        frame = target.gradient_frames(name, normal(shape, 15), codec)[0]
        spoil(target, frame)
        good = target.frame(target.pb.KIND_PULL, target.entry("small"), 0)
        if target.entry("small").placement.shards[0] != shard:
            good = target.frame(target.pb.KIND_PULL, target.entry("target"), 0)
        # In one stream with a good frame behind: the refusal is an answer like any other.
        refused, pulled = target.stream(shard).exchange([frame, good])
        assert refused.header.kind == target.pb.KIND_REFUSED
        assert refused.payload == b""
        refusal = refused.header.refusal
        assert refusal.kind == kind, refusal
        assert refusal.message, refusal
        assert (refusal.HasField("shard"), refusal.shard) == (True, shard), refusal
        assert refusal.tensor == (name if names_tensor else ""), refusal
        assert expected in refusal.expected, refusal
        assert got in refusal.got, refusal
        assert pulled.header.kind == target.pb.KIND_VALUES


def test_a_frame_without_header_is_refused(target: ForeignClient) -> None:
    with unharmed(target), _stream(target, 0) as stream:
        stream.send(target.pb.Frame(payload=b"x"))
        answer = stream.receive()
        assert answer.header.tag == 0
        assert answer.header.refusal.kind == "frame"


def test_a_bad_slice_does_not_stop_the_others(target: ForeignClient) -> None:
    """NaN in one frame of three, from a client that does not scan: that frame is refused whole."""
    values, versions = target.pull("target")
    gradient = normal((BIG,), 16)
    gradient[SLICE1 + 1] = NAN
    answers = target.exchange("target", target.gradient_frames("target", gradient))
    assert [a.header.refusal.kind for a in answers] == ["", "non_finite", ""]
    assert answers[1].header.refusal.tensor == "target"
    after, now = target.pull("target")
    assert now == [versions[0] + 1, versions[1], versions[2] + 1]
    middle = slice(SLICE1, 2 * SLICE1)
    assert after[middle].tobytes() == values[middle].tobytes()
    assert (after[:SLICE1] != values[:SLICE1]).any()
    assert (after[2 * SLICE1 :] != values[2 * SLICE1 :]).any()
    # The refused slice may be sent again with the same identity.
    gradient[SLICE1 + 1] = 0
    target.sequence -= 1
    answers = target.exchange("target", target.gradient_frames("target", gradient))
    assert [target.accepted(a).duplicate for a in answers] == [True, False, True]


@contextmanager
def _stream(client: ForeignClient, shard: int) -> Iterator[Stream]:
    stream = Stream(client.stubs, client.channels[shard])
    try:
        yield stream
    finally:
        stream.call.cancel()


def test_a_message_above_the_limit_ends_its_stream_only(target: ForeignClient) -> None:
    with unharmed(target):
        frame = target.gradient_frames("small", normal((SMALL,), 17))[0]
        shard = target.entry("small").placement.shards[0]
        with _stream(target, shard) as stream:
            target.accepted(stream.exchange([target.frame(target.pb.KIND_PULL, target.entry("small"), 0)])[0])
            frame.payload = b"\0" * (4 << 20)
            stream.send(frame)
            with pytest.raises(grpc.RpcError) as ended:
                stream.receive()
            assert ended.value.code() == grpc.StatusCode.OUT_OF_RANGE
        with _stream(target, shard) as stream:
            target.accepted(stream.exchange([target.frame(target.pb.KIND_PULL, target.entry("small"), 0)])[0])


def test_bytes_that_are_no_frame_end_their_stream_only(target: ForeignClient) -> None:
    with unharmed(target), _stream(target, 0) as stream:
        stream.send(b"\xff" * 40)
        with pytest.raises(grpc.RpcError) as ended:
            stream.receive()
        assert ended.value.code() in (grpc.StatusCode.INTERNAL, grpc.StatusCode.INVALID_ARGUMENT)


def test_another_version_of_the_protocol_is_unimplemented(target: ForeignClient) -> None:
    frame = target.frame(target.pb.KIND_PULL, target.entry("small"), 0)
    with unharmed(target):
        for channel in target.channels:
            exchange = channel.stream_stream(
                "/fastps.v2.Data/Exchange",
                request_serializer=target.pb.Frame.SerializeToString,
                response_deserializer=target.pb.Frame.FromString,
            )
            with pytest.raises(grpc.RpcError) as ended:
                list(exchange(iter([frame]), timeout=TIMEOUT))
            assert ended.value.code() == grpc.StatusCode.UNIMPLEMENTED
        shard = target.entry("small").placement.shards[0]
        with _stream(target, shard) as stream:
            target.accepted(stream.exchange([target.frame(target.pb.KIND_PULL, target.entry("small"), 0)])[0])


def test_half_closing_ends_the_stream_well(target: ForeignClient) -> None:
    stream = Stream(target.stubs, target.channels[0])
    stream.close()
    assert stream.call.code() == grpc.StatusCode.OK


Control = Callable[[ForeignClient], tuple[str, Message]]


def registering(**fields: Any) -> Control:
    def request(client: ForeignClient) -> tuple[str, Message]:
        spec = client.spec(**({"name": "bad", "shape": (4,)} | fields))
        return "Register", client.pb.RegisterRequest(spec=spec, client=client.client)

    return request


def calling(method: str, **fields: Any) -> Control:
    return lambda client: (method, getattr(client.pb, f"{method}Request")(**fields))


SMALL_SPEC: dict[str, Any] = {"name": "small", "shape": (SMALL,), "optimizer": "sgd", "settings": {"lr": 0.5}}
ADAM = {"optimizer": "adam", "settings": {}}
MOMENTUM = {"settings": {"lr": 0.5, "momentum": 0.9}}
LONG = "x" * 1024  # errors quote no more than that
# what: (call, kind, tensor, expected, got)
BAD_CALLS: dict[str, tuple[Control, str, str, str, str]] = {
    "unknown name": (calling("Unregister", name="nobody"), "unknown_tensor", "nobody", "", ""),
    "another shape": (registering(**SMALL_SPEC | {"shape": (14,)}), "config", "small", "13", "14"),
    "another rule": (registering(**SMALL_SPEC | ADAM), "config", "small", "sgd", "adam"),
    "another setting": (registering(**SMALL_SPEC | MOMENTUM), "config", "small", "0", "0.9"),
    "another apply": (registering(**SMALL_SPEC | {"apply": 2}), "config", "small", "Exact", "Hogwild"),
    "another group": (registering(**SMALL_SPEC | {"group": "other"}), "config", "small", "default", "other"),
    "2^60 elements": (registering(shape=(1 << 60,)), "shape", "bad", "2^57", str(1 << 60)),
    "2^80 elements": (registering(shape=(1 << 40, 1 << 40)), "shape", "bad", "2^57", str(1 << 40)),
    "33 dimensions": (registering(shape=(1,) * 33), "shape", "bad", "32", "33"),
    "no name": (registering(name=""), "config", "", "1 to 1024", "0"),
    "a name of 1025 bytes": (registering(name="x" * 1025), "config", LONG, "1 to 1024", "1025"),
    "a name of 100,000 bytes": (registering(name="x" * 100_000), "config", LONG, "1 to 1024", "100000"),
    "an unknown name of 100,000 bytes": (
        calling("Unregister", name="x" * 100_000),
        "unknown_tensor",
        LONG,
        "",
        "",
    ),
    "no group": (registering(group=""), "config", "bad", "1 to 1024", "0"),
    "float64": (registering(dtype=2), "dtype", "bad", "FLOAT32", "FLOAT64"),
    "no dtype": (registering(dtype=0), "dtype", "bad", "FLOAT32", "UNSPECIFIED"),
    "no apply": (registering(apply=0), "config", "bad", "1 or 2", "0"),
    "unknown rule": (registering(optimizer="lion"), "config", "bad", "sgd", "lion"),
    "unknown setting": (registering(settings={"beta3": 1}), "config", "bad", "lr", "beta3"),
    "invalid setting": (registering(settings={"momentum": -1}), "config", "bad", "", "-1"),
    "a flag that is 2": (registering(settings={"maximize": 2}), "config", "bad", "0 or 1", "2"),
    "no spec": (calling("Register", client=1), "config", "", "", ""),
    "sealing nothing": (calling("Seal", reservation=4711), "lease", "", "", ""),
    "committing nothing": (calling("Commit", reservation=4711), "lease", "", "", ""),
    "a hello without client": (calling("Hello"), "config", "", "", ""),
    "renewing what is not there": (calling("Hello", client=4711, renew=True), "lease", "", "", ""),
}
# protos/README.md, "Errors".
STATUS = {
    "unknown_tensor": grpc.StatusCode.NOT_FOUND,
    "shape": grpc.StatusCode.INVALID_ARGUMENT,
    "dtype": grpc.StatusCode.INVALID_ARGUMENT,
    "config": grpc.StatusCode.FAILED_PRECONDITION,
    "capacity": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "lease": grpc.StatusCode.FAILED_PRECONDITION,
}


@pytest.mark.parametrize("case", BAD_CALLS)
def test_a_bad_call_is_refused(target: ForeignClient, case: str) -> None:
    build, kind, tensor, expected, got = BAD_CALLS[case]
    method, request = build(target)
    with unharmed(target), pytest.raises(Refused) as refused:
        target.call(0, method, request)
    refusal = refused.value.refusal
    assert (refusal.kind, refused.value.code) == (kind, STATUS[kind]), refusal
    assert refusal.message, refusal
    assert (refusal.HasField("shard"), refusal.shard, refusal.tensor) == (True, 0, tensor), refusal
    assert expected in refusal.expected, refusal
    assert got in refusal.got, refusal


# Limits and leases


@pytest.fixture(scope="module")
def strict(stubs: Stubs) -> Iterator[fastps.Server]:
    """Little memory, and a short lease."""
    with fastps.serve(shards=2, memory_limit=64 << 20, lease=0.5) as server:
        yield server


def test_a_registration_that_does_not_fit_leaves_nothing(stubs: Stubs, strict: fastps.Server) -> None:
    with ForeignClient(stubs, strict.address_list) as client:
        client.register(client.spec("fits", (SMALL,)), np.zeros(SMALL, np.float32))
        used = [memory_slices(client, shard) for shard in (0, 1)]
        with pytest.raises(Refused) as refused:
            client.register(client.spec("large", (8 << 20,)), np.zeros(8 << 20, np.float32))
        refusal = refused.value.refusal
        assert (refusal.kind, refused.value.code) == ("capacity", STATUS["capacity"])
        assert refusal.tensor == "large"
        assert refusal.HasField("shard")
        assert refusal.retry_after_ms > 0
        assert "bytes" in refusal.expected
        assert "bytes" in refusal.got
        assert client.names() == ["fits"]
        assert [memory_slices(client, shard) for shard in (0, 1)] == used
        client.push("fits", np.ones(SMALL, np.float32))


def memory_slices(client: ForeignClient, shard: int) -> int:
    return client.call(shard, "Stats", client.pb.StatsRequest()).counters["memory_slices"]


def test_an_expired_lease_ends_the_session_for_good(stubs: Stubs, strict: fastps.Server) -> None:
    with (
        ForeignClient(stubs, strict.address_list) as sleeper,
        ForeignClient(stubs, strict.address_list) as other,
    ):
        spec = sleeper.spec("leased", (SMALL,), "sgd", {"lr": 1.0})
        sleeper.register(spec, np.zeros(SMALL, np.float32))
        gradient = np.full(SMALL, -1, np.float32)
        sleeper.push("leased", gradient)
        asked = sleeper.frame(sleeper.pb.KIND_RESOLVE, sleeper.entry("leased"), 0, sequence=sleeper.sequence)
        for _ in range(12):
            time.sleep(0.1)
            # A frame is a sign of life for one shard, a hello for the other.
            other.pull("leased")
            other.hello(1 - other.entry("leased").placement.shards[0], renew=True)
        frame = sleeper.gradient_frames("leased", gradient)[0]
        for late in (frame, asked):
            (answer,) = sleeper.exchange("leased", [late])
            assert answer.header.refusal.kind == "lease"
        # What the slices remembered of its pushes may be gone, so it never comes back under this number.
        for renew in (True, False):
            with pytest.raises(Refused) as refused:
                sleeper.hello(0, renew=renew)
            assert refused.value.refusal.kind == "lease"
        other.push("leased", gradient)
        assert other.pull("leased")[0].tobytes() == np.full(SMALL, 2, np.float32).tobytes()


# Any way to write the same message


def rewritten(frame: Message, how: str) -> bytes:
    """The frame in an encoding that no stub would choose, and every parser must accept."""
    fields = list(wire_fields(frame.header.SerializeToString()))
    body = (15, 2, frame.payload)

    def whole(fields: list[tuple[int, int, bytes]]) -> bytes:
        return wire_message([(1, 2, wire_message(fields)), body])

    unknown = [(1000, 0, b"\x05"), (1001, 1, b"x" * 8), (1002, 2, b"tail"), (1003, 5, b"y" * 4)]
    match how:
        case "payload first":
            return wire_message([body, (1, 2, wire_message(fields))])
        case "fields backwards":
            return whole(fields[::-1])
        case "padded varints":
            return wire_message([(1, 2, wire_message(fields, padding=2)), body], padding=2)
        case "unknown fields":
            inside = wire_message(unknown + fields + unknown)
            return wire_message([*unknown, (1, 2, inside), *unknown, body, *unknown])
        case "an unknown group":
            group = b"\xa3\x3f\x08\x01\xa4\x3f"  # field 1012: start, 1: varint 1, end
            return wire_message([(1, 2, group + wire_message(fields)), body]) + group
        case "the header in pieces":
            return wire_message([*((1, 2, wire_message([field])) for field in fields), body])
        case "fields twice, the last one counts":
            wrong = [(number, wire, bytes(len(value))) for number, wire, value in fields if wire == 1]
            return wire_message([(15, 2, b"wrong"), (1, 2, wire_message(wrong + fields)), body])
        case "defaults written out":
            return whole([*fields, (21, 0, b"\0"), (16, 0, b"\0"), (23, 1, bytes(8))])
    raise ValueError(how)


ENCODINGS = [
    "payload first",
    "fields backwards",
    "padded varints",
    "unknown fields",
    "an unknown group",
    "the header in pieces",
    "fields twice, the last one counts",
    "defaults written out",
]


@pytest.mark.parametrize("name", ["small", "target"])
@pytest.mark.parametrize("how", ENCODINGS)
def test_any_encoding_of_a_frame_is_accepted(target: ForeignClient, how: str, name: str) -> None:
    shape = (BIG,) if name == "target" else (SMALL,)
    gradient = normal(shape, 18)
    entry = target.entry(name)
    versions = target.pull(name)[1]
    for k, frame in enumerate(target.gradient_frames(name, gradient, base_version=versions[0], lr=0.25)):
        frame.header.crc32c = encoders.crc32c(frame.payload)
        data = rewritten(frame, how)
        assert data != frame.SerializeToString()
        parsed = target.pb.Frame.FromString(data)
        parsed.DiscardUnknownFields()
        parsed.header.DiscardUnknownFields()
        assert parsed == frame
        stream = target.stream(entry.placement.shards[k])
        stream.send(data)
        answer = stream.receive()
        assert answer.header.tag == frame.header.tag
        assert target.accepted(answer).version == versions[k] + 1
    with unharmed(target):
        pass


# The services


def test_hello_tells_what_the_server_is(foreign: ForeignClient, server: fastps.Server) -> None:
    hellos = [foreign.hello(shard, renew=True) for shard in (0, 1)]
    assert [h.shard for h in hellos] == [0, 1]
    assert all(list(h.cluster) == server.address_list for h in hellos)
    assert all(h.max_message_bytes == 4 << 20 and h.lease_ms > 0 for h in hellos)
    assert all(h.server and h.epoch == hellos[0].epoch for h in hellos)
    assert all(h.role == foreign.pb.ROLE_ADMIN for h in hellos)
    future = foreign.pb.HelloRequest(client=foreign.client, protocol_minor=999)
    assert foreign.call(0, "Hello", future).protocol_minor == hellos[0].protocol_minor


def test_only_shard_0_has_the_map(foreign: ForeignClient) -> None:
    with pytest.raises(Refused) as refused:
        foreign.call(1, "GetMap", foreign.pb.GetMapRequest())
    refusal = refused.value.refusal
    assert (refusal.kind, refusal.shard) == ("config", 1)
    assert "shard 0" in refusal.expected
    assert "shard 1" in refusal.got


def test_the_map_leaves_out_unknown_names(target: ForeignClient) -> None:
    request = target.pb.GetMapRequest(names=["nobody", "small"])
    assert [e.spec.name for e in target.call(0, "GetMap", request).entries] == ["small"]


def test_stats_count(target: ForeignClient) -> None:
    shard = target.entry("small").placement.shards[0]

    def counters() -> dict[str, int]:
        return dict(target.call(shard, "Stats", target.pb.StatsRequest()).counters)

    before = counters()
    target.push("small", np.zeros(SMALL, np.float32))
    bad = target.gradient_frames("small", np.full(SMALL, NAN))
    target.exchange("small", bad)
    after = counters()
    assert after["pushes"] == before["pushes"] + 1
    assert after["refused"] == before["refused"] + 1
    sessions = target.call(shard, "Stats", target.pb.StatsRequest()).sessions
    (mine,) = [s for s in sessions if s.client == target.client]
    assert mine.name == "foreign"
    assert mine.applied > 0


def test_health_answers(foreign: ForeignClient) -> None:
    for channel in foreign.channels:
        stub = health_pb2_grpc.HealthStub(channel)
        for service in ("", "fastps.v1.Control", "fastps.v1.Data"):
            answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=TIMEOUT)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
def test_reflection_answers(foreign: ForeignClient, version: str) -> None:
    # The two versions differ in nothing but their name; grpcio-reflection has the older one.
    call = foreign.channels[0].stream_stream(
        f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )
    requests = [
        reflection_pb2.ServerReflectionRequest(list_services=""),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol="fastps.v1.Header"),
    ]
    services, files = call(iter(requests), timeout=TIMEOUT)
    names = {service.name for service in services.list_services_response.service}
    assert {"fastps.v1.Control", "fastps.v1.Data", "grpc.health.v1.Health"} <= names
    (file,) = map(FileDescriptorProto.FromString, files.file_descriptor_response.file_descriptor_proto)
    mine = FileDescriptorProto()
    foreign.pb.DESCRIPTOR.CopyToProto(mine)
    assert outline(file) == outline(mine)


def outline(file: FileDescriptorProto) -> Any:
    """All that matters on the wire."""
    fields = {m.name: [(f.name, f.number, f.type, f.label) for f in m.field] for m in file.message_type}
    values = {e.name: [(v.name, v.number) for v in e.value] for e in file.enum_type}
    methods = {s.name: [(m.name, m.input_type, m.output_type) for m in s.method] for s in file.service}
    return file.package, fields, values, methods
