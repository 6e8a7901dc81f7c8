"""The process of a replica: computes losses and gradients of the portions that servers deal.

``python -m`` of this module reads its orders, one line of JSON, writes a line once it has its data, and ends
with its standard input.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
from pathlib import Path

import fastps
from fastps.commands.kit import CommandError, hold_on_to, watch_stdin
from fastps.commands.kit.children import ONE_THREAD, Child, python_module
from fastps.optimize import Replica
from fastps_lab import problems

__all__ = ["ReplicaProcess"]


class ReplicaProcess(Child):
    """A replica's process.

    Args:
        name: What messages call it.
        data: The data set.
        dataset_dir: The folder of its files.
        addresses: The servers.
        log: The file for its standard error.
    """

    def __init__(self, name: str, data: str, dataset_dir: str | None, addresses: str, log: Path) -> None:
        super().__init__(python_module("fastps_lab.sandblaster.replica"), log, ONE_THREAD)
        self.name = name
        orders = {"data": data, "dataset_dir": dataset_dir, "parent": os.getpid(), "addresses": addresses}
        self.tell(json.dumps({**orders, "name": f"replica {name}"}))

    def wait(self) -> None:
        """Returns when the child has its data.

        Raises:
            CommandError: The child has ended.
        """
        while self.read_line(0.1) is None:
            if self.process.poll() is not None and self.drained():
                raise self.ended()

    def ended(self) -> CommandError:
        """Waits until the child has ended; says why it has."""
        code = self.process.wait()
        return CommandError(f"replica {self.name} ended with exit code {code}: {self.last_words()}")


def main() -> int:
    """Entry point of the process."""
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    ended = threading.Event()
    replicas: list[Replica] = []

    def end() -> None:
        ended.set()
        for replica in replicas:
            replica.stop()

    watch_stdin(lines.put, end)
    orders = json.loads(lines.get())
    hold_on_to(orders["parent"])
    problem = problems.load(orders["data"], orders["dataset_dir"])
    with fastps.connect(orders["addresses"], timeout=60.0) as ps:
        replicas.append(Replica(ps, problem.objective, name=orders["name"]))
        print("ready", flush=True)
        while not ended.is_set():
            replicas[0].run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
