"""How frames reach servers: which way is taken, what says so, and that all ways carry the same."""

import sys
from pathlib import Path

import numpy as np
import pytest

import fastps

LARGE = 600_001


def sockets() -> set[str]:
    """The names of the servers' sockets on this machine; no file belongs to them."""
    lines = Path("/proc/net/unix").read_text().splitlines()
    return {name for line in lines if (name := line.split()[-1]).startswith("@fastps-")}


@pytest.mark.parametrize("transport", ["tcp", "unix", None])
def test_every_way_carries_the_same(transport):
    with fastps.serve(shards=2) as server, fastps.connect(server.addresses, transport=transport) as ps:
        ps.register("w", np.zeros(LARGE, np.float32), optimizer=fastps.SGD(lr=1.0))
        gradient = -np.arange(LARGE, dtype=np.float32)
        for step in range(1, 4):
            pushed = ps.push_pull({"w": gradient})
            np.testing.assert_array_equal(pushed.values["w"], -step * gradient)
        np.testing.assert_array_equal(ps.pull("w"), -3 * gradient)
        assert list(ps.transport) == server.addresses.split(",")
        for way in ps.transport.values():
            assert way.startswith("tcp: asked for" if transport == "tcp" else "unix: ")


@pytest.mark.skipif(sys.platform != "linux", reason="Unix sockets without a file are Linux's")
def test_sockets_go_with_their_server():
    before = sockets()
    with fastps.serve(shards=2) as server, fastps.connect(server.addresses):
        made = sockets() - before
        assert len(made) == 2
    assert not made & sockets()


def test_another_transport_is_refused():
    with pytest.raises(fastps.ConfigError, match="transport"):
        fastps.connect("127.0.0.1:1", transport="pigeon")


def test_a_store_has_no_transport():
    with fastps.Store() as store:
        assert store.transport == {}
