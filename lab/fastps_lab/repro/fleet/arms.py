"""The ways in which a fleet trains: what runs beside the machines, and how a machine's process is started."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

import fastps
from fastps.commands.kit import Closing, CommandError
from fastps.commands.kit.children import ONE_THREAD, Child, end, python_module
from fastps.commands.kit.proxy import Proxy
from fastps.commands.kit.servers import LocalCluster
from fastps_lab.repro.fleet.worker import Job
from fastps_lab.repro.local_steps import Problem

__all__ = ["ARMS", "DELAY", "EVERY", "LEASE", "PACKAGES", "PATIENT", "Arm", "Look"]

#: Local steps of a round, in every arm that has rounds.
EVERY = 20
#: Seconds until a worker that is gone is no longer waited for, in every arm.
LEASE = 3.0
#: Seconds of each way between a worker and the server of fastps.
DELAY = 0.025
#: Seconds that a process may take to import what it needs.
PATIENT = 300.0
#: The packages that an arm needs besides NumPy.
PACKAGES = {
    "torchft": ("torch", "torchft"),
    "elastic all-reduce": ("torch",),
    "hivemind": ("torch", "hivemind"),
}


class Look(NamedTuple):
    """What a fleet has reached: a version, or as many rounds or steps, the loss there, and who takes part.

    The number of those that take part is that of the last exchange; None where nobody says it.
    """

    version: int
    loss: float
    present: int | None = None


class Machine(Child):
    """The process of a machine, with all that it starts: they are in its session, and end with it."""

    def kill(self) -> None:
        """Sends SIGKILL to all of them and waits for the end of the first."""
        with suppress(ProcessLookupError, PermissionError):  # none is left
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class Arm(Closing):
    """One way in which a fleet trains.

    Args:
        task: The problem.
        folder: For logs and files.
    """

    def __init__(self, task: Problem, folder: Path) -> None:
        self._task, self._folder, self._stack = task, folder, ExitStack()

    def start(self, job: Job, log: Path) -> Child:
        """Starts the process of a machine; it trains from the first moment of its paces on."""
        raise NotImplementedError

    def look(self) -> Look | None:
        """What the fleet has reached; None: nothing yet."""
        raise NotImplementedError

    def close(self) -> None:
        """Ends what runs beside the machines."""
        self._stack.close()


class Fastps(Arm):
    """A server of fastps, with a proxy for each worker that delays its bytes."""

    def __init__(
        self,
        task: Problem,
        folder: Path,
        mode: tuple[str, dict[str, Any]],
        rule: fastps.Optimizer,
        lease: float = LEASE,
    ) -> None:
        super().__init__(task, folder)
        self._mode, self._names = mode, list(task.start(0))
        options = ["--lease-ms", str(int(1000 * lease))]
        self._address = self._stack.enter_context(LocalCluster(1, folder, options)).addresses
        self._ps = self._stack.enter_context(fastps.connect(self._address, timeout=60))
        for name, values in task.start(0).items():
            self._ps.register(name, values, rule)

    def start(self, job: Job, log: Path) -> Child:
        proxy = self._stack.enter_context(Proxy(self._address))
        proxy.delay = DELAY
        return _child(dataclasses.replace(job, address=proxy.address, mode=self._mode), "worker", log)

    def look(self) -> Look:
        versions = self._ps.versions(self._names)
        return Look(max(versions[name] for name in self._names), self._task.loss(self._ps.pull(self._names)))


class Peers(Arm):
    """Processes that exchange tensors among themselves; one of them says what it has reached."""

    kind = ""

    def __init__(self, task: Problem, folder: Path) -> None:
        super().__init__(task, folder)
        self._children: list[Child] = []
        self._last: Look | None = None
        self._address = ""

    def start(self, job: Job, log: Path) -> Child:
        job = dataclasses.replace(job, address=self._address, mode=(self.kind, {"every": EVERY}))
        self._children.append(child := self.process(job, log))
        return child

    def process(self, job: Job, log: Path) -> Child:
        """The process of a machine."""
        return _child(job, "peer", log)

    def look(self) -> Look | None:
        for child in self._children:
            for event in child.events():
                if "version" in event:
                    self._last = Look(event["version"], event["loss"], event["present"])
        return self._last


class Torchft(Peers):
    """torchft's DiLoCo over gloo, with its lighthouse in this process."""

    kind = "torchft"

    def __init__(self, task: Problem, folder: Path, lease: float = LEASE) -> None:
        super().__init__(task, folder)
        from torchft.coordination import LighthouseServer

        lighthouse = LighthouseServer("127.0.0.1:0", 1, heartbeat_timeout_ms=int(1000 * lease))
        self._stack.callback(lighthouse.shutdown)
        port = lighthouse.address().rsplit(":", 1)[1]
        self._address = f"http://127.0.0.1:{port}"


class Meeting(Peers):
    """Processes that find each other at one beside the machines."""

    def __init__(self, task: Problem, folder: Path) -> None:
        super().__init__(task, folder)
        beside = _process("beside", self.kind, folder / "beside.log")
        self._stack.callback(end, [beside], 0.0)
        self._address = beside.read_line(PATIENT) or ""
        if not self._address:
            raise CommandError(f"{self.kind} does not start: {beside.last_words()}")


class Elastic(Meeting):
    """A gradient of all at every step, by gloo under torchrun's elastic agents."""

    kind = "elastic"


class Hivemind(Meeting):
    """Local steps of hivemind's optimizer, whose peers average their values once a round."""

    kind = "hivemind"


def _child(job: Job, module: str, log: Path) -> Child:
    return _process(module, json.dumps(dataclasses.asdict(job)), log)


def _process(module: str, argument: str, log: Path) -> Child:
    command = [*python_module(f"fastps_lab.repro.fleet.{module}"), argument]
    return Machine(command, log, {**ONE_THREAD, "FASTPS_WEB": "off"})


def _rounds(task: Problem, folder: Path) -> Arm:
    settings = {"every": EVERY, "quorum": 2, "grace": 1.0, "fragments": 2, "overlap": 4}
    return Fastps(task, folder, ("DiLoCo", settings), fastps.DiLoCo.outer)


def _every_step(task: Problem, folder: Path) -> Arm:
    return Fastps(task, folder, ("Sync", {"workers": 4}), fastps.AdamW(lr=3e-3))


#: All arms; those of `PACKAGES` need more than this package.
ARMS: dict[str, Callable[[Problem, Path], Arm]] = {
    "DiLoCo": _rounds,
    "Sync": _every_step,
    "torchft": Torchft,
    "elastic all-reduce": Elastic,
    "hivemind": Hivemind,
}
