"""A push whose answer was lost is never sent under another identity, whatever refuses its repeats."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from between import between
from foreign_client import Stubs

import fastps


def test_a_refused_repeat_of_an_applied_push_stays_in_doubt(stubs: Stubs) -> None:
    """The answer to the first copy is lost; one repeat meets a recovering server, the next has no session."""
    pb, seen = stubs.pb, 0

    def refusal(tag: int, kind: str) -> bytes:
        wait = 20 if kind == "unavailable" else None
        reason = pb.Refusal(kind=kind, message="it recovers", shard=0, retry_after_ms=wait)
        header = pb.Header(kind=pb.KIND_REFUSED, tag=tag, refusal=reason)
        return bytes(pb.Frame(header=header).SerializeToString())

    def answer(frame: bytes, passed_on: Callable[[bytes], bytes]) -> bytes | None:
        nonlocal seen
        header = pb.Frame.FromString(frame).header
        if header.kind != pb.KIND_GRADIENT:
            return passed_on(frame)
        seen += 1
        if seen == 1:
            passed_on(frame)
            return None
        return refusal(header.tag, "unavailable" if seen == 2 else "lease") if seen < 4 else passed_on(frame)

    with fastps.serve() as server, between(server.addresses, answer=answer) as address:
        with fastps.connect(address) as ps:
            ps.register("w", np.zeros(3, np.float32), fastps.SGD(lr=1.0))
            with pytest.raises(fastps.PartialPush) as lost:
                ps.push("w", np.full(3, -1, np.float32), timeout=30)
            assert [doubt.result() for doubt in lost.value.in_doubt] == ["unknown"]
        assert seen == 3
        with fastps.connect(server.addresses) as ps:
            assert np.array_equal(ps.pull("w"), np.ones(3))
