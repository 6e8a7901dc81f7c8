"""Servers with a data directory, from Python. The faults are tried in rust/durable and rust/rpc."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import fastps


def test_what_a_server_held_is_there_when_it_is_started_again(tmp_path: Path) -> None:
    initial = np.arange(300_000, dtype=np.float32)
    with fastps.serve(shards=2, data_dir=tmp_path) as server:
        with fastps.connect(server.addresses, ack="logged") as ps:
            ps.register("w", initial, optimizer=fastps.Adam(lr=0.5))
            ps.register("racing", initial, optimizer=fastps.SGD(lr=1.0), apply="hogwild")
            for _ in range(3):
                ps.push({"w": np.ones_like(initial), "racing": np.ones_like(initial)})
            held, state = ps.pull("w"), ps.state("w")
        with pytest.raises(fastps.ConfigError, match="another server"):
            fastps.serve(shards=2, data_dir=tmp_path)
    with fastps.serve(shards=2, data_dir=tmp_path) as server, fastps.connect(server.addresses) as ps:
        np.testing.assert_array_equal(ps.pull("w"), held)
        np.testing.assert_array_equal(ps.pull("racing"), initial - 3)
        for name, values in ps.state("w").items():
            np.testing.assert_array_equal(values, state[name])
        assert ps.push("w", np.ones_like(initial)).version > 3
    with pytest.raises(fastps.ConfigError, match="another size"):
        fastps.serve(shards=1, data_dir=tmp_path)


def test_what_cannot_be_promised_is_refused() -> None:
    with fastps.serve() as server:
        with pytest.raises(fastps.ConfigError, match="no log"):
            fastps.connect(server.addresses, ack="logged")
        with pytest.raises(fastps.ConfigError, match="ack"):
            fastps.connect(server.addresses, ack="replicated")  # type: ignore[arg-type]
