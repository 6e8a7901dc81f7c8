"""A server between a client and a server: it passes calls and streams on, but for what a test changes."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

__all__ = ["between"]

#: Changes the answer of a call, by the name of its method.
Change = Callable[[str, bytes], bytes]
#: Answers a frame, perhaps by the function that passes it on and returns the server's answer. None ends the
#: stream.
Answer = Callable[[bytes, Callable[[bytes], bytes]], bytes | None]


class _Between(grpc.GenericRpcHandler):
    def __init__(self, address: str, change: Change, answer: Answer) -> None:
        self._channel, self._change, self._answer = grpc.insecure_channel(address), change, answer

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        method, streams = details.method, details.method.endswith("/Exchange")
        handler = grpc.stream_stream_rpc_method_handler if streams else grpc.unary_unary_rpc_method_handler
        serve = self._stream if streams else self._call
        return handler(lambda request, context: serve(method, request, context))

    def _call(self, method: str, request: bytes, context: grpc.ServicerContext) -> bytes:
        try:
            answer = self._channel.unary_unary(method)(request, timeout=30, metadata=_sent(context))
        except grpc.RpcError as error:
            context.set_trailing_metadata(error.trailing_metadata())
            context.abort(error.code(), error.details())
        return self._change(method, answer)

    def _stream(self, method: str, frames: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        out: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        answers = self._channel.stream_stream(method)(iter(out.get, None), metadata=_sent(context))
        context.send_initial_metadata(answers.initial_metadata())

        def passed_on(frame: bytes) -> bytes:
            out.put(frame)
            return bytes(next(answers))

        try:
            for frame in frames:
                answer = self._answer(frame, passed_on)
                if answer is None:
                    context.abort(grpc.StatusCode.UNAVAILABLE, "the connection is lost")
                yield answer
        finally:
            out.put(None)


def _sent(context: grpc.ServicerContext) -> list[tuple[str, Any]]:
    return [one for one in context.invocation_metadata() if not one[0].startswith((":", "user-agent"))]


@contextlib.contextmanager
def between(
    address: str,
    change: Change = lambda method, answer: answer,
    answer: Answer = lambda frame, passed_on: passed_on(frame),
) -> Iterator[str]:
    """The address of a server that passes everything on to the one at `address`."""
    server = grpc.server(ThreadPoolExecutor(16))
    server.add_generic_rpc_handlers((_Between(address, change, answer),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None)
