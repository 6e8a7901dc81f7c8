"""Executes a plan: own servers, a proxy for each, a process for each client, and a thread for each lane."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fastps
from fastps.commands.kit.bucket import bucket
from fastps.commands.kit.proxy import Proxy
from fastps.commands.kit.servers import free_ports
from fastps_lab.torture.auditor import Auditor
from fastps_lab.torture.check import certain, kept, starts
from fastps_lab.torture.client_lane import ClientLane
from fastps_lab.torture.cuts import Cuts
from fastps_lab.torture.faults import hostile, shards, strangers
from fastps_lab.torture.history import Event, History
from fastps_lab.torture.lag import Lag
from fastps_lab.torture.plan import CLIENTS, SHARDS, Action
from fastps_lab.torture.resources import resources
from fastps_lab.torture.servers import LEASE, LIMIT, Shard
from fastps_lab.torture.source import Source
from fastps_lab.torture.witness import Witness

__all__ = ["Run"]

#: Seconds in which servers must have freed the clients' resources.
BACK = 30.0

#: Transports of the clients; the first two reach the servers through the proxies.
TRANSPORTS = ("tcp", "tcp", "shm", "unix")

BUG = re.compile(
    r"panicked|internal error|\binternal:|assertion .* failed|a bug in fastps|the shard does not serve",
    re.IGNORECASE,
)


class Run:
    """One run.

    Args:
        source: The actions.
        ack: The clients' `ack`, the meaning of a receipt.
        begin: Fields of the history's first event.
        folder: Folder for all files of the run.
        show: Called with each action, except a client's.
    """

    def __init__(
        self, source: Source, ack: str, begin: dict[str, Any], folder: Path, show: Callable[[Action], object]
    ) -> None:
        self.source, self.ack, self.folder, self._show = source, ack, folder, show
        self._takes_over = begin.get("profile") == "take-over"
        self.history = History()
        machine = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"
        self.history.add(
            "begin",
            None,
            ack=ack,
            limit=LIMIT,
            lease=LEASE,
            machine=machine,
            version=fastps.__version__,
            **begin,
        )
        self.shards: list[Shard] = []
        self.proxies: list[Proxy] = []
        self._clients: dict[str, ClientLane] = {}
        self._witnesses: list[Witness] = []
        self._failures: list[BaseException] = []
        self._over = threading.Event()
        self._violated = threading.Event()
        self._at_rest = threading.Semaphore(0)

    def execute(self) -> list[Event]:
        """Runs it to its end; returns the history."""
        addresses = [f"127.0.0.1:{port}" for port in free_ports(SHARDS)]
        with contextlib.ExitStack() as stack:
            stack.callback(self._over.set)
            copies = stack.enter_context(bucket("--profile take-over")) if self._takes_over else None
            for index in range(SHARDS):
                self.shards.append(Shard(index, addresses, self.folder, self.history, copies))
                stack.callback(self.shards[-1].close)
            self._cuts = Cuts(addresses, self.shards[0].data, self.folder, self.history)
            self.proxies = [stack.enter_context(Proxy(address)) for address in addresses]
            lag, ack = Lag(), self.ack
            auditor = Auditor(self.shards, self.history, lag)
            stack.callback(auditor.close)
            layout = auditor.register()
            self.history.add("layout", None, tensors=layout)
            for index in range(SHARDS):
                arguments = (index, addresses, ack, layout, self.history, lag, self.folder)
                self._witnesses.append(Witness(*arguments))
                stack.callback(self._witnesses[-1].close)
            auditor.sample_all("start")
            for slot in range(CLIENTS):
                lane = f"client {slot}"
                self._clients[lane] = ClientLane(slot, self._orders(slot), self.history, self.folder)
                stack.callback(self._clients[lane].close)
            threading.Thread(target=self._watch, name="fastps-watch", daemon=True).start()
            self._run_lanes(auditor)
            if not self._violated.is_set():
                if self._failures:
                    raise self._failures[0]
                self._finish(auditor)
            if self._violated.is_set():
                self.history.freeze()
        self._read_logs()
        self.history.add("end")
        return self.history.events()

    def _orders(self, slot: int) -> dict[str, Any]:
        through = [p.address for p in self.proxies] if slot < 2 else [s.address for s in self.shards]
        return {
            "addresses": ",".join(through),
            "transport": TRANSPORTS[slot],
            "ack": self.ack,
            "began": self.history.began,
            "folder": str(self.folder),
        }

    def _run_lanes(self, auditor: Auditor) -> None:
        lanes = {**dict.fromkeys(self._clients), **dict.fromkeys(self.source.lanes)}
        threads = [
            threading.Thread(target=self._run_lane, args=(lane, auditor), name=f"fastps-{lane}", daemon=True)
            for lane in lanes
        ]
        for thread in threads:
            thread.start()
        for _ in threads:
            while not self._at_rest.acquire(timeout=0.5):
                if self._violated.is_set():
                    return

    def _watch(self) -> None:
        """Ends the run once a violation is certain: faulty servers may keep calls waiting for minutes."""
        seen = 0
        while not self._over.wait(1.0):
            for shard in self.shards:
                self._read_log(shard.child.log)
            events = self.history.since(seen)
            seen += len(events)
            if certain(events, self.ack):
                self._violated.set()
                return

    def _run_lane(self, lane: str, auditor: Auditor) -> None:
        try:
            while lane in self.source.lanes and not self._failures and not self._violated.is_set():
                found = self.source.next(lane, self.history.now())
                if found is None:
                    break
                action, pause = found
                if self._over.wait(pause):
                    break
                kept = {"lane": lane, "kind": action.kind, "args": dict(action.args)}
                self.history.add("action", action.step, **kept)
                if lane not in ("auditor", "cuts") and lane not in self._clients:
                    self._show(action)
                self._perform(action, auditor)
        except BaseException as error:
            self._failures.append(error)
        finally:
            self._at_rest.release()
        # The system ends the processes that this thread started when it ends.
        self._over.wait()

    def _perform(self, action: Action, auditor: Auditor) -> None:
        kind, _, number = action.lane.partition(" ")
        if kind == "client":
            self._clients[action.lane].perform(action)
        elif kind == "shard":
            shard = self.shards[int(number)]
            if shard.died():
                shard.revive(action.step)
            shards.SHARD[action.kind](shard, self._witnesses[int(number)], action.args, action.step)
        elif kind == "net":
            shards.NET[action.kind](self.proxies[int(number)], action.args)
        elif kind == "cuts":
            self._cuts.cut(action.step)
        elif kind == "stranger":
            self._act(action)
        elif kind == "hostile":
            result = hostile.HOSTILE[action.kind](self.shards[action.args["shard"]].address, action.args)
            self.history.add("attack", action.step, kind=action.kind, **result)
            if action.kind == "registrations":
                hostile.names_are_charged(self.shards[0].addresses, self.history, action.step)
        else:
            auditor.look(action.step, action.args)

    def _act(self, action: Action) -> None:
        """Lets a stranger act; nothing is known of it if the servers were away meanwhile."""
        addresses, args = [shard.address for shard in self.shards], {**action.args, "lease": LEASE}
        try:
            found = strangers.STRANGERS[action.kind](addresses, args)
        except (fastps.FastpsError, OSError) as error:
            found = {"failed": f"{type(error).__name__}: {error}"[:300]}
        self.history.add("stranger", action.step, kind=action.kind, **found)

    def _finish(self, auditor: Auditor) -> None:
        """After the last fault: reports what is open, checks everything and releases all resources."""
        for proxy in self.proxies:
            proxy.delay = 0.0
            proxy.cut()
            proxy.freeze(False)
        for shard in self.shards:
            if shard.died():
                shard.revive(None)
        everyone: list[ClientLane | Witness] = [*self._clients.values(), *self._witnesses]
        settling = [threading.Thread(target=client.settle, daemon=True) for client in everyone]
        for thread in settling:
            thread.start()
        for thread in settling:
            while thread.is_alive():
                thread.join(0.5)
                if self._violated.is_set():
                    return
        for _ in range(5):
            if auditor.look(None, {"catalogue": True}, final=True):
                break
        late = time.monotonic() + BACK
        start = starts(self.history.events())
        while time.monotonic() < late and not self._has_given_back(start, auditor):
            time.sleep(0.5)
        auditor.sample_all("end")

    def _has_given_back(self, start: dict[int, dict[str, int]], auditor: Auditor) -> bool:
        """Returns whether no server has more than at the start."""
        sessions = auditor.sessions()
        if sessions is None:
            return False
        for shard, count in zip(self.shards, sessions, strict=True):
            now = {**(resources(shard.pid) or {}), "sessions": count}
            if any(kept(start.get(shard.index, {}), now)):
                return False
        return True

    def _read_logs(self) -> None:
        for path in sorted(self.folder.glob("*.log")):
            self._read_log(path)

    def _read_log(self, path: Path) -> None:
        """Records the first line that reports a bug."""
        with contextlib.suppress(FileNotFoundError):  # an empty log was deleted
            for line in path.read_text(errors="replace").splitlines():
                if BUG.search(line):
                    self.history.add("internal", None, text=f"{path.name}: {line[:300]}")
                    break
