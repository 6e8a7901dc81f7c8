"""Names with several addresses, such as localhost."""

from __future__ import annotations

import socket
import subprocess
import sys

import numpy as np
import pytest

import fastps

FAMILIES = (socket.AF_INET, socket.AF_INET6)


def addresses_of_localhost() -> list[str]:
    found = socket.getaddrinfo("localhost", 0, type=socket.SOCK_STREAM)
    return sorted({str(one[4][0]) for one in found})


def has_both() -> bool:
    return addresses_of_localhost() == ["127.0.0.1", "::1"] and socket.has_ipv6


pytestmark = pytest.mark.skipif(not has_both(), reason="localhost has one address here")


def use(host: str, port: int) -> None:
    with fastps.connect(f"{host}:{port}", timeout=30) as ps:
        ps.register("w", np.zeros(3, np.float32), optimizer=fastps.SGD(lr=1.0))
        ps.push("w", np.ones(3, np.float32))


@pytest.mark.parametrize("shards", [1, 2])
def test_all_addresses_of_a_name_have_one_port(shards: int) -> None:
    with fastps.serve(shards, "localhost:0") as server:
        for address in server.address_list:
            port = int(address.rpartition(":")[2])
            for family, host in zip(FAMILIES, ("127.0.0.1", "::1"), strict=True):
                with socket.socket(family, socket.SOCK_STREAM) as probe:
                    probe.connect((host, port))
        port = int(server.address_list[0].rpartition(":")[2])
        for host in ("127.0.0.1", "[::1]", "localhost"):
            use(host, port)


def test_a_port_that_is_taken_at_one_address_is_in_use() -> None:
    with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as other:
        other.bind(("::1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(fastps.ConfigError, match=rf"\[::1\]:{port}: the port is in use"):
            fastps.serve(listen=f"localhost:{port}")


def test_the_program_listens_at_all_of_them() -> None:
    command = [sys.executable, "-m", "fastps", "serve", "--listen", "localhost:0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            said = process.stdout.readline()
            port = int(said.rpartition(":")[2])
            for host in ("127.0.0.1", "[::1]"):
                use(host, port)
        finally:
            process.terminate()
