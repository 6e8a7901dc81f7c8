"""Budgets of principals: whoever exceeds one waits and is then refused; the others notice nothing."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from foreign_client import ForeignClient, Stubs
from token_files import Tokens

import fastps

ONES = np.ones(8, np.float32)


def test_a_rate_slows_its_principal_only(tokens: Tokens) -> None:
    slow, free = tokens.add("slow", "worker", "*", "frames/s=20"), tokens.add("free", "worker")
    frames, over, beside = 30, threading.Event(), 0
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
    # 20 a second after a burst of 2.
    assert took >= (frames - 3) / 20
    assert beside > 2 * frames


def test_beyond_a_second_frames_are_refused_with_a_retry_time(tokens: Tokens, stubs: Stubs) -> None:
    tokens.add("slow", "worker", "*", "bytes/s=1000")
    with (
        fastps.serve(tokens=tokens.file) as server,
        ForeignClient(stubs, server.address_list, token=tokens.text["slow"]) as client,
    ):
        values = np.zeros(2_000, np.float32)
        client.register(client.spec("w", values.shape), values)
        # The initial values have used 8 s of the budget.
        (answer,) = client.exchange("w", client.gradient_frames("w", values))
        refusal = answer.header.refusal
        assert (refusal.kind, refusal.expected) == ("capacity", "any frames and 1000 bytes a second")
        assert 5_000 < refusal.retry_after_ms < 9_000
    file = tokens.write_secret("slow", tokens.text["slow"])
    with fastps.serve(tokens=tokens.file) as server, fastps.connect(server, token_file=file) as ps:
        ps.register("w", values, optimizer=fastps.SGD(lr=1.0))
        begin = time.monotonic()
        with pytest.raises(fastps.CapacityError) as raised:
            ps.push("w", values)
        # It is raised at once, and says when to try again.
        assert time.monotonic() - begin < 5
        assert 5 < raised.value.retry_after < 9


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
