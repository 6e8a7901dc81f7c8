"""The run's side of a client: a process that receives actions and is killed, stopped and replaced."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

from fastps.commands.kit.children import Child, python_module
from fastps_lab.torture.client.signals import SIGNAL
from fastps_lab.torture.history import History
from fastps_lab.torture.plan import SLOTS, Action

__all__ = ["ClientLane"]

#: Seconds after which a silent client process is replaced.
HANG = 180.0


class ClientLane:
    """A client's process, and its successors after kills."""

    def __init__(self, slot: int, orders: dict[str, Any], history: History, folder: Path) -> None:
        self._slot, self._orders, self._history, self._folder = slot, orders, history, folder
        self._generation = 0
        self._life: int | None = None
        self._child = self._start()

    def _start(self) -> Child:
        log = self._folder / f"client-{self._slot}-{self._generation}.log"
        child = Child(python_module("fastps_lab.torture.client"), log, {"OMP_NUM_THREADS": "1"})
        own = {"slot": self._slot, "generation": self._generation, "parent": os.getpid()}
        self._generation += 1
        child.tell(json.dumps({**self._orders, **own}))
        return child

    def _take(self, line: str) -> bool:
        """Records an event; returns whether it says that the order was carried out."""
        with contextlib.suppress(json.JSONDecodeError):
            event = json.loads(line)
            if event["ev"] == "ready":
                return True
            if event["ev"] == "life":
                self._life = event["life"]
                self._generation = max(self._generation, event["life"] // SLOTS + 1)
            self._history.take(event)
        return False

    def _wait(self, step: int | None, seconds: float) -> bool:
        """Waits until it is ready; returns False if it ended or was silent for too long and was replaced."""
        late = time.monotonic() + seconds
        while time.monotonic() < late:
            line = self._child.read_line(0.2)
            if line is not None:
                if self._take(line):
                    return True
                late = max(late, time.monotonic() + HANG / 2)
            elif self._child.process.poll() is not None and self._child.drained():
                text = f"client {self._slot} ended: {self._child.last_words()}"
                self._history.add("internal", step, text=text)
                self._replace(step)
                return False
        self._history.add("hung", step, lane=f"client {self._slot}", text="a call does not end")
        self._replace(step)
        return False

    def _replace(self, step: int | None) -> None:
        """Kills it and starts another one."""
        self._child.kill()
        while not self._child.drained():
            if (line := self._child.read_line(0.05)) is not None:
                self._take(line)
        self._child.close()
        if self._life is not None:
            self._history.add("ended", step, life=self._life, how="killed")
        self._life = None
        self._child = self._start()

    def perform(self, action: Action) -> None:
        """Makes it carry out an action."""
        self._child.tell(json.dumps({"step": action.step, "kind": action.kind, **action.args}))
        if action.kind == "interrupted":
            self._interrupt(action)
            return
        if action.kind in ("killed", "stopped"):
            late = time.monotonic() + action.args["after"]
            while time.monotonic() < late:
                if (line := self._child.read_line(0.01)) is not None and self._take(line):
                    return  # it was faster
            if action.kind == "killed":
                self._replace(action.step)
                return
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._child.process.pid, signal.SIGSTOP)
                time.sleep(action.args["stopped"])
                os.kill(self._child.process.pid, signal.SIGCONT)
        self._wait(action.step, HANG)

    def _interrupt(self, action: Action) -> None:
        """Sends signals until the order is carried out, at most for the planned time."""
        late = time.monotonic() + action.args["after"]
        while time.monotonic() < late:
            if self._life is not None:  # else it may not handle the signal yet
                with contextlib.suppress(ProcessLookupError):
                    self._child.process.send_signal(SIGNAL)
            if (line := self._child.read_line(action.args["every"])) is not None and self._take(line):
                return
        self._wait(action.step, HANG)

    def settle(self) -> None:
        """Makes it resolve open doubts and end."""
        self._child.tell(json.dumps({"step": None, "kind": "settle"}))
        if self._wait(None, HANG):
            with contextlib.suppress(Exception):
                self._child.process.wait(10.0)
        self._child.kill()
        self._child.close()

    def close(self) -> None:
        """Ends it at once."""
        self._child.kill()
        self._child.close()
