"""Budgets: a principal that exceeds its budget waits and is then refused; the others notice nothing."""

from __future__ import annotations

import contextlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from foreign_client import ForeignClient, Refused, Stubs, proof, trailing_refusal
from token_files import Tokens

import fastps
import grpc

ONES = np.ones(8, np.float32)


def test_a_rate_slows_its_principal_only(tokens: Tokens) -> None:
    slow, free = tokens.add("slow", "worker", "*", "frames/s=10"), tokens.add("free", "worker")
    frames, over, beside = 20, threading.Event(), 0
    with fastps.serve(tokens=tokens.file) as server, fastps.connect(server, token_file=free) as ps:
        for name in ("a", "b"):
            ps.register(name, np.zeros(8, np.float32), optimizer=fastps.SGD(lr=1.0))

        def push_beside() -> None:
            nonlocal beside
            while not over.is_set():
                ps.push("a", ONES)
                beside += 1

        pushing = threading.Thread(target=push_beside)
        with fastps.connect(server, token_file=slow) as limited:
            pushing.start()
            begin = time.monotonic()
            for _ in range(frames):
                limited.push("b", ONES)
            took = time.monotonic() - begin
            over.set()
            pushing.join()
        np.testing.assert_array_equal(ps.pull("a"), -beside * ONES)
    # 10 a second after a burst of 1.
    assert took >= (frames - 2) / 10
    assert beside > frames


def test_beyond_a_second_frames_are_refused_with_a_retry_time(tokens: Tokens, stubs: Stubs) -> None:
    tokens.add("slow", "worker", "*", "bytes/s=1000")
    free = tokens.add("free", "worker")
    values = np.zeros(2_000, np.float32)
    with (
        fastps.serve(tokens=tokens.file) as server,
        fastps.connect(server, token_file=free) as other,
        ForeignClient(stubs, server.address_list, token=tokens.text["slow"]) as client,
    ):
        other.register("w", values, optimizer=fastps.SGD(lr=1.0))
        client.push("w", values)
        # The first push has used 8 s of the budget.
        (answer,) = client.exchange("w", client.gradient_frames("w", values))
        refusal = answer.header.refusal
        assert (refusal.kind, refusal.expected) == (
            "capacity",
            "any frames or calls and 1000 bytes a second",
        )
        assert 2_000 < refusal.retry_after_ms < 9_000
    file = tokens.write_secret("slow", tokens.text["slow"])
    with (
        fastps.serve(tokens=tokens.file) as server,
        fastps.connect(server, token_file=free) as other,
        fastps.connect(server, token_file=file) as ps,
    ):
        other.register("w", values, optimizer=fastps.SGD(lr=1.0))
        ps.push("w", values)
        begin = time.monotonic()
        with pytest.raises(fastps.CapacityError) as raised:
            ps.push("w", values)
        # It is raised at once, and says when to try again.
        assert time.monotonic() - begin < 20
        assert 2 < raised.value.retry_after < 9


class Flood:
    """Many calls at once, through several connections of one principal."""

    def __init__(self, clients: list[ForeignClient], method: str, request: Any, each: int) -> None:
        begin = time.monotonic()
        calls = [
            getattr(client.controls[0], method).future(
                request, timeout=60, metadata=proof(client.secret, client.token)
            )
            for client in clients
            for _ in range(each)
        ]
        outcomes = [call.exception() for call in calls]
        self.seconds = time.monotonic() - begin
        self.passed = sum(error is None for error in outcomes)
        self.refusals = [trailing_refusal(clients[0].stubs, error) for error in outcomes if error]


@pytest.mark.timeout(120)
def test_a_flood_of_calls_keeps_to_the_rate_of_its_principal(tokens: Tokens, stubs: Stubs) -> None:
    tokens.add("slow", "worker", "*", "frames/s=10")
    free = tokens.add("free", "worker")
    with ExitStack() as stack:
        server = stack.enter_context(fastps.serve(tokens=tokens.file))
        ps = stack.enter_context(fastps.connect(server, token_file=free))
        ps.register("w", np.zeros(8, np.float32), optimizer=fastps.SGD(lr=1.0))
        clients = [
            stack.enter_context(ForeignClient(stubs, server.address_list, token=tokens.text["slow"]))
            for _ in range(4)
        ]
        with ThreadPoolExecutor(1) as beside:
            flood = beside.submit(Flood, clients, "GetMap", stubs.pb.GetMapRequest(names=["w"]), 60)
            pulls = 0
            while not flood.done():
                ps.pull("w")
                ps.names()
                pulls += 1
                # Sessions stay alive, and health is for everybody.
                if pulls % 8 == 1:
                    assert clients[0].hello(0, renew=True).lease_ms > 0
                    assert is_serving(clients[0].channels[0])
            found = flood.result()
        assert found.passed + len(found.refusals) == 240
        # A burst, a second's worth that waits, and the rate while the calls were made.
        assert 1 <= found.passed <= 12 + 10 * found.seconds + 1
        for refusal in found.refusals:
            assert (refusal.kind, refusal.got) == ("capacity", "more")
            assert refusal.expected == "10 frames or calls and any bytes a second"
            assert refusal.retry_after_ms > 1000
        assert found.refusals
        assert pulls >= 3


def is_serving(channel: grpc.Channel) -> bool:
    """Returns whether the health service says so; its answer is field 1 with value 1."""
    check = channel.unary_unary("/grpc.health.v1.Health/Check")
    return check(b"", timeout=30) == b"\x08\x01"


def test_the_bytes_of_a_call_count(tokens: Tokens, stubs: Stubs) -> None:
    tokens.add("slow", "worker", "*", "bytes/s=10000")
    large = stubs.pb.GetMapRequest(names=[f"no tensor has the name {k}" for k in range(2000)])
    size = large.ByteSize()
    with (
        fastps.serve(tokens=tokens.file) as server,
        ForeignClient(stubs, server.address_list, token=tokens.text["slow"]) as client,
    ):
        assert list(client.call(0, "GetMap", large).entries) == []
        with pytest.raises(Refused) as raised:
            client.call(0, "GetMap", stubs.pb.GetMapRequest())
        refusal = raised.value.refusal
        assert raised.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (refusal.kind, refusal.shard) == ("capacity", 0)
        assert size / 10 - 2000 < refusal.retry_after_ms <= size / 10 + 100
        client.hello(0, renew=True)


def test_pulled_bytes_and_answers_count_and_are_never_refused(tokens: Tokens, stubs: Stubs) -> None:
    rate, values = 2 << 20, np.zeros(6 * 63 * 4096, np.float32)
    slow, free = tokens.add("slow", "reader", "*", f"bytes/s={rate}"), tokens.add("free", "worker")
    tokens.add("slower", "reader", "*", "bytes/s=10000")
    with (
        fastps.serve(tokens=tokens.file) as server,
        fastps.connect(server, token_file=free, transport="tcp") as ps,
        fastps.connect(server, token_file=slow, transport="tcp", timeout=120) as limited,
        ForeignClient(stubs, server.address_list, token=tokens.text["slower"]) as client,
        ThreadPoolExecutor(1) as beside,
    ):
        ps.register("w", values, optimizer=fastps.SGD(lr=1.0))
        begin = time.monotonic()
        pulling = beside.submit(limited.pull, "w")
        pulls = 0
        while not pulling.done():
            ps.pull("w")
            pulls += 1
            # Calls are not delayed by pulls.
            assert "w" in limited.names()
        np.testing.assert_array_equal(pulling.result(), values)
        # All but the last slice are paid for, and a tenth of a second is free.
        assert time.monotonic() - begin >= 5 / 6 * values.nbytes / rate - 0.2
        assert pulls > 2
        begin, size = time.monotonic(), client.call(0, "Stats", stubs.pb.StatsRequest()).ByteSize()
        for _ in range(4):
            client.call(0, "Stats", stubs.pb.StatsRequest())
        assert time.monotonic() - begin >= 4 * size / 10_000 - 0.2


def test_calls_of_our_own_client_wait_and_are_refused(tokens: Tokens) -> None:
    file = tokens.add("slow", "worker", "*", "frames/s=10")
    with fastps.serve(tokens=tokens.file) as server, fastps.connect(server, token_file=file) as ps:
        begin = time.monotonic()
        for _ in range(15):
            ps.names()
        # 10 a second after a burst of 1.
        assert time.monotonic() - begin >= (15 - 3) / 10

        def refused(_: int) -> float | None:
            try:
                ps.names()
            except fastps.CapacityError as error:
                return error.retry_after
            return None

        with ThreadPoolExecutor(40) as pool:
            waits = [wait for wait in pool.map(refused, range(40)) if wait is not None]
        assert waits
        assert all(0 < wait < 5 for wait in waits)


def test_a_principal_s_tensors_have_a_limit(tokens: Tokens) -> None:
    file, other = tokens.add("small", "worker", "*", "memory=200kB"), tokens.add("other", "worker")
    rule = fastps.SGD(lr=1.0)
    with (
        fastps.serve(tokens=tokens.file) as server,
        fastps.connect(server, token_file=file) as ps,
        fastps.connect(server, token_file=other) as free,
    ):
        ps.register("a", np.zeros(10_000, np.float32), optimizer=rule)
        for _ in range(2):
            with pytest.raises(fastps.CapacityError, match="memory"):
                ps.register("b", np.zeros(20_000, np.float32), optimizer=rule, timeout=10)
        free.register("c", np.zeros(20_000, np.float32), optimizer=rule)
        ps.unregister("a")
        ps.register("b", np.zeros(20_000, np.float32), optimizer=rule)


def opened(client: ForeignClient) -> list[Any]:
    """Sessions of different clients, until one is refused."""
    greetings: list[Any] = []
    with pytest.raises(Refused) as raised:
        for number in range(1, 200):
            greeting = client.pb.HelloRequest(protocol_minor=1, client=number, secret=client.secret)
            client.call(0, "Hello", greeting)
            greetings.append(greeting)
    assert raised.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    check_refusal(raised.value.refusal, "a session")
    return greetings


def check_refusal(refusal: Any, what: str) -> None:
    assert refusal.kind == "capacity"
    assert refusal.message == f'{what} would exceed the memory of principal "small"'
    assert refusal.expected == "at most 60000 bytes"
    assert 60_000 < int(refusal.got.removesuffix(" bytes")) < 70_000


def test_sessions_and_registrations_count_against_the_memory_of_their_principal(
    tokens: Tokens, stubs: Stubs
) -> None:
    tokens.add("small", "worker", "*", "memory=60000")
    other = tokens.add("other", "worker")
    pb = stubs.pb
    with (
        fastps.serve(tokens=tokens.file) as server,
        fastps.connect(server, token_file=other) as free,
        ForeignClient(stubs, server.address_list, token=tokens.text["small"]) as client,
    ):
        greetings = opened(client)
        assert len(greetings) > 20
        # What is left has no room for some registrations either, whichever of its clients asks.
        with pytest.raises(Refused) as raised:
            for k in range(4):
                register = pb.RegisterRequest(spec=client.spec(f"w{k}", (8,)), client=greetings[0].client)
                client.call(0, "Register", register)
        check_refusal(raised.value.refusal, "the registration")
        free.register("c", np.zeros(20_000, np.float32), optimizer=fastps.SGD(lr=1.0))
        # Closed sessions make room.
        for greeting in greetings[1:]:
            greeting.close = True
            client.call(0, "Hello", greeting)
        registered = 0
        with pytest.raises(Refused) as raised:
            for client_id in (client.client, greetings[0].client):
                for k in range(60):
                    spec = client.spec(f"w {client_id} {k}", (8,))
                    client.call(0, "Register", pb.RegisterRequest(spec=spec, client=client_id))
                    registered += 1
        check_refusal(raised.value.refusal, "the registration")
        assert registered > 20
        free.register("d", np.zeros(20_000, np.float32), optimizer=fastps.SGD(lr=1.0))


@pytest.mark.timeout(120)
def test_frames_that_wait_for_their_rate_delay_no_calls(tokens: Tokens) -> None:
    """Another client of the principal connects and calls beside one that sends all it may."""
    file = tokens.add("paced", "worker", "*", f"bytes/s={1 << 20}")
    values, stop = np.zeros(1 << 18, np.float32), threading.Event()
    with (
        fastps.serve(tokens=tokens.file) as server,
        fastps.connect(server, token_file=file, timeout=60) as greedy,
        ThreadPoolExecutor(1) as beside,
    ):
        greedy.register("large", values, optimizer=fastps.SGD(lr=1.0))

        def send() -> int:
            sent = 0
            while not stop.is_set():
                with contextlib.suppress(fastps.CapacityError):
                    greedy.push("large", values)
                    sent += 1
            return sent

        sending = beside.submit(send)
        try:
            for _ in range(8):
                with fastps.connect(server, token_file=file, timeout=60) as ps:
                    assert "large" in ps.names()
        finally:
            stop.set()
        assert sending.result(60) >= 1
