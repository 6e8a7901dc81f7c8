"""Pulls in bfloat16: the same bits from a store and a server, in half of the bytes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from between import between
from encoders import BFLOAT16, FLOAT32, INT8
from foreign_client import ForeignClient, Message, Stubs
from samples import BIG, FreshName, normal
from test_earlier_server import earlier
from test_parts import Parts

import fastps
from cases import case
from reference_rounding import Bits, nearest, widen

#: Ties, the largest finite value, a subnormal, -0.0 and a run of others.
HARD = np.array([0x3F808000, 0x3F818000, 0x7F7FFFFF, 0xFF7FFFFF, 1, 0x80000000, 0x00018000], np.uint32)
SIZES = {"big": BIG, "one": 1, "some": 300, "none": 0, "wide": 63 * 4096}


def values_of(size: int) -> Any:
    values = normal((size,), size)
    hard = HARD[:size].view(np.float32)
    values[: hard.size] = hard
    return values


def bits(array: Any) -> Bits:
    return np.asarray(array).view(np.uint16)


def same(got: Any, expected: Bits) -> None:
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got.view(np.uint32), widen(expected).view(np.uint32))


def check(ps: fastps.ParameterServer, arrays: dict[str, Any]) -> None:
    """All ways to pull registered tensors in bfloat16."""
    codec, names = fastps.BFloat16(), list(arrays)
    expected = {name: nearest(values) for name, values in arrays.items()}
    pulled, versions = ps.pull(names, codec=codec, versions=True)
    for name in names:
        with case(name):
            same(pulled[name], expected[name])
            same(ps.pull(name, codec=codec), expected[name])
            half = np.empty(arrays[name].shape, ml_dtypes.bfloat16)
            assert ps.pull(name, out=half) is half
            np.testing.assert_array_equal(bits(half), expected[name])
            ps.pull(name, out=half, codec=codec)
            np.testing.assert_array_equal(bits(half), expected[name])
    own = ps.pull(names, versions=True)[1]
    assert [versions[name] for name in names] == [own[name] for name in names]
    # Each array gets its own type.
    out = {
        name: np.empty(values.shape, ml_dtypes.bfloat16 if k % 2 else np.float32)
        for k, (name, values) in enumerate(arrays.items())
    }
    ps.pull(names, out=out)
    for k, name in enumerate(names):
        if k % 2:
            np.testing.assert_array_equal(bits(out[name]), expected[name])
        else:
            assert out[name].tobytes() == arrays[name].tobytes()


def register(ps: fastps.ParameterServer) -> dict[str, Any]:
    arrays = {name: values_of(size) for name, size in SIZES.items()}
    ps.register(arrays, optimizer=fastps.SGD(lr=1.0), average=fastps.EMA(0.5))
    for name, values in arrays.items():
        ps.push(name, values / 3)
    now: dict[str, Any] = ps.pull(list(arrays))
    return now


def test_all_ways_have_the_same_bits(ps: fastps.ParameterServer) -> None:
    arrays = register(ps)
    check(ps, arrays)
    averages = {name: ps.pull(name, view="average") for name in arrays}
    for name, average in averages.items():
        same(ps.pull(name, view="average", codec=fastps.BFloat16()), nearest(average))
        half = np.empty(average.shape, ml_dtypes.bfloat16)
        ps.pull(name, view="average", out=half)
        np.testing.assert_array_equal(bits(half), nearest(average))
    out = {name: np.empty(values.shape, ml_dtypes.bfloat16) for name, values in arrays.items()}
    ps.push_pull({name: np.zeros_like(values) for name, values in arrays.items()}, out=out)
    for name, values in arrays.items():
        np.testing.assert_array_equal(bits(out[name]), nearest(values))
    ps.register("half", arrays["some"], fastps.SGD(), dtype="bfloat16")
    same(ps.pull("half", codec=fastps.BFloat16()), nearest(arrays["some"]))
    # Copies of racing memory, too.
    with fastps.Store() as store:
        store.register("h", np.full(2, 3e38, np.float32), fastps.SGD(lr=1.0), apply="hogwild")
        same(store.pull("h", codec=fastps.BFloat16()), nearest(store.pull("h")))


def test_over_every_transport_and_from_an_earlier_server(stubs: Stubs, tmp_path: Path) -> None:
    with fastps.serve() as server, ExitStack() as clients:
        for transport in ("tcp", "unix", "shm"):
            ps = clients.enter_context(
                fastps.connect(server.addresses, transport=transport, namespace=transport)
            )
            with case(transport):
                assert {how.partition(":")[0] for how in ps.transport.values()} == {transport}
                check(ps, register(ps))
        address = clients.enter_context(between(server.addresses, change=earlier(stubs, "pull-codec")))
        ps = clients.enter_context(fastps.connect(address, namespace="earlier"))
        check(ps, register(ps))


def test_half_of_the_bytes_come(ps: fastps.ParameterServer) -> None:
    if isinstance(ps, fastps.Store):
        pytest.skip("a store sends nothing")
    values = normal((100_000,), 1)
    ps.register("bytes", values, fastps.SGD())

    def received(**options: Any) -> int:
        before = ps.stats()["client"]["bytes_pulled"]
        ps.pull("bytes", **options)
        return int(ps.stats()["client"]["bytes_pulled"] - before)

    assert received() == 400_000
    half = np.empty(values.shape, ml_dtypes.bfloat16)
    assert [received(codec=fastps.BFloat16()), received(out=half)] == [200_000, 200_000]


def test_the_bytes_on_the_wire(foreign: ForeignClient, fresh_name: FreshName) -> None:
    name, values, pb = fresh_name("big"), values_of(BIG), foreign.pb
    foreign.register(foreign.spec(name, (BIG,), "sgd", {"lr": 1.0}), values)
    entry = foreign.entry(name)
    frames = [foreign.frame(pb.KIND_PULL, entry, k, codec=BFLOAT16) for k in range(3)]
    answers = foreign.exchange(name, frames)
    got = np.concatenate([np.frombuffer(answer.payload, "<u2") for answer in answers])
    np.testing.assert_array_equal(got, nearest(values))
    for answer in answers:
        header = foreign.accepted(answer)
        assert (header.codec, header.dtype, 2 * header.count) == (
            BFLOAT16,
            pb.DTYPE_FLOAT32,
            len(answer.payload),
        )


def test_small_slices_share_a_message(foreign: ForeignClient, fresh_name: FreshName) -> None:
    names, pb = [fresh_name(f"part of {size}") for size in (1, 0, 65, 1024)], foreign.pb
    arrays = {name: values_of(int(name.split()[2])) for name in names}
    for name, values in arrays.items():
        foreign.register(foreign.spec(name, values.shape, "sgd", {"lr": 1.0}), values)
    wide = fresh_name("float64")
    foreign.register(foreign.spec(wide, (3,), "sgd", {"lr": 1.0}, dtype=pb.DTYPE_FLOAT64), np.zeros(3))
    parts = Parts(foreign, [*names, wide])
    for shard in parts.shards():
        own = [name for name in parts.of_shard(shard) if name != wide]
        both = [*own, wide] if wide in parts.of_shard(shard) else own
        if not own:
            continue
        answer = parts.send(shard, parts.frame(pb.KIND_PULL, both, codec=BFLOAT16))
        header = foreign.accepted(answer)
        assert (header.codec, header.dtype) == (BFLOAT16, pb.DTYPE_FLOAT32)
        expected = np.concatenate([nearest(arrays[name]) for name in own])
        assert answer.payload == expected.astype("<u2").tobytes()
        refused = {both[refusal.part]: refusal.refusal.kind for refusal in header.table.refusals}
        assert refused == ({wide: "dtype"} if wide in both else {})


def test_bad_frames(foreign: ForeignClient, fresh_name: FreshName) -> None:
    pb = foreign.pb
    names = {"float32": fresh_name("float32"), "float64": fresh_name("float64")}
    foreign.register(foreign.spec(names["float32"], (3,), "sgd", {"lr": 1.0}), np.ones(3, np.float32))
    spec = foreign.spec(names["float64"], (3,), "sgd", {"lr": 1.0}, dtype=pb.DTYPE_FLOAT64)
    foreign.register(spec, np.ones(3))

    def rows(frame: Message) -> None:
        frame.header.parts.add(slice=frame.header.slice, count=1)
        frame.header.slice, frame.payload = 0, b"\0" * 4

    def vector(frame: Message) -> None:
        frame.header.vector.space = 1

    nothing: Callable[[Message], None] = lambda frame: None  # noqa: E731
    bad = {
        "float32": ("float32", pb.KIND_PULL, FLOAT32, nothing, "frame", "CODEC_BFLOAT16"),
        "int8": ("float32", pb.KIND_PULL, INT8, nothing, "frame", "CODEC_BFLOAT16"),
        "unknown": ("float32", pb.KIND_PULL, 99, nothing, "frame", "CODEC_BFLOAT16"),
        "float64": ("float64", pb.KIND_PULL, BFLOAT16, nothing, "dtype", "float32 or bfloat16"),
        "rows": ("float32", pb.KIND_PULL, BFLOAT16, rows, "frame", "unset"),
        "vector": ("float32", pb.KIND_PULL, BFLOAT16, vector, "frame", "unset"),
        "state": ("float32", pb.KIND_PULL_STATE, BFLOAT16, nothing, "frame", "unset"),
        "version": ("float32", pb.KIND_PULL_VERSION, BFLOAT16, nothing, "frame", "unset"),
    }
    for what, (tensor, kind, codec, spoil, refused, expected) in bad.items():
        with case(what):
            entry = foreign.entry(names[tensor])
            frame = foreign.frame(kind, entry, 0, codec=codec)
            spoil(frame)
            (answer,) = foreign.stream(entry.placement.shards[0]).exchange([frame])
            assert answer.header.kind == pb.KIND_REFUSED
            refusal = answer.header.refusal
            assert refusal.kind == refused, refusal
            assert expected in refusal.expected, refusal
            assert refusal.got, refusal
            assert refusal.tensor == ("" if what == "rows" else names[tensor]), refusal
    assert foreign.pull(names["float32"])[0].tolist() == [1, 1, 1]


def test_what_is_refused_before_it_is_sent(ps: fastps.ParameterServer) -> None:
    ps.register("refused", np.ones(3, np.float32), fastps.SGD())
    ps.register("double", np.ones(3), fastps.SGD())
    half = np.empty(3, ml_dtypes.bfloat16)
    bad: dict[str, tuple[type[fastps.FastpsError], Callable[[], Any]]] = {
        "no such codec.*BFloat16.*Int8": (
            fastps.ConfigError,
            lambda: ps.pull("refused", codec=fastps.Int8()),  # type: ignore[call-overload]
        ),
        "rows have no codec": (
            fastps.ConfigError,
            lambda: ps.pull("refused", indices=[0], codec=fastps.BFloat16()),
        ),
        "(?s)bfloat16.*float64": (fastps.DTypeError, lambda: ps.pull("double", codec=fastps.BFloat16())),
        "(?s)out=.*float64.*bfloat16": (fastps.DTypeError, lambda: ps.pull("double", out=half)),
    }
    for match, (error, pull) in bad.items():
        with case(match), pytest.raises(error, match=match):
            pull()
    with pytest.raises(fastps.DTypeError) as refused:
        ps.pull(["refused", "double"], codec=fastps.BFloat16())
    error = refused.value
    assert (error.tensor, error.expected, error.got) == ("double", "float32 or bfloat16", "float64")
