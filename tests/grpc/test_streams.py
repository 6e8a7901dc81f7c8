"""Legal but unusual use of a stream, and errors that end one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import encoders
import pytest
from foreign_client import (
    TIMEOUT,
    ForeignClient,
    Message,
    Stream,
    trailing_refusal,
    wire_fields,
    wire_message,
)
from samples import BIG, SMALL, normal, unharmed

import grpc


@contextmanager
def _stream(client: ForeignClient, shard: int) -> Iterator[Stream]:
    stream = Stream(client.stubs, client.channels[shard], client.secret)
    try:
        yield stream
    finally:
        stream.call.cancel()


def ends_with_a_refusal(client: ForeignClient, stream: Stream, shard: int, expected: str, got: str) -> None:
    """An unreadable message: no answer can name its tag or tensor, so the status describes the error."""
    with pytest.raises(grpc.RpcError) as ended:
        stream.receive()
    assert ended.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    refusal = trailing_refusal(client.stubs, ended.value)
    assert (refusal.kind, refusal.HasField("shard"), refusal.shard) == ("frame", True, shard)
    assert expected in refusal.expected
    assert got in refusal.got


def test_a_frame_without_header_is_refused(target: ForeignClient) -> None:
    with unharmed(target), _stream(target, 0) as stream:
        stream.send(target.pb.Frame(payload=b"x"))
        answer = stream.receive()
        assert answer.header.tag == 0
        assert answer.header.refusal.kind == "frame"


def test_a_message_above_the_limit_ends_its_stream_only(target: ForeignClient) -> None:
    with unharmed(target):
        frame = target.gradient_frames("small", normal((SMALL,), 17))[0]
        shard = target.entry("small").placement.shards[0]
        with _stream(target, shard) as stream:
            target.accepted(stream.exchange([target.frame(target.pb.KIND_PULL, target.entry("small"), 0)])[0])
            frame.payload = b"\0" * (4 << 20)
            stream.send(frame)
            got = f"found {frame.ByteSize()} bytes"
            ends_with_a_refusal(target, stream, shard, "at most 4194304 bytes", got)
        with _stream(target, shard) as stream:
            target.accepted(stream.exchange([target.frame(target.pb.KIND_PULL, target.entry("small"), 0)])[0])


def test_bytes_that_are_no_frame_end_their_stream_only(target: ForeignClient) -> None:
    with unharmed(target), _stream(target, 0) as stream:
        stream.send(b"\xff" * 40)
        ends_with_a_refusal(target, stream, 0, "protobuf", "failed to decode")


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
    stream = Stream(target.stubs, target.channels[0], target.secret)
    stream.close()
    assert stream.call.code() == grpc.StatusCode.OK


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
