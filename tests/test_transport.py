"""How frames reach servers: which way is taken, what says so, and that all ways carry the same."""

import os
import stat
import tempfile
from pathlib import Path

import numpy as np
import pytest

import fastps

LARGE = 600_001


def sockets() -> set[Path]:
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    folder = Path(runtime) / "fastps" if runtime else Path(tempfile.gettempdir()) / f"fastps-{os.getuid()}"
    return set(folder.glob("*.sock"))


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


def test_sockets_are_the_users_alone_and_go_with_their_server():
    before = sockets()
    with fastps.serve(shards=2) as server, fastps.connect(server.addresses):
        made = sockets() - before
        assert len(made) == 2
        for path in made:
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert not made & sockets()


def test_another_transport_is_refused():
    with pytest.raises(fastps.ConfigError, match="transport"):
        fastps.connect("127.0.0.1:1", transport="pigeon")


def test_a_store_has_no_transport():
    with fastps.Store() as store:
        assert store.transport == {}
