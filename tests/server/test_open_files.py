"""Limits of open files: a client raises the soft limit, and its error names the limit that it hit."""

import resource
import subprocess
import sys
import time
import urllib.request

import pytest

import fastps

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="counts the open files of a process in /proc")

RAISED = """
import resource, sys, fastps
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 512))
clients = [fastps.connect(sys.argv[1], timeout=60) for _ in range(20)]
assert all(ps.names() == [] for ps in clients)
assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 512
"""

EXHAUSTED = """
import os, resource, sys, time, fastps
first = fastps.connect(sys.argv[1], timeout=60, transport=sys.argv[2])
warnings = 0
opened = len(os.listdir("/proc/self/fd"))
# Some clients find a file for each of their connections, others for the first or for none.
for more in range(16, 0, -1):
    limit = opened + more
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    begin = time.monotonic()
    try:
        fastps.connect(sys.argv[1], timeout=60, transport=sys.argv[2]).close()
    except fastps.CapacityError as error:
        assert str(limit) in str(error) and "ulimit -n" in str(error), error
        warnings += 1
    assert time.monotonic() - begin < 20
assert warnings >= 4, warnings
assert first.names() == []
"""


def test_a_server_without_files_says_so_at_once(tmp_path):
    limit = 64
    command = [sys.executable, "-m", "fastps", "serve", "--listen", "127.0.0.1:0", "--web", "127.0.0.1:0"]
    limits = (limit, limit)
    server = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, limits),
    )
    clients = []
    try:
        address, web = (server.stdout.readline().split()[-1] for _ in range(2))
        for transport in ("tcp", "shm", "tcp"):
            with pytest.raises(fastps.CapacityError, match=f"at most {limit} .ulimit -n.*one more"):
                for _ in range(limit):
                    clients.append(fastps.connect(address, timeout=600, transport=transport))
        with urllib.request.urlopen(f"{web}/metrics", timeout=60) as answer:
            assert b"fastps_connections_refused_total" in answer.read()
        # With free descriptors it keeps one in reserve again, if it has used that, and serves again.
        assert clients[0].names() == []
        for _ in range(2):
            clients.pop().close()
        deadline = time.monotonic() + 60
        while True:
            try:
                fastps.connect(address, timeout=600, transport="tcp").close()
                break
            except fastps.CapacityError:
                assert time.monotonic() < deadline
    finally:
        server.kill()
        server.communicate()


def run(script: str, *arguments: str) -> None:
    subprocess.run([sys.executable, "-c", script, *arguments], check=True, timeout=120)


def test_a_client_raises_the_soft_limit(server):
    run(RAISED, server.addresses)


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_the_limit_is_named_at_once(transport):
    with fastps.serve() as server:
        run(EXHAUSTED, server.addresses, transport)
