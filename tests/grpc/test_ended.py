"""Incarnations whose sessions have ended stay out: their recorded frames are not applied again, also after
the server is killed and started again."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from foreign_client import TIMEOUT, ForeignClient, Message, Refused, Stubs
from samples import SMALL

from fastps.commands.kit.servers import ServerProcess, free_ports

PUSHES = 20


class Served:
    """A shard that a test kills and starts again."""

    def __init__(self, folder: Path) -> None:
        self.address = f"127.0.0.1:{free_ports(1)[0]}"
        self.folder = folder
        self.server = self._start()

    def _start(self) -> ServerProcess:
        more = ("--data-dir", str(self.folder / "data"), "--lease-ms", "3000")
        server = ServerProcess(self.address, [self.address], self.folder / "log", more)
        assert server.listens(2 * TIMEOUT), server.last_words()
        return server

    def restart(self) -> None:
        self.close()
        self.server = self._start()

    def close(self) -> None:
        self.server.kill()
        self.server.close()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with closing(Served(tmp_path)) as served:
        yield served


def await_end(foreign: ForeignClient) -> None:
    """Waits until the server says that the client's session has ended."""
    deadline = time.monotonic() + 2 * TIMEOUT
    while any(session.name == "foreign" for session in sessions(foreign)):
        assert time.monotonic() < deadline, "the lease never runs out"
        time.sleep(0.05)


def sessions(foreign: ForeignClient) -> list[Message]:
    return list(foreign.call(0, "Stats", foreign.pb.StatsRequest()).sessions)


def is_refused(stubs: Stubs, served: Served, ended: ForeignClient, frames: list[Message]) -> None:
    """A `Hello` of the incarnation, and each of its recorded frames."""
    again = ForeignClient(stubs, [served.address], client=ended.client, secret=ended.secret, hello=False)
    with again:
        for renew in (False, True):
            with pytest.raises(Refused) as refused:
                again.hello(0, renew=renew)
            assert refused.value.refusal.kind == "lease"
            assert "ended" in refused.value.refusal.message
        answers = again.stream(0).exchange(frames)
        assert {answer.header.refusal.kind for answer in answers} == {"lease"}


@pytest.mark.timeout(240)
def test_an_ended_incarnation_stays_out_after_a_restart(stubs: Stubs, served: Served) -> None:
    with ForeignClient(stubs, [served.address]) as first:
        first.register(first.spec("w", (SMALL,), "sgd", {"lr": 1.0}), np.zeros(SMALL, np.float32))
        frames = [first.gradient_frames("w", np.full(SMALL, -1, np.float32))[0] for _ in range(PUSHES)]
        for answer in first.stream(0).exchange(frames):
            first.accepted(answer)
        await_end(first)
        is_refused(stubs, served, first, frames)
        for _ in range(2):
            served.restart()
            is_refused(stubs, served, first, frames)
        with ForeignClient(stubs, [served.address]) as other:
            assert other.pull("w")[0].tobytes() == np.full(SMALL, PUSHES, np.float32).tobytes()
            (receipt,) = other.push("w", np.full(SMALL, -1, np.float32))
            assert receipt.version == PUSHES + 2
