"""A client and a server of an earlier version: what would train another model is refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from foreign_client import Stubs

import fastps
import grpc

#: What `Hello` of an earlier server does not list.
NEW = "staleness-matching"


class Earlier(grpc.GenericRpcHandler):
    """Passes calls and streams on to a server, and leaves the capability out of its answers."""

    def __init__(self, stubs: Stubs, address: str) -> None:
        self._pb, self._channel = stubs.pb, grpc.insecure_channel(address)

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        method = details.method
        if method.endswith("/Exchange"):
            return grpc.stream_stream_rpc_method_handler(
                lambda frames, context: self._stream(method, frames, context)
            )
        return grpc.unary_unary_rpc_method_handler(
            lambda request, context: self._forward(method, request, context)
        )

    def _stream(self, method: str, frames: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        answers = self._channel.stream_stream(method)(frames, metadata=sent(context))
        context.send_initial_metadata(answers.initial_metadata())
        return iter(answers)

    def _forward(self, method: str, request: bytes, context: grpc.ServicerContext) -> bytes:
        try:
            answer = self._channel.unary_unary(method)(request, timeout=30, metadata=sent(context))
        except grpc.RpcError as error:
            context.set_trailing_metadata(error.trailing_metadata())
            context.abort(error.code(), error.details())
        if method.endswith("/Hello"):
            hello = self._pb.HelloResponse.FromString(answer)
            hello.capabilities.remove(NEW)
            return bytes(hello.SerializeToString())
        return bytes(answer)


def sent(context: grpc.ServicerContext) -> list[tuple[str, str | bytes]]:
    return [one for one in context.invocation_metadata() if not one[0].startswith((":", "user-agent"))]


@pytest.fixture
def earlier(stubs: Stubs) -> Iterator[fastps.ParameterServer]:
    """A client of a server that matches momentum by the number of clients."""
    with fastps.serve() as server:
        proxy = grpc.server(ThreadPoolExecutor(16))
        proxy.add_generic_rpc_handlers((Earlier(stubs, server.addresses),))
        port = proxy.add_insecure_port("127.0.0.1:0")
        proxy.start()
        try:
            with fastps.connect(f"127.0.0.1:{port}") as ps:
                yield ps
        finally:
            proxy.stop(None)


def test_an_earlier_server_does_not_match_momentum_by_another_rule(earlier: fastps.ParameterServer) -> None:
    earlier.register("w", np.zeros(3, np.float32), fastps.Adam())
    earlier.register("plain", np.zeros(3, np.float32), fastps.Adagrad())
    g = np.ones(3, np.float32)
    with fastps.Worker(earlier, {"w": np.zeros(3, np.float32)}, fastps.Async()) as worker:
        with pytest.raises(fastps.FastpsError, match=r"earlier version.*momentum_matching=False") as refused:
            worker.step({"w": g})
        assert (refused.value.tensor, refused.value.shard) == ("w", 0)
    without = fastps.Async(momentum_matching=False)
    with (
        fastps.Worker(earlier, {"w": np.zeros(3, np.float32)}, without) as worker,
        fastps.Worker(earlier, {"plain": np.zeros(3, np.float32)}, fastps.Async()) as plain,
    ):
        worker.step({"w": g})
        plain.step({"plain": g})
    now = earlier.versions()
    assert (now["w"], now["plain"]) == (2, 2)  # registration is the first
