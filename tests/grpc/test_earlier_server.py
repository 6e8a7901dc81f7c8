"""A server of an earlier version: what would train another model is refused by name."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from between import between
from foreign_client import Stubs

import fastps


def earlier(stubs: Stubs, capability: str) -> Callable[[str, bytes], bytes]:
    """Takes a capability out of the answers to Hello."""

    def without(method: str, answer: bytes) -> bytes:
        if not method.endswith("/Hello"):
            return answer
        hello = stubs.pb.HelloResponse.FromString(answer)
        hello.capabilities.remove(capability)
        return bytes(hello.SerializeToString())

    return without


def test_an_earlier_server_makes_no_versions_by_other_rules(stubs: Stubs) -> None:
    with (
        fastps.serve() as server,
        between(server.addresses, change=earlier(stubs, "rounds")) as address,
        fastps.connect(address) as ps,
    ):
        zeros = np.zeros(3, np.float32)
        ps.register("w", zeros, fastps.SGD(lr=1.0))
        modes = fastps.DiLoCo(every=2), fastps.Sync(1, reduce="weighted"), fastps.Sync(2, quorum=1)
        sorting = fastps.Sync(1, reduce="median"), fastps.Sync(3, reduce="trimmed_mean", trim=1)
        for mode in modes + sorting:
            with pytest.raises(fastps.FastpsError, match=f"{address}.*earlier version"):
                fastps.Worker(ps, {"w": zeros.copy()}, mode)
        with fastps.Worker(ps, {"w": zeros.copy()}, fastps.Sync(1)) as worker:
            worker.step({"w": zeros + 1})


def test_an_earlier_server_does_not_match_momentum_by_another_rule(stubs: Stubs) -> None:
    zeros, g = np.zeros(3, np.float32), np.ones(3, np.float32)
    with (
        fastps.serve() as server,
        between(server.addresses, change=earlier(stubs, "staleness-matching")) as address,
        fastps.connect(address) as ps,
    ):
        ps.register("w", zeros, fastps.Adam())
        ps.register("plain", zeros, fastps.Adagrad())
        with fastps.Worker(ps, {"w": zeros.copy()}, fastps.Async()) as worker:
            why = r"earlier version.*momentum_matching=False"
            with pytest.raises(fastps.FastpsError, match=why) as refused:
                worker.step({"w": g})
            assert (refused.value.tensor, refused.value.shard) == ("w", 0)
        for name, mode in (("w", fastps.Async(momentum_matching=False)), ("plain", fastps.Async())):
            with fastps.Worker(ps, {name: zeros.copy()}, mode) as worker:
                worker.step({name: g})
        now = ps.versions()
        assert (now["w"], now["plain"]) == (2, 2)  # registration is the first


def test_an_earlier_server_does_not_drop_an_average(stubs: Stubs) -> None:
    zeros = np.zeros(3, np.float32)
    with (
        fastps.serve() as server,
        between(server.addresses, change=earlier(stubs, "dtypes")) as address,
        fastps.connect(address) as ps,
    ):
        with pytest.raises(fastps.ConfigError, match=f"{address}.*earlier version.*average=None") as refused:
            ps.register("w", zeros, fastps.SGD(), average=fastps.EMA(0.9))
        assert (refused.value.tensor, refused.value.shard) == ("w", 0)
        ps.register("w", zeros, fastps.SGD())
        with pytest.raises(fastps.ConfigError, match="keeps no average"):
            ps.pull("w", view="average")


def test_an_earlier_server_does_not_take_bfloat16(stubs: Stubs) -> None:
    zeros = np.zeros(3, np.float32)
    with (
        fastps.serve() as server,
        between(server.addresses, change=earlier(stubs, "dtypes")) as address,
        fastps.connect(address) as ps,
    ):
        why = f"(?s){address}.*earlier version.*float32.*bfloat16"
        with pytest.raises(fastps.ConfigError, match=why) as refused:
            ps.register("w", zeros, fastps.SGD(), dtype="bfloat16")
        assert (refused.value.tensor, refused.value.shard) == ("w", 0)
        assert ps.names() == []
