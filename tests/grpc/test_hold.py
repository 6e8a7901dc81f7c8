"""No client holds the writes of others for long."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest
from foreign_client import ForeignClient, Refused
from samples import BIG

import fastps

GRADIENT = np.full(BIG, -1, np.float32)


@pytest.fixture
def server() -> Iterator[fastps.Server]:
    """Two shards; the tensor has slices on both."""
    with fastps.serve(shards=2) as server, fastps.connect(server.addresses) as ps:
        ps.register("w", np.zeros(BIG, np.float32), fastps.SGD(lr=1.0))
        yield server


def test_writes_are_held_at_most_a_tenth_of_the_time(server: fastps.Server, foreign: ForeignClient) -> None:
    def hold(cut: int) -> None:
        foreign.call(0, "Hold", foreign.pb.HoldRequest(cut=cut, hold_ms=60_000))

    with fastps.connect(server.addresses) as ps:
        begin = time.monotonic()
        hold(1)
        ps.push("w", GRADIENT)  # waits for the end of the hold
        assert time.monotonic() - begin >= 1.9
        with pytest.raises(Refused, match="9 times") as refused:
            hold(2)
        assert refused.value.refusal.kind == "unavailable"
        assert refused.value.refusal.retry_after_ms > 0
        ps.push("w", GRADIENT)
