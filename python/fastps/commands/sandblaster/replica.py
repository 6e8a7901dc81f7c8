"""The process of a replica (``python -m`` of this module): computes losses and gradients of portions.

It writes a line once it has its data. If it was given addresses of servers, it takes portions from there.
Else standard input and output carry one line of JSON each way per portion, followed by the arrays that it
announces: the trial point, when that is new, and the gradients. The process ends with its input.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

import fastps
from fastps._shared import process
from fastps._shared.children import python_module
from fastps._shared.process import CommandError
from fastps.commands.sandblaster import problems
from fastps.optimize import Replica

__all__ = ["ReplicaProcess"]

_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")

Arrays = dict[str, NDArray[Any]]


class ReplicaProcess:
    """An objective that a child process computes.

    Args:
        name: What messages call it.
        data: The data set.
        data_dir: The folder of its files.
        start: Arrays of the parameters' shapes and dtypes.
        log: The file for the child's standard error.
        addresses: Servers whose portions it computes; None: those that it is called with.
    """

    def __init__(
        self,
        name: str,
        data: str,
        data_dir: str | None,
        start: Arrays,
        log: Path,
        addresses: str | None = None,
    ) -> None:
        self.name, self._start, self._log = name, start, log
        self._sent: Arrays = {}
        with log.open("wb") as stderr:
            self.process = subprocess.Popen(
                python_module("fastps.commands.sandblaster.replica"),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env={**os.environ, **dict.fromkeys(_ONE_THREAD, "1")},
                start_new_session=True,
            )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._input, self._output = self.process.stdin, self.process.stdout
        orders = {"data": data, "data_dir": data_dir, "parent": os.getpid()}
        self._send({**orders, "name": f"replica {name}", "addresses": addresses})

    def wait(self) -> None:
        """Returns when the child has its data.

        Raises:
            CommandError: The child has ended.
        """
        if not self._output.readline():
            raise self._gone()

    def __call__(self, params: Arrays, indices: NDArray[np.int64]) -> tuple[float, Arrays]:
        """Has the child compute the portion.

        Raises:
            CommandError: The child has ended.
        """
        new = any(params[name] is not self._sent.get(name) for name in params)
        header = {"first": int(indices[0]), "last": int(indices[-1]), "params": new}
        self._send(header, params if new else {})
        self._sent = params
        line = self._output.readline()
        if not line:
            raise self._gone()
        return float(json.loads(line)["loss"]), _read(self._output, self._start)

    def _send(self, header: dict[str, Any], arrays: Arrays | None = None) -> None:
        try:
            _write(self._input, header, arrays or {})
        except BrokenPipeError:
            raise self._gone() from None

    def ended(self) -> CommandError:
        """Waits until the child has ended; says why it has."""
        return self._gone()

    def _gone(self) -> CommandError:
        code = self.process.wait()
        words: list[str] = []
        with contextlib.suppress(FileNotFoundError):  # `close` deletes an empty log
            words = self._log.read_text(errors="replace").strip().splitlines()
        last = words[-1] if words else "it left no message"
        return CommandError(f"replica {self.name} ended with exit code {code}: {last}")

    def close(self) -> None:
        """Kills the child."""
        self.process.kill()
        self.process.wait()
        for pipe in (self._input, self._output):
            try:
                pipe.close()
            except BrokenPipeError:
                continue
        if self._log.stat().st_size == 0:
            self._log.unlink()


def _write(pipe: IO[bytes], header: dict[str, Any], arrays: Arrays) -> None:
    pipe.write(json.dumps(header).encode() + b"\n")
    for array in arrays.values():
        pipe.write(np.asarray(array, order="C").tobytes())
    pipe.flush()


def _read(pipe: IO[bytes], like: Arrays) -> Arrays:
    """Arrays of these shapes and dtypes, in this order."""
    found = {}
    for name, array in like.items():
        values = pipe.read(array.nbytes)
        if len(values) < array.nbytes:
            raise CommandError(f"the pipe ended in the middle of {name}")
        found[name] = np.frombuffer(values, array.dtype).reshape(array.shape)
    return found


def main() -> int:
    """Entry point of the process."""
    pipe, answers = sys.stdin.buffer, sys.stdout.buffer
    orders = json.loads(pipe.readline())
    process.hold_on_to(orders["parent"])
    problem = problems.load(orders["data"], orders["data_dir"])
    if orders["addresses"] is not None:
        return _take_portions(orders["addresses"], orders["name"], problem, answers)
    _write(answers, {"ready": True}, {})
    params: Arrays = {}
    while line := pipe.readline():
        header = json.loads(line)
        if header["params"]:
            params = _read(pipe, problem.start)
        loss, gradients = problem.objective(params, np.arange(header["first"], header["last"] + 1))
        _write(answers, {"loss": loss}, {name: gradients[name] for name in problem.start})
    return 0


def _take_portions(addresses: str, name: str, problem: problems.Problem, answers: IO[bytes]) -> int:
    """Computes portions of servers until standard input ends."""
    ended = threading.Event()
    with fastps.connect(addresses, timeout=60.0) as ps:
        replica = Replica(ps, problem.objective, name=name)

        def end() -> None:
            ended.set()
            replica.stop()

        _write(answers, {"ready": True}, {})
        process.watch_stdin(lambda _: None, end)
        while not ended.is_set():
            replica.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
