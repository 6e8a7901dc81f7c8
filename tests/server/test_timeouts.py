"""A call ends within its own timeout, also where the client that it uses has another one."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import fastps
import fastps.optimize
from fastps._shared.servers import ServerProcess, free_ports

#: The client's timeout, and the calls' own; the time that they really take is far from both on any machine.
LONG, SHORT, SOON = 300.0, 1.0, 100.0
SGD = fastps.SGD(lr=1.0)
Call = Callable[[fastps.ParameterServer], object]

CALLS: dict[str, Call] = {
    "another": lambda ps: ps.another(timeout=SHORT),
    "Vectors": lambda ps: fastps.optimize.Vectors(ps, ["w"], ["g"], space="s", timeout=SHORT),
    "drop": lambda ps: fastps.optimize.drop(ps, "s", timeout=SHORT),
    "versions": lambda ps: ps.versions(timeout=SHORT),
    "pull": lambda ps: ps.pull("v", timeout=SHORT),
    "load_state": lambda ps: ps.load_state("v", {}, timeout=SHORT),
}


@pytest.fixture
def stopped(tmp_path: Path) -> Iterator[tuple[fastps.ParameterServer, Callable[[], None]]]:
    """A client, and a function that stops its server's process."""
    address = f"127.0.0.1:{free_ports(1)[0]}"
    server = ServerProcess(address, [address], tmp_path / "log")
    assert server.listens(60.0), server.last_words()
    ps = fastps.connect(address, timeout=LONG)
    ps.register("w", np.zeros(3, np.float32), optimizer=SGD)

    def stop() -> None:
        os.kill(server.process.pid, signal.SIGSTOP)
        os.waitpid(server.process.pid, os.WUNTRACED)

    yield ps, stop
    os.kill(server.process.pid, signal.SIGCONT)
    ps.close()
    server.kill()
    server.close()


@pytest.mark.parametrize("name", CALLS)
def test_a_call_ends_at_its_own_timeout(
    stopped: tuple[fastps.ParameterServer, Callable[[], None]], name: str
) -> None:
    ps, stop = stopped
    stop()
    begin = time.monotonic()
    with pytest.raises((fastps.DeadlineError, fastps.ConnectionLostError)):
        CALLS[name](ps)
    assert time.monotonic() - begin < SOON


def test_vectors_close_within_their_timeout(
    stopped: tuple[fastps.ParameterServer, Callable[[], None]],
) -> None:
    ps, stop = stopped
    v = fastps.optimize.Vectors(ps, ["w"], ["g"], space="s", timeout=SHORT)
    stop()
    begin = time.monotonic()
    with pytest.raises((fastps.DeadlineError, fastps.ConnectionLostError)):
        v.close()
    assert time.monotonic() - begin < SOON
