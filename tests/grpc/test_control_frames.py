"""Window updates of an honest client and gRPC's bandwidth pings do not count as a flood."""

from __future__ import annotations

from foreign_client import ForeignClient

import fastps


def test_no_honest_client_is_cut(target: ForeignClient, native: fastps.ParameterServer) -> None:
    for _ in range(200):
        target.pull("target")
    for _ in range(1000):
        target.pull("small")
        target.call(0, "Stats", target.pb.StatsRequest())
    assert [shard["counters"]["floods_cut"] for shard in native.stats()["shards"]] == [0, 0]
