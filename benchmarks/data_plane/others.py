"""The same step with other libraries, if installed, and with plain grpcio clients of fastps.

A step of torch's RPC or gloo sends the gradient to another process, which applies SGD with torch, and returns
the values. grpcio and Redis return as many bytes as they received and apply nothing.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from data_plane.small import step
from harness import Runner, Turns, readable, runner, size_name, table
from processes import Child, server_process

import fastps

ROOT = Path(__file__).resolve().parents[2]
SIZES = {4 << 10: 200, 1 << 20: 30, 4 << 20: 8, 64 << 20: 1}
"""Bytes, and steps of a turn that are not counted: until the scheduler has given each process a core."""
LR = 0.01
UNLIMITED = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]

Peer = Callable[[int], Runner]
"""Size -> steps of that size."""


def _settled(run: Runner, uncounted: int) -> Runner:
    return lambda repetitions: run(uncounted + repetitions)[uncounted:]


def _is_there(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _rendezvous(port: int) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


# -- torch.distributed.rpc -----------------------------------------------------------------------------------

_values: dict[int, Any] = {}


def _apply(gradient: Any) -> Any:
    """Runs in the server: one step of SGD; the values."""
    import torch

    with torch.no_grad():
        values = _values.setdefault(gradient.numel(), torch.zeros_like(gradient))
        return values.add_(gradient, alpha=-LR)


def _rpc(pipe: Connection, port: int, rank: int) -> None:
    import torch
    from torch.distributed import rpc

    torch.set_num_threads(1)
    _rendezvous(port)
    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=2)
    rpc.init_rpc(f"p{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    if rank == 0:
        pipe.send("ready")
        while question := pipe.recv():
            size, repetitions = question
            gradient = torch.full((size // 4,), 1e-3)
            pipe.send(runner(lambda g=gradient: rpc.rpc_sync("p1", _apply, args=(g,)))(repetitions))
    rpc.shutdown()


# -- gloo ----------------------------------------------------------------------------------------------------


def _gloo(pipe: Connection, port: int, rank: int) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    _rendezvous(port)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    what = torch.zeros(2, dtype=torch.int64)
    if rank == 1:
        while dist.recv(what, 0) == 0 and (floats := int(what[0])):
            gradient = torch.zeros(floats)
            values = torch.zeros(floats)
            for _ in range(int(what[1])):
                dist.recv(gradient, 0)
                values.add_(gradient, alpha=-LR)
                dist.send(values, 0)
        return
    pipe.send("ready")
    while question := pipe.recv():
        size, repetitions = question
        dist.send(torch.tensor([size // 4, repetitions]), 1)
        gradient, values = torch.full((size // 4,), 1e-3), torch.zeros(size // 4)

        def one(gradient: Any = gradient, values: Any = values) -> None:
            dist.send(gradient, 1)
            dist.recv(values, 1)

        pipe.send(runner(one)(repetitions))
    dist.send(torch.zeros(2, dtype=torch.int64), 1)


def _torch_peer(stack: ExitStack, work: Callable[..., None]) -> Peer:
    """Two processes."""
    port = _free_port()
    children = [Child(work, port, rank) for rank in (0, 1)]
    for child in reversed(children):
        stack.callback(child.close)
    children[0].pipe.recv()
    return lambda size: lambda repetitions: children[0].ask(size, repetitions)


# -- grpcio --------------------------------------------------------------------------------------------------


def _echo(pipe: Connection, answers: Callable[[Iterator[bytes]], Iterator[bytes]]) -> None:
    """A grpcio server with streams of messages; `answers` makes the answers."""
    import grpc

    def exchange(requests: Iterator[bytes], _: Any) -> Iterator[bytes]:
        return answers(requests)

    handler = grpc.stream_stream_rpc_method_handler(exchange)
    server = grpc.server(ThreadPoolExecutor(4), options=UNLIMITED)
    service = grpc.method_handlers_generic_handler("fastps.v1.Data", {"Exchange": handler})
    server.add_generic_rpc_handlers([service])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    pipe.send(f"127.0.0.1:{port}")
    pipe.recv()
    server.stop(0).wait()


def _itself(messages: Iterator[bytes]) -> Iterator[bytes]:
    return messages


def _grpcio(stack: ExitStack) -> Peer:
    """Streams that return each message; one message a step."""
    import queue

    import grpc

    child = Child(_echo, _itself)
    stack.callback(child.close)
    channel = stack.enter_context(grpc.insecure_channel(child.pipe.recv(), UNLIMITED))

    def of(size: int) -> Runner:
        out: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        answers = channel.stream_stream("/fastps.v1.Data/Exchange")(iter(out.get, None))
        stack.callback(lambda: (out.put(None), list(answers)))
        message = bytes(size)

        def one() -> None:
            out.put(message)
            next(answers)

        return runner(one)

    return of


# -- Redis ---------------------------------------------------------------------------------------------------


@contextmanager
def _redis_server() -> Iterator[int]:
    port = _free_port()
    command = ["redis-server", "--port", str(port), "--save", "", "--appendonly", "no"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            time.sleep(0.5)
            yield port
        finally:
            process.terminate()


def _redis(stack: ExitStack) -> Peer:
    import redis  # type: ignore[import-not-found, unused-ignore]

    client = redis.Redis(port=stack.enter_context(_redis_server()))

    def of(size: int) -> Runner:
        value = bytes(size)
        return runner(lambda: (client.set("w", value), client.get("w")))

    return of


# -- the tables ----------------------------------------------------------------------------------------------


def _fastps(address: str, transport: str | None, stack: ExitStack) -> Peer:
    ps = stack.enter_context(fastps.connect(address, check_finite=False, transport=transport))  # type: ignore[arg-type]
    return lambda size: runner(step(ps, f"{transport} {size}", size))


def others(quick: bool) -> list[str]:
    """The step of fastps and of others, in turns."""
    absent: list[str] = []
    with ExitStack() as stack:
        address = stack.enter_context(server_process())
        peers: dict[str, Peer] = {
            "push_pull, TCP": _fastps(address, "tcp", stack),
            "push_pull, shared memory": _fastps(address, "shm", stack),
        }
        has_torch = _is_there("torch")
        for name, there, make in [
            ("torch RPC", has_torch, lambda: _torch_peer(stack, _rpc)),
            ("gloo", has_torch, lambda: _torch_peer(stack, _gloo)),
            ("grpcio echo", _is_there("grpc"), lambda: _grpcio(stack)),
            (
                "redis-py SET + GET",
                _is_there("redis") and bool(shutil.which("redis-server")),
                lambda: _redis(stack),
            ),
        ]:
            if there:
                peers[name] = make()
            else:
                absent.append(name)
        results = {}
        for size, uncounted in SIZES.items():
            runners = {name: _settled(peer(size), uncounted) for name, peer in peers.items()}
            results[size] = Turns(runners, rounds=3 if quick else 8, seconds_per_turn=0.05 if quick else 0.2)

    def row(size: int, turns: Turns) -> list[str]:
        ours = [readable(turns.time(name)) for name in list(peers)[:2]]
        theirs = (
            f"{readable(turns.time(n))} ({turns.ratio(n, 'push_pull, TCP'):.1f})" for n in list(peers)[2:]
        )
        return [size_name(size), *ours, *theirs]

    lines = table(["N", *peers], (row(*item) for item in results.items()))
    return [*lines, "", f"Not installed here: {', '.join(absent)}."] if absent else lines


def _shaped(messages: Iterator[bytes]) -> Iterator[bytes]:
    """Answers as large as fastps gives: to a gradient a small one, to a request for values the gradient."""
    last = b""
    for message in messages:
        if len(message) > 512:
            last = message
            yield b"\x0a\x10" + bytes([8, 1] * 8)
        else:
            yield last


def _stubs(folder: Path) -> Any:
    """The plain client of the tests, with stubs generated for it."""
    sys.path.append(str(ROOT / "tests" / "grpc"))
    import foreign_client

    return foreign_client, foreign_client.generate(ROOT / "protos", folder)


def grpc_clients(quick: bool) -> list[str]:
    """A client of generated stubs with fastps, and with an echo server of the same shape."""
    if not _is_there("grpc_tools"):
        return ["Not measured here: grpcio and grpcio-tools are not installed."]
    results: dict[int, Turns] = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        foreign, stubs = _stubs(folder)
        address = stack.enter_context(server_process())
        echo = Child(_echo, _shaped)
        stack.callback(echo.close)
        channel = stack.enter_context(foreign.grpc.insecure_channel(echo.pipe.recv(), UNLIMITED))
        client = stack.enter_context(foreign.ForeignClient(stubs, [address]))
        raw = stack.enter_context(foreign.grpc.insecure_channel(address, UNLIMITED))
        for size in (4 << 10, 4 << 20):
            ours = _GrpcStep(client, raw, size)
            theirs = _GrpcStep(client, channel, size)
            stack.callback(ours.close)
            stack.callback(theirs.close)
            runners = {"fastps": runner(ours), "echo": runner(theirs)}
            results[size] = Turns(runners, rounds=3 if quick else 20, seconds_per_turn=0.1 if quick else 0.3)

    def row(size: int, turns: Turns) -> list[str]:
        times = [readable(turns.time(name)) for name in ("echo", "fastps")]
        return [size_name(size), *times, f"{turns.ratio('fastps', 'echo'):.2f}"]

    columns = ["N", "grpcio client, echo server of grpcio", "grpcio client, fastps", "ratio"]
    return table(columns, (row(*item) for item in results.items()))


class _GrpcStep:
    """One step over a stream of a plain client: per slice a gradient and a request for values."""

    def __init__(self, client: Any, channel: Any, size: int) -> None:
        pb, floats = client.pb, size // 4
        name = f"plain {size}"
        client.register(client.spec(name, [floats], settings={"lr": LR}), np.zeros(floats, np.float32))
        entry = client.entry(name)
        self._client = client
        self._stream = type(client.stream(0))(client.stubs, channel, client.secret, timeout=600)
        gradient = np.full(floats, 1e-3, np.float32)
        self._slices = []
        for index, first in enumerate(range(0, floats, 63 * 4096)):
            part = gradient[first : first + 63 * 4096]
            push = client.body_frame(pb.KIND_GRADIENT, entry, index, pb.CODEC_FLOAT32, part.tobytes())
            self._slices.append((push, client.frame(pb.KIND_PULL, entry, index)))

    def __call__(self) -> None:
        for push, pull in self._slices:
            self._client.sequence += 1
            push.header.sequence = self._client.sequence
            self._stream.send(push)
            self._stream.send(pull)
        for _ in range(2 * len(self._slices)):
            self._stream.receive()

    def close(self) -> None:
        """Ends the stream."""
        self._stream.call.cancel()
