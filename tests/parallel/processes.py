"""Parts as processes: forked from a server that has imported torch, so that a start takes milliseconds."""

from __future__ import annotations

import contextlib
import datetime
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Self

import torch
import torch.distributed as dist

#: Seconds that anything may take; a first start imports torch, which takes long on a busy machine.
LATE = 150.0
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch._dynamo", "fastps.torch.parallel"])  # of torch what optimizers need


class Failed(AssertionError):
    """A part raised an exception; its type's name and its text."""

    def __init__(self, kind: str, text: str, trace: str) -> None:
        super().__init__(f"{kind}: {text}\n{trace}")
        self.kind, self.text = kind, text


def _run(
    file: str, rank: int, count: int, replica: int, pipe: Connection, function: Callable, args: tuple
) -> None:
    os.environ["REPLICA"] = str(replica)
    torch.set_num_threads(1)
    try:
        store = dist.FileStore(file, count)
        timeout = datetime.timedelta(seconds=LATE)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=count, timeout=timeout)
        result = function(pipe, *args)
        pipe.send(("done", result))
    except BaseException as error:
        pipe.send(("failed", (type(error).__name__, str(error), traceback.format_exc())))


class Parts:
    """The parts of one replica, each of which runs ``function(pipe, *args)``.

    A part says ``pipe.send(("said", value))`` for `heard`.
    """

    def __init__(self, count: int, function: Callable, *args: Any, replica: int = 0) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._pipes, self._processes = [], []
        self._said: dict[int, Any] = {}
        for rank in range(count):
            ours, theirs = CONTEXT.Pipe()
            file = f"{self._folder.name}/store"
            process = CONTEXT.Process(
                target=_run, args=(file, rank, count, replica, theirs, function, args), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
            process.join()
        self._folder.cleanup()

    def signal(self, part: int, number: int) -> None:
        os.kill(self._processes[part].pid, number)

    def heard(self, part: int, timeout: float = LATE) -> Any:
        """The next thing that a part says."""
        kind, value = self._next(part, timeout)
        assert kind == "said", (kind, value)
        return value

    def heard_at(self, part: int) -> float:
        """The seconds that a part says; also after its result."""
        return self._said[part]

    def say(self, part: int, value: Any) -> None:
        self._pipes[part].send(value)

    def result(self, part: int, timeout: float = LATE) -> Any:
        """The return value of a part; raises `Failed` if the part raised."""
        while True:
            kind, value = self._next(part, timeout)
            if kind == "said":
                self._said[part] = value
            if kind == "failed":
                raise Failed(*value)
            if kind == "done":
                return value

    def results(self, timeout: float = LATE) -> list[Any]:
        return [self.result(part, timeout) for part in range(len(self._pipes))]

    def errors(self, *parts: int, timeout: float = LATE) -> list[Failed]:
        """The errors that some parts raised."""
        found = []
        for part in parts:
            try:
                raise AssertionError(f"part {part} returned {self.result(part, timeout)}")
            except Failed as error:
                found.append(error)
        return found

    def ends(self, part: int, timeout: float) -> float:
        """Waits until a process has ended; returns the seconds that took."""
        begun = time.monotonic()
        self._processes[part].join(timeout)
        assert not self._processes[part].is_alive()
        return time.monotonic() - begun

    def _next(self, part: int, timeout: float) -> tuple[str, Any]:
        if not self._pipes[part].poll(timeout):
            raise TimeoutError(f"part {part} has said nothing for {timeout} s")
        found: tuple[str, Any] = self._pipes[part].recv()
        return found
