"""Servers that answer nonsense, or nothing: typed errors within the deadline."""

from __future__ import annotations

import importlib
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import grpc
from clients.driver import Driver, packed

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_MS = 700
#: Seconds that a loaded machine may add.
LATE = 1.5


@pytest.fixture(scope="session")
def pb(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """The messages, as protoc makes them."""
    into, root = tmp_path_factory.mktemp("stubs"), ROOT / "protos/fastps/v1"
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{root}", f"--python_out={into}"]
    subprocess.run([*command, str(root / "fastps.proto")], check=True)
    sys.path.insert(0, str(into))
    try:
        return importlib.import_module("fastps_pb2")
    finally:
        sys.path.remove(str(into))


class Liar(grpc.GenericRpcHandler):
    """A server of one shard and one tensor, "w" of 10 floats, some of whose answers are replaced."""

    def __init__(self, pb: ModuleType, **answers: Any) -> None:
        self.pb, self.answers, self.address = pb, answers, ""

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        method = details.method.rpartition("/")[2]
        if method == "Exchange":
            return grpc.stream_stream_rpc_method_handler(self.exchange)
        return grpc.unary_unary_rpc_method_handler(lambda request, _: self.unary(method))

    def unary(self, method: str) -> bytes:
        answer = self.answers.get(method, getattr(self, method))
        answer = answer() if callable(answer) else answer
        return answer if isinstance(answer, bytes) else answer.SerializeToString()

    def Hello(self) -> Any:
        return self.pb.HelloResponse(
            protocol_minor=1, server=7, cluster=[self.address], lease_ms=10_000, epoch=1, cluster_id=9
        )

    def GetMap(self) -> Any:
        spec = self.pb.TensorSpec(name="w", shape=[10], dtype=1, apply=1, group="default")
        placement = self.pb.Placement(slices=[5], shards=[0], group=1)
        return self.pb.GetMapResponse(epoch=1, entries=[self.pb.MapEntry(spec=spec, placement=placement)])

    def exchange(self, frames: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        for frame in frames:
            request = self.pb.Frame.FromString(frame)
            answer = self.answers["Exchange"](request.header)
            if answer is None:
                return
            yield from (one if isinstance(one, bytes) else one.SerializeToString() for one in answer)


@pytest.fixture
def liars(pb: ModuleType) -> Iterator[Callable[..., str]]:
    servers = []

    def start(**answers: Any) -> str:
        liar = Liar(pb, **answers)
        server = grpc.server(futures.ThreadPoolExecutor(8), handlers=[liar])
        liar.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        servers.append(server)
        return liar.address

    yield start
    for server in servers:
        server.stop(None).wait()


def test_a_hello_that_makes_no_sense(
    liars: Callable[..., str], drivers: Callable[..., Driver], pb: Any
) -> None:
    ends = threading.Event()
    cases: dict[str, tuple[Any, set[str]]] = {
        "empty": (pb.HelloResponse(), {"config"}),
        "another shard": (pb.HelloResponse(protocol_minor=1, shard=3, cluster=["a:1", "b:1"]), {"config"}),
        "5,000 shards": (pb.HelloResponse(protocol_minor=1, cluster=["a:1"] * 5000), {"config"}),
        "an older protocol": (pb.HelloResponse(cluster=["a:1"]), {"config"}),
        "no message": (b"\xff" * 40, {"internal", "connection"}),
        "nothing": (lambda: ends.wait(60) and b"", {"deadline", "connection"}),
    }
    try:
        for case, (reply, kinds) in cases.items():
            driver = drivers([liars(Hello=reply)], connected=False)
            answer = driver.connect(timeout_ms=DEADLINE_MS)
            assert answer["error"]["kind"] in kinds, (case, answer)
            assert answer["seconds"] < DEADLINE_MS / 1000 + LATE, (case, answer)
    finally:
        ends.set()


def test_a_port_that_speaks_something_else(drivers: Callable[..., Driver]) -> None:
    replies = {b"HTTP/1.1 400 Bad Request\r\n\r\n": "config", b"\0" * 100: "connection", b"": "connection"}
    for reply, kind in replies.items():
        with socket.create_server(("127.0.0.1", 0)) as listener:

            def serve(listener: socket.socket = listener, reply: bytes = reply) -> None:
                while True:
                    try:
                        connection, _ = listener.accept()
                    except OSError:
                        return
                    with connection:
                        connection.sendall(reply)

            thread = threading.Thread(target=serve)
            thread.start()
            driver = drivers([f"127.0.0.1:{listener.getsockname()[1]}"], connected=False)
            answer = driver.connect(timeout_ms=DEADLINE_MS)
            assert answer["error"]["kind"] == kind, (reply, answer)
            assert answer["seconds"] < DEADLINE_MS / 1000 + LATE, (reply, answer)
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(10)


def test_maps_that_make_no_sense(liars: Callable[..., str], drivers: Callable[..., Driver], pb: Any) -> None:
    def placed(shape: list[int], slices: list[int], shards: list[int]) -> Any:
        spec = pb.TensorSpec(name="w", shape=shape, dtype=1, apply=1, group="default")
        entry = pb.MapEntry(spec=spec, placement=pb.Placement(slices=slices, shards=shards, group=1))
        return pb.GetMapResponse(epoch=1, entries=[entry])

    cases: dict[str, tuple[Any, set[str]]] = {
        "no slices": (placed([10], [], []), {"frame"}),
        "a shard that is not there": (placed([10], [5], [4]), {"frame"}),
        "too many slices": (placed([10], [5, 6], [0, 0]), {"frame"}),
        "too large": (placed([2**40, 2**40], [5], [0]), {"frame"}),
        "no message": (b"\xff" * 40, {"internal", "connection"}),
        "no such page": (pb.GetMapResponse(epoch=1, next=""), {"unknown_tensor"}),
    }
    for case, (reply, kinds) in cases.items():
        driver = drivers([liars(GetMap=reply, Exchange=lambda _: [])])
        answer = driver.ask("pull", tensors=["w"], timeout_ms=DEADLINE_MS)
        assert answer["error"]["kind"] in kinds, (case, answer)
        driver.do("close")


def test_answers_that_make_no_sense(
    liars: Callable[..., str], drivers: Callable[..., Driver], pb: Any
) -> None:
    def frame(header: Any, kind: int, payload: bytes = b"", **fields: Any) -> Any:
        return pb.Frame(header=pb.Header(kind=kind, tag=header.tag, **fields), payload=payload)

    def wrong(header: Any) -> list[Any]:
        """Of a kind that the request cannot have."""
        return [frame(header, pb.KIND_FENCED if header.kind != pb.KIND_RESOLVE else pb.KIND_VERSION)]

    cases: dict[str, tuple[Callable[[Any], Any], set[str]]] = {
        "wrong kind": (wrong, {"frame"}),
        "too short": (lambda h: [frame(h, pb.KIND_VALUES, b"123")], {"frame"}),
        "a refusal without a reason": (lambda h: [frame(h, pb.KIND_REFUSED)], {"internal"}),
        "an unknown refusal": (
            lambda h: [frame(h, pb.KIND_REFUSED, refusal=pb.Refusal(kind="tomorrow"))],
            {"internal"},
        ),
        "other tags": (lambda h: [pb.Frame(header=pb.Header(kind=16, tag=h.tag + 99))], {"deadline"}),
        "lent values": (lambda h: [frame(h, pb.KIND_VALUES, bytes(40), lent=pb.Lent(bytes=40))], {"frame"}),
        "no header": (lambda h: [pb.Frame()], {"deadline", "frame"}),
        "no message": (lambda h: [b"\xff" * 40], {"deadline", "internal", "connection"}),
        "the end": (lambda h: None, {"deadline", "connection"}),
        "nothing": (lambda h: [], {"deadline"}),
    }
    ones = [{"tensor": "w", "values": packed(np.ones(10))}]
    for case, (reply, kinds) in cases.items():
        driver = drivers([liars(Exchange=reply)])
        for op, fields in (("pull", {"tensors": ["w"]}), ("push", {"gradients": ones})):
            answer = driver.ask(op, timeout_ms=DEADLINE_MS, **fields)
            assert answer["error"]["kind"] in kinds, (case, op, answer)
            assert answer["seconds"] < DEADLINE_MS / 1000 + LATE, (case, answer)
            if op == "push" and case in ("wrong kind", "other tags", "lent values", "nothing"):
                # The server may have applied it, on the stream that still lives.
                assert answer["error"]["in_doubt"] == 1, (case, answer)
        driver.do("close")
