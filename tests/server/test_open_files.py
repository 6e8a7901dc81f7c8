"""Limits of open files: a client raises the soft limit, and its error names the limit that it hit."""

import subprocess
import sys

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


def run(script: str, *arguments: str) -> None:
    subprocess.run([sys.executable, "-c", script, *arguments], check=True, timeout=120)


def test_a_client_raises_the_soft_limit(server):
    run(RAISED, server.addresses)


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_the_limit_is_named_at_once(transport):
    with fastps.serve() as server:
        run(EXHAUSTED, server.addresses, transport)
