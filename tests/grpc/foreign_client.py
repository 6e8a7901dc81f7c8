"""A client of the wire protocol in plain grpcio, written from `protos/` only.

The stubs are generated when the tests run. It is also the shortest complete example for a client in another
language: hello, map, registration, one frame per slice, and an answer to each.
"""

from __future__ import annotations

import importlib
import itertools
import queue
import secrets
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, Self

import encoders
import numpy as np
from grpc_status import rpc_status
from numpy.typing import NDArray

import grpc

Message = Any  # a generated message class has no type that a checker knows
Float32 = NDArray[np.float32]
Floats = encoders.Floats
MAX_MESSAGE = 4 << 20
TIMEOUT = 30.0


class Stubs(NamedTuple):
    """The two modules that grpcio-tools makes."""

    pb: ModuleType
    rpc: ModuleType


def generate(protos: Path, into: Path) -> Stubs:
    """Makes and imports the stubs. The root is the file's own folder: with `protos/` the modules would be
    called `fastps.v1...`, and `fastps` is taken by the Python package."""
    root = protos / "fastps" / "v1"
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{root}", f"--python_out={into}"]
    subprocess.run([*command, f"--grpc_python_out={into}", str(root / "fastps.proto")], check=True)
    sys.path.insert(0, str(into))
    try:
        return Stubs(importlib.import_module("fastps_pb2"), importlib.import_module("fastps_pb2_grpc"))
    finally:
        sys.path.remove(str(into))


class Refused(Exception):
    """A frame was refused, or a call ended with a status whose details hold a refusal."""

    def __init__(self, refusal: Message, code: grpc.StatusCode | None = None) -> None:
        super().__init__(f"{refusal.kind}: {refusal.message}")
        self.refusal = refusal
        self.code = code


def trailing_refusal(stubs: Stubs, error: grpc.RpcError) -> Message:
    """The refusal in a status's details, which are read as any gRPC program does; empty without details."""
    refusal = stubs.pb.Refusal()
    status = rpc_status.from_call(error)
    if status is not None:
        assert any(detail.Unpack(refusal) for detail in status.details), status
    return refusal


def proof(secret: bytes | None, token: str | None = None) -> list[tuple[str, bytes | str]]:
    """Metadata that proves that a call or stream is the client's, and who calls."""
    shown: list[tuple[str, bytes | str]] = [] if secret is None else [("fastps-secret-bin", secret)]
    return shown if token is None else [*shown, ("authorization", f"Bearer {token}")]


class Stream:
    """One data stream to one shard. Frames are messages, or bytes where a test writes the wire by hand."""

    def __init__(
        self,
        stubs: Stubs,
        channel: grpc.Channel,
        secret: bytes | None,
        timeout: float = 4 * TIMEOUT,
        token: str | None = None,
    ) -> None:
        self._pb = stubs.pb
        self._out: queue.SimpleQueue[Message | bytes | None] = queue.SimpleQueue()
        exchange = channel.stream_stream(
            "/fastps.v1.Data/Exchange",
            request_serializer=lambda m: m if isinstance(m, bytes) else m.SerializeToString(),
            response_deserializer=stubs.pb.Frame.FromString,
        )
        self.call = exchange(iter(self._out.get, None), timeout=timeout, metadata=proof(secret, token))

    def send(self, frame: Message | bytes) -> None:
        """Puts a frame on its way."""
        self._out.put(frame)

    def receive(self) -> Message:
        """The next answer, whichever it is."""
        return next(self.call)

    def exchange(self, frames: Iterable[Message]) -> list[Message]:
        """Sends frames, and returns their answers in the same order."""
        tags = []
        for frame in frames:
            tags.append(frame.header.tag)
            self.send(frame)
        answers = {answer.header.tag: answer for answer in (self.receive() for _ in tags)}
        assert sorted(answers) == sorted(tags), "every frame is answered once"
        return [answers[tag] for tag in tags]

    def close(self) -> None:
        """Half-closes and waits for the server to do the same."""
        self._out.put(None)
        assert list(self.call) == []


class ForeignClient:
    """One client incarnation with a channel and a stream to each shard."""

    def __init__(
        self,
        stubs: Stubs,
        addresses: Iterable[str],
        *,
        client: int | None = None,
        secret: bytes | None = None,
        hello: bool = True,
        credentials: grpc.ChannelCredentials | None = None,
        token: str | None = None,
    ) -> None:
        self.stubs, self.pb = stubs, stubs.pb
        options = [
            ("grpc.max_send_message_length", -1),
            ("grpc.max_receive_message_length", MAX_MESSAGE),
            # Each client object has its own connections.
            ("grpc.use_local_subchannel_pool", 1),
        ]
        if credentials is None:
            self.channels = [grpc.insecure_channel(address, options) for address in addresses]
        else:
            self.channels = [grpc.secure_channel(address, credentials, options) for address in addresses]
        self.controls = [stubs.rpc.ControlStub(channel) for channel in self.channels]
        self.streams: dict[int, Stream] = {}
        self.client = client if client is not None else secrets.randbits(64) | 1
        self.secret: bytes | None = secret if secret is not None else secrets.token_bytes(16)
        self.token = token
        self.sequence = 0
        self.epoch = 0
        self._tags = itertools.count(1)
        self._entries: dict[str, Message] = {}
        if hello:
            for shard in range(len(self.channels)):
                self.hello(shard)

    def close(self) -> None:
        """Ends streams and channels."""
        for stream in self.streams.values():
            stream.call.cancel()
        for channel in self.channels:
            channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Control

    def call(self, shard: int, method: str, request: Message) -> Message:
        """A unary call; a refusal raises `Refused`."""
        try:
            call = getattr(self.controls[shard], method)
            return call(request, timeout=TIMEOUT, metadata=proof(self.secret, self.token))
        except grpc.RpcError as error:
            refusal = trailing_refusal(self.stubs, error)
            if not refusal.kind:
                raise
            raise Refused(refusal, error.code()) from None

    def hello(self, shard: int, *, renew: bool = False) -> Message:
        """Opens (or renews) the session with one shard."""
        request = self.pb.HelloRequest(
            protocol_minor=1, client=self.client, name="foreign", renew=renew, secret=self.secret
        )
        response = self.call(shard, "Hello", request)
        self.epoch = response.epoch
        return response

    def spec(
        self,
        name: str,
        shape: Iterable[int],
        optimizer: str = "sgd",
        settings: Mapping[str, float] | None = None,
        **fields: Any,
    ) -> Message:
        """A tensor's spec; by default float32, exact and in the default group."""
        fields = {"dtype": self.pb.DTYPE_FLOAT32, "apply": self.pb.APPLY_EXACT, "group": "default"} | fields
        rule = self.pb.Optimizer(name=optimizer, settings=settings or {})
        return self.pb.TensorSpec(name=name, shape=list(shape), optimizer=rule, **fields)

    def register(self, spec: Message, values: Floats) -> bool:
        """The registration protocol, all four steps; false if the tensor existed with this very spec."""
        request = self.pb.RegisterRequest(spec=spec, client=self.client)
        deadline = time.monotonic() + TIMEOUT
        while (first := self.call(0, "Register", request)).under_way:
            assert time.monotonic() < deadline, "the other registration takes too long"
            time.sleep(first.retry_after_ms / 1000)
        if first.exists:
            return False
        placement = first.placement
        self.sequence += 1
        for shard in sorted(set(placement.shards)):
            indices = [k for k, s in enumerate(placement.shards) if s == shard]
            self.call(shard, "Reserve", self.reserve_request(spec, first, indices))
            entry = self.pb.MapEntry(spec=spec, placement=placement)
            frames = [self.assign_frame(entry, k, values, first.reservation) for k in indices]
            for answer in self.stream(shard).exchange(frames):
                self.accepted(answer)
            self.call(shard, "Seal", self.pb.SealRequest(reservation=first.reservation))
        commit = self.pb.CommitRequest(reservation=first.reservation, client=self.client)
        self.call(0, "Commit", commit)
        return True

    def reserve_request(self, spec: Message, first: Message, indices: Iterable[int]) -> Message:
        """The second step, for these slices of the tensor."""
        indices = list(indices)
        return self.pb.ReserveRequest(
            reservation=first.reservation,
            spec=spec,
            slices=[first.placement.slices[k] for k in indices],
            indices=indices,
            group=first.placement.group,
            client=self.client,
        )

    def names(self) -> list[str]:
        """All tensors, page by page."""
        names: list[str] = []
        after = ""
        while True:
            page = self.call(0, "GetMap", self.pb.GetMapRequest(after=after, page_size=2))
            names += [entry.spec.name for entry in page.entries]
            after = page.next
            if not after:
                return names

    def entry(self, name: str) -> Message:
        """Spec and placement of one tensor, from the map."""
        if name not in self._entries:
            (self._entries[name],) = self.call(0, "GetMap", self.pb.GetMapRequest(names=[name])).entries
        return self._entries[name]

    # Data

    def stream(self, shard: int) -> Stream:
        """The stream to a shard, opened when it is first needed."""
        if shard not in self.streams:
            self.streams[shard] = Stream(self.stubs, self.channels[shard], self.secret, token=self.token)
        return self.streams[shard]

    def frame(self, kind: int, entry: Message, index: int, payload: bytes = b"", **fields: Any) -> Message:
        """A frame for slice `index` of a tensor."""
        header = self.pb.Header(
            kind=kind,
            tag=next(self._tags),
            slice=entry.placement.slices[index],
            group=entry.placement.group,
            epoch=self.epoch,
            client=self.client,
        )
        for field, value in fields.items():
            setattr(header, field, value)
        return self.pb.Frame(header=header, payload=payload)

    def body_frame(
        self, kind: int, entry: Message, index: int, codec: int, body: bytes, **fields: Any
    ) -> Message:
        """A frame that carries values of slice `index`."""
        count = slice_of(entry, index).stop - slice_of(entry, index).start
        fields = {"sequence": self.sequence, "dtype": entry.spec.dtype, "count": count} | fields
        return self.frame(kind, entry, index, body, codec=codec, **fields)

    def gradient_frames(
        self,
        name: str,
        gradient: Floats,
        codec: int = encoders.FLOAT32,
        *,
        seed: int | None = None,
        **fields: Any,
    ) -> list[Message]:
        """One frame per slice, all with the next sequence number."""
        self.sequence += 1
        entry = self.entry(name)
        frames = []
        for index in range(len(entry.placement.slices)):
            part = slice_of(entry, index)
            values = gradient.reshape(-1)[part]
            body = encoders.encode(codec, values, seed=seed, first=part.start, sequence=self.sequence)
            frames.append(self.body_frame(self.pb.KIND_GRADIENT, entry, index, codec, body, **fields))
        return frames

    def assign_frame(self, entry: Message, index: int, values: Floats, reservation: int = 0) -> Message:
        """Values for one slice; with a reservation, its initial ones."""
        codec = encoders.FLOAT64 if is_float64(entry) else encoders.FLOAT32
        body = encoders.encode(codec, values.reshape(-1)[slice_of(entry, index)])
        fields = {"reservation": reservation}
        return self.body_frame(self.pb.KIND_ASSIGN, entry, index, codec, body, **fields)

    def exchange(self, name: str, frames: Iterable[Message]) -> list[Message]:
        """Sends each slice's frame to the shard that holds it; the answers in the same order."""
        frames = list(frames)
        shards = dict(zip(self.entry(name).placement.slices, self.entry(name).placement.shards, strict=True))
        answers: dict[int, Message] = {}
        for shard in sorted(set(shards.values())):
            mine = [frame for frame in frames if shards[frame.header.slice] == shard]
            answers |= {a.header.tag: a for a in self.stream(shard).exchange(mine)}
        return [answers[frame.header.tag] for frame in frames]

    def accepted(self, answer: Message) -> Message:
        """The header of an answer that is not a refusal."""
        if answer.header.kind == self.pb.KIND_REFUSED:
            raise Refused(answer.header.refusal)
        return answer.header

    def push(
        self, name: str, gradient: Floats, codec: int = encoders.FLOAT32, **fields: Any
    ) -> list[Message]:
        """Pushes a gradient; the receipts' headers, one per slice."""
        answers = self.exchange(name, self.gradient_frames(name, gradient, codec, **fields))
        return [self.accepted(answer) for answer in answers]

    def pull(self, name: str) -> tuple[Any, list[int]]:
        """The values, and the version of each slice."""
        entry = self.entry(name)
        indices = range(len(entry.placement.slices))
        answers = self.exchange(name, [self.frame(self.pb.KIND_PULL, entry, k) for k in indices])
        versions = [self.accepted(answer).version for answer in answers]
        values = np.concatenate([np.frombuffer(answer.payload, value_type(entry)) for answer in answers])
        return values.reshape(tuple(entry.spec.shape)), versions

    def pull_state(self, name: str) -> list[tuple[int, Any]]:
        """Step count and state of each slice, all slots concatenated."""
        entry = self.entry(name)
        indices = range(len(entry.placement.slices))
        answers = self.exchange(name, [self.frame(self.pb.KIND_PULL_STATE, entry, k) for k in indices])
        return [(self.accepted(a).step, np.frombuffer(a.payload, value_type(entry))) for a in answers]


def is_float64(entry: Message) -> bool:
    return entry.spec.dtype == 2  # DTYPE_FLOAT64


def value_type(entry: Message) -> str:
    """NumPy's name of the values on the wire."""
    return "<f8" if is_float64(entry) else "<f4"


def slice_of(entry: Message, index: int) -> slice:
    """The elements of slice `index` of a tensor."""
    n = int(np.prod(entry.spec.shape, dtype=np.uint64))
    length = encoders.FLOAT64_SLICE_LEN if is_float64(entry) else encoders.SLICE_LEN
    return slice(index * length, min((index + 1) * length, n))


def wire_fields(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    """The fields of a serialized message: number, wire type, value (of a varint: its bytes)."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while at < len(data):
        key = varint()
        start = at
        match key & 7:
            case 0:
                varint()
                yield key >> 3, 0, data[start:at]
            case 1 | 5 as wire:
                at += 8 if wire == 1 else 4
                yield key >> 3, wire, data[start:at]
            case 2:
                length = varint()
                at += length
                yield key >> 3, 2, data[at - length : at]
            case other:
                raise ValueError(f"wire type {other}")


def wire_varint(value: int, padding: int = 0) -> bytes:
    """A varint, with `padding` bytes that say nothing."""
    groups = []
    while True:
        groups.append(value & 0x7F)
        value >>= 7
        if not value:
            break
    groups += [0] * padding
    return bytes(g | 0x80 for g in groups[:-1]) + bytes(groups[-1:])


def wire_message(fields: Iterable[tuple[int, int, bytes]], padding: int = 0) -> bytes:
    """The reverse of `wire_fields`; with `padding`, no varint is as short as it could be."""
    out = b""
    for number, wire, value in fields:
        out += wire_varint(number << 3 | wire, padding)
        if wire == 2:
            out += wire_varint(len(value), padding)
        if wire == 0:
            value = wire_varint(sum((b & 0x7F) << 7 * i for i, b in enumerate(value)), padding)
        out += value
    return out
