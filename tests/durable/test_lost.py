"""A restart's losses are reported once, by the next call of any kind, or by a warning at the end."""

from __future__ import annotations

import asyncio
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fastps
import fastps.checkpoint

ONES = np.ones(4, np.float32)
ROWS = np.ones((3, 2), np.float32)
TABLE = "table"
#: Acknowledged pushes of each client to each tensor that the restart loses.
PUSHES = 2

Verb = Callable[[fastps.ParameterServer, Path], object]


def push_async(ps: fastps.ParameterServer, _: Path) -> object:
    return ps.push_async({"w": ONES}).result(timeout=60)


def awaited(ps: fastps.ParameterServer, _: Path) -> object:
    async def push() -> object:
        return await ps.push_async("w", ONES)

    return asyncio.run(push())


VERBS: dict[str, Verb] = {
    "push": lambda ps, _: ps.push("w", ONES),
    "push of a list": lambda ps, _: ps.push({"w": ONES}, codec=fastps.Int8()),
    "push of rows": lambda ps, _: ps.push(TABLE, fastps.Sparse([0, 2], ROWS[:2])),
    "push_async": push_async,
    "push_async, awaited": awaited,
    "bind": lambda ps, _: ps.bind({"w": ONES}),
    "push_pull": lambda ps, _: ps.push_pull("w", ONES),
    "push_pull of a list": lambda ps, _: ps.push_pull({"w": ONES}),
    "pull": lambda ps, _: ps.pull("w"),
    "pull, out=": lambda ps, _: ps.pull("w", out=np.empty_like(ONES)),
    "pull, versions=": lambda ps, _: ps.pull("w", versions=True),
    "pull of a list": lambda ps, _: ps.pull(["w"]),
    "pull of a list, out=": lambda ps, _: ps.pull(["w"], out={"w": np.empty_like(ONES)}),
    "pull of a list, versions=": lambda ps, _: ps.pull(["w"], versions=True),
    "pull, indices=": lambda ps, _: ps.pull(TABLE, indices=[1]),
    "pull of a list, indices=": lambda ps, _: ps.pull([TABLE], indices={TABLE: [1]}),
    "pull, indices=, out=": lambda ps, _: ps.pull(TABLE, indices=[1], out=ROWS[:1].copy()),
    "names": lambda ps, _: ps.names(),
    "spec": lambda ps, _: ps.spec("w"),
    "versions": lambda ps, _: ps.versions("w"),
    "versions of all": lambda ps, _: ps.versions(),
    "register": lambda ps, _: ps.register("new", ONES, optimizer=fastps.SGD(lr=1.0)),
    "unregister": lambda ps, _: ps.unregister("spare"),
    "assign": lambda ps, _: ps.assign("w", ONES),
    "state": lambda ps, _: ps.state("w"),
    "load_state": lambda ps, _: ps.load_state("w", {"momentum_buffer": ONES}),
    "checkpoint.save": lambda ps, path: fastps.checkpoint.save(ps, path / "saved"),
}
#: Bound before the restart.
BOUND = {
    "push of a bound list": lambda ps, bound: ps.push(bound),
    "push_async of a bound list": lambda ps, bound: ps.push_async(bound).result(timeout=60),
    "push_pull of a bound list": lambda ps, bound: ps.push_pull(bound),
}
TRANSPORTS = ("tcp", "shm")


def leave(ps: fastps.ParameterServer) -> None:
    with ps:
        pass


def fail(ps: fastps.ParameterServer) -> None:
    with pytest.raises(ZeroDivisionError), ps:
        raise ZeroDivisionError


ENDS: dict[str, Callable[[fastps.ParameterServer], None]] = {
    "close": lambda ps: ps.close(),
    "leave": leave,
    "with an error": fail,
}


class Restarted:
    """A server that came back without each client's last pushes, and the clients, by what each does next.

    It has a log, but starts from a copy of its folder that was made before these pushes.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.server = fastps.serve(data_dir=folder / "now")
        self.clients: dict[tuple[str, str], fastps.ParameterServer] = {}
        self.bound: dict[tuple[str, str], Any] = {}
        self.workers: dict[tuple[str, str], fastps.Worker] = {}
        first = fastps.connect(self.server.addresses, ack="logged")
        for name, values in {"w": ONES, "spare": ONES, TABLE: ROWS}.items():
            momentum = 0.9 if name != TABLE else 0.0
            first.register(name, values, optimizer=fastps.SGD(lr=1.0, momentum=momentum))
        for transport in TRANSPORTS:
            for verb in (*VERBS, *BOUND, *ENDS):
                self._connect(transport, verb)
            for end in ("step", "stats", "close"):
                mode = fastps.Local(lr=1.0, overlap=False)
                worker = fastps.Worker(self.clients[transport, "pull"], {"w": ONES}, mode=mode)
                worker.step({"w": ONES})
                self.workers[transport, end] = worker
        first.push("w", ONES)  # in the log, and so all before it
        first.close()
        shutil.copytree(folder / "now", folder / "before")
        for ps in self.clients.values():
            for _ in range(PUSHES):
                self._push(ps)
        for worker in self.workers.values():
            for _ in range(PUSHES):
                worker.step({"w": ONES})
        self.server.stop()
        address = self.server.addresses
        self.server = fastps.serve(listen=address, data_dir=folder / "before")

    def _connect(self, transport: Any, verb: str) -> None:
        ps = fastps.connect(self.server.addresses, transport=transport)
        self._push(ps)
        self.clients[transport, verb] = ps
        if verb in BOUND:
            self.bound[transport, verb] = ps.bind({"w": ONES.copy()})

    @staticmethod
    def _push(ps: fastps.ParameterServer) -> None:
        ps.push("w", ONES)
        ps.push(TABLE, fastps.Sparse([0, 1], ROWS[:2]))

    def stop(self) -> None:
        with warnings.catch_warnings():
            # Clients whose tests ran in another process of pytest report their losses only here.
            warnings.simplefilter("ignore", RuntimeWarning)
            for worker in self.workers.values():
                worker.close()
            for ps in self.clients.values():
                ps.close()
        self.server.stop()


@pytest.fixture(scope="module")
def restarted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Restarted]:
    restarted = Restarted(tmp_path_factory.mktemp("lost"))
    yield restarted
    restarted.stop()


def lost_so_far(ps: fastps.ParameterServer) -> int:
    return int(ps.stats()["client"]["pushes_lost"])


def until_it_is_found(ps: fastps.ParameterServer) -> None:
    """The client reconnects in its own time; a request for counters reports no loss."""
    end = time.monotonic() + 60
    while not lost_so_far(ps):
        assert time.monotonic() < end, "the client has found no loss"
        time.sleep(0.002)


def lost_pushes(call: Callable[[], object]) -> int:
    """Number of own pushes that a call reports as lost."""
    with pytest.raises(fastps.VersionsLost, match="without 2 pushes of this client") as raised:
        call()
    return sum(lost.own or 0 for lost in raised.value.lost)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("verb", [*VERBS, *BOUND])
def test_the_first_call_tells_whatever_it_is(
    restarted: Restarted, tmp_path: Path, verb: str, transport: str
) -> None:
    ps = restarted.clients[transport, verb]
    until_it_is_found(ps)
    if verb in BOUND:
        own = lost_pushes(lambda: BOUND[verb](ps, restarted.bound[transport, verb]))
    else:
        own = lost_pushes(lambda: VERBS[verb](ps, tmp_path))
    assert own == 2 * PUSHES == lost_so_far(ps)
    for other in VERBS:  # once, whatever comes then
        if other not in ("register", "unregister"):
            VERBS[other](ps, tmp_path)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("end", ENDS)
def test_a_loss_that_no_call_has_reported_is_reported_at_the_end(
    restarted: Restarted, transport: str, end: str
) -> None:
    ps = restarted.clients[transport, end]
    until_it_is_found(ps)
    with pytest.warns(RuntimeWarning, match="is at version .* without 2 pushes of this client") as record:
        ENDS[end](ps)
    (warning,) = record
    assert [text.split("'")[1] for text in str(warning.message).split("; ")] == [TABLE, "w"]
    assert warning.filename == __file__
    ps.close()  # warns of nothing any more


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("call", ["step", "stats", "close"])
def test_a_worker_counts_what_is_lost_and_warns_once(restarted: Restarted, transport: str, call: str) -> None:
    worker = restarted.workers[transport, call]
    until_it_is_found(worker._ps)
    with pytest.warns(RuntimeWarning, match="without 2 pushes of this worker") as record:
        worker.step({"w": ONES}) if call == "step" else getattr(worker, call)()
    assert len(record) == 1
    assert worker._tally.lost == {"w": PUSHES}


def test_a_client_that_has_lost_nothing_says_nothing(recwarn: pytest.WarningsRecorder) -> None:
    with fastps.serve() as server, fastps.connect(server.addresses) as ps:
        ps.register("w", ONES, optimizer=fastps.SGD(lr=1.0))
        ps.push("w", ONES)
    assert not recwarn.list
