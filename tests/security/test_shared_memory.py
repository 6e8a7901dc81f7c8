"""Shared memory shows all values to whoever holds its descriptor, so a server with tokens passes none."""

from __future__ import annotations

import array
import re
import socket
import sys
from pathlib import Path

import numpy as np
import pytest
from token_files import Tokens

import fastps

ASK = b"fastps shared memory 2\n"
#: The values of full slices lie in shared memory.
SLICE = np.ones(63 * 4096, np.float32)
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="abstract sockets are Linux's")


def abstract() -> set[str]:
    """The names of all servers' abstract sockets on this machine."""
    return set(re.findall(r"@(fastps-\w+)$", Path("/proc/net/unix").read_text(), re.MULTILINE))


def ask(name: str) -> tuple[bytes, int]:
    """Asks a server's socket for memory and shows nothing; its answer, and the number of descriptors."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(30)
        connection.connect(name)
        connection.sendall(ASK)
        answer, files, _, _ = connection.recvmsg(300, socket.CMSG_SPACE(4 * array.array("i").itemsize))
        return answer, len(files)


def test_a_server_without_tokens_shares_with_its_user():
    before = abstract()
    with fastps.serve() as server, fastps.connect(server) as ps:
        ps.register("w", SLICE, fastps.SGD(lr=1.0))
        (name,) = abstract() - before
        assert ask(f"\0{name}") == (b"\0", 1)


def test_a_server_with_tokens_shares_with_nobody(tmp_path):
    tokens = Tokens(tmp_path)
    admin = tokens.add("admin", "admin")
    path = tmp_path / "socket"
    before = abstract()
    with fastps.serve(tokens=tokens.file, listen_unix=path) as server:
        assert abstract() == before
        with fastps.connect(server, token_file=admin) as ps:
            ps.register("w", SLICE, fastps.SGD(lr=1.0))
            assert next(iter(ps.transport.values())).startswith("tcp: ")
        refused = b"the server asks for tokens, so it shares no memory"
        assert ask(str(path)) == (bytes([len(refused)]) + refused, 0)
        with fastps.connect(f"unix://{path}", token_file=admin) as ps:
            assert (ps.push_pull({"w": SLICE}).values["w"] == 0).all()
            assert list(ps.transport.values()) == [f"unix: {refused.decode()}"]
        with (
            fastps.connect(f"unix://{path}", token_file=admin, transport="shm", timeout=5) as ps,
            pytest.raises(fastps.FastpsError, match=refused.decode()),
        ):
            ps.pull("w")


def test_a_socket_that_the_operator_opens_shares_nothing_either(tmp_path):
    tokens = Tokens(tmp_path)
    admin = tokens.add("admin", "admin")
    before = abstract()
    with (
        fastps.serve(tokens=tokens.file, local=True) as server,
        fastps.connect(server, token_file=admin) as ps,
    ):
        (name,) = abstract() - before
        assert ask(f"\0{name}")[1] == 0
        ps.register("w", SLICE, fastps.SGD(lr=1.0))
        assert next(iter(ps.transport.values())).startswith("unix: the server asks for tokens")
        with pytest.raises(fastps.UnauthenticatedError):
            fastps.connect(server)
