"""Bad frames: each leaves values and versions unchanged, and the server keeps working."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import encoders
import numpy as np
from encoders import BFLOAT16, FLOAT32, FOURBIT, INT8, ONEBIT
from foreign_client import ForeignClient, Message
from samples import BIG, SMALL, normal, unharmed

from cases import case

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


def vector_field(client: ForeignClient, frame: Message) -> None:
    frame.header.vector.space = 1


def portion_field(client: ForeignClient, frame: Message) -> None:
    frame.header.portion.space = 1


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
    "fourbit body cut short": ("small", FOURBIT, cut(-1), "frame", True, "8", "7"),
    "fourbit body too long": ("small", FOURBIT, add(b"\0"), "frame", True, "8", "9"),
    "wrong CRC": ("small", FLOAT32, wrong_crc, "frame", True, "CRC", "0x"),
    "unknown codec": ("small", FLOAT32, header(codec=9), "frame", True, "1 to 6", "9"),
    "no codec": ("small", FLOAT32, header(codec=0), "frame", True, "1 to 6", "0"),
    "another codec than the body's": ("small", FLOAT32, header(codec=INT8), "frame", True, "14", "52"),
    "unknown kind": ("small", FLOAT32, header(kind=99), "frame", True, "", "99"),
    "no kind": ("small", FLOAT32, header(kind=0), "frame", True, "", "UNSPECIFIED"),
    "an answer's kind": ("small", FLOAT32, header(kind=16), "frame", True, "", "KIND_RECEIPT"),
    "reserved kind DELTA": ("small", FLOAT32, header(kind=7), "frame", True, "", "KIND_DELTA"),
    "a program with a count": ("small", FLOAT32, header(kind=8), "frame", True, "unset", ""),
    "a portion with a sequence": ("small", FLOAT32, header(kind=10), "frame", True, "unset", ""),
    "a portion of nothing": ("small", FLOAT32, header(kind=10, sequence=0), "frame", True, "", ""),
    "vector on a gradient": ("small", FLOAT32, vector_field, "frame", True, "unset", "a message"),
    "portion on a gradient": ("small", FLOAT32, portion_field, "frame", True, "unset", "a message"),
    "int8 -128": (*body_byte(INT8, 6, 0x80), "frame", True, "-127", "-128"),
    "int8 scale 1": (*body_byte(INT8, 0, 1), "frame", True, "32 to 254", "1"),
    "int8 scale 31": (*body_byte(INT8, 0, 31), "frame", True, "32 to 254", "31"),
    "int8 scale 255": (*body_byte(INT8, 0, 255), "frame", True, "32 to 254", "255"),
    "fourbit scale 31": (*body_byte(FOURBIT, 0, 31), "frame", True, "32 to 254", "31"),
    "fourbit scale 255": (*body_byte(FOURBIT, 0, 255), "frame", True, "32 to 254", "255"),
    "fourbit non-zero under scale 0": (*body_byte(FOURBIT, 0, 0), "frame", True, "scale is 0", ""),
    "fourbit zero with a sign": (*body_byte(FOURBIT, 1, 0x80), "frame", True, "without a sign", "8"),
    "fourbit element 14 of 13": (*body_byte(FOURBIT, 7, 0x11), "frame", True, "no such element", "1"),
    "int8 non-zero under scale 0": ("small", INT8, zero_scale, "frame", True, "0", "1"),
    "onebit pad bits": (*body_byte(ONEBIT, 9, 0xFF), "frame", True, "zero", "0xff"),
    "onebit negative mean": ("small", ONEBIT, negative_mean, "frame", True, "finite", "-1"),
    "onebit NaN mean": ("small", ONEBIT, nan_mean, "frame", True, "finite", "NaN"),
    "weight in a free group": ("small", FLOAT32, header(weight=0.5), "precondition", True, "unset", "0.5"),
    "weight of nothing": ("small", FLOAT32, header(weight=0.0), "config", True, "> 0", "0"),
    "weight below 0": ("small", FLOAT32, header(weight=-1.0), "config", True, "> 0", "-1"),
    "weight infinite": ("small", FLOAT32, header(weight=np.inf), "config", True, "> 0", "inf"),
    "weight NaN": ("small", FLOAT32, header(weight=np.nan), "config", True, "> 0", "NaN"),
    "reserved field have_version": ("small", FLOAT32, header(have_version=1), "frame", True, "unset", "1"),
    "reserved field min_version": ("small", FLOAT32, header(min_version=7), "frame", True, "unset", "7"),
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
    "float64": ("small", FLOAT32, header(dtype=2), "dtype", True, "float32", "float64"),
    "bfloat16": ("small", FLOAT32, header(dtype=3), "dtype", True, "float32", "bfloat16"),
    "codec of float64": ("small", FLOAT32, header(codec=5), "dtype", True, "float32", "Float64"),
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
    "a compressed assignment": ("small", INT8, compressed_assign, "frame", True, "Float32", "Int8"),
}


def test_a_bad_frame_is_refused(target: ForeignClient) -> None:
    for what in BAD_FRAMES:
        with case(what):
            is_refused(target, *BAD_FRAMES[what])


def is_refused(
    target: ForeignClient,
    name: str,
    codec: int,
    spoil: Spoil,
    kind: str,
    names_tensor: bool,
    expected: str,
    got: str,
) -> None:
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
