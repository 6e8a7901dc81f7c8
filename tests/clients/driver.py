"""Drives a client of another language: commands and answers are JSON lines on its standard input and output.

`clients/go/internal/driver` is such a program. Another language joins the scenarios with one that reads the
same commands; arrays are float32, little-endian, in base64.
"""

from __future__ import annotations

import base64
import json
import os
import select
import signal
import subprocess
import time
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

#: Seconds for an answer, above every deadline that the scenarios set.
PATIENT = 60.0
Answer = dict[str, Any]
Float32 = NDArray[np.float32]


def packed(values: Any) -> str:
    return base64.b64encode(np.ascontiguousarray(values, "<f4").tobytes()).decode()


def unpacked(text: str) -> Float32:
    return np.frombuffer(base64.b64decode(text), "<f4")


class Driver:
    """A process with clients of the servers at some addresses."""

    def __init__(self, program: Path, addresses: list[str], **connect: Any) -> None:
        self.process = subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.addresses, self._connect, self._rest = addresses, connect, b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait(PATIENT)
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()

    def connect(self, name: str = "a", **fields: Any) -> Answer:
        return self.ask("connect", name, addresses=self.addresses, **self._connect | fields)

    def send(self, op: str, name: str = "a", **fields: Any) -> None:
        """Begins a command; `receive` has its answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"op": op, "as": name} | fields).encode() + b"\n")
        self.process.stdin.flush()

    def receive(self) -> Answer:
        assert self.process.stdout is not None
        deadline = time.monotonic() + PATIENT
        while b"\n" not in self._rest:
            ready, _, _ = select.select([self.process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, "the driver does not answer"
            more = os.read(self.process.stdout.fileno(), 1 << 20)
            assert more, f"the driver ended with {self.process.wait(PATIENT)}"
            self._rest += more
        line, _, self._rest = self._rest.partition(b"\n")
        answer: Answer = json.loads(line)
        return answer

    def ask(self, op: str, name: str = "a", **fields: Any) -> Answer:
        """Runs a command."""
        self.send(op, name, **fields)
        return self.receive()

    def do(self, op: str, name: str = "a", **fields: Any) -> Answer:
        """Runs a command that succeeds."""
        answer = self.ask(op, name, **fields)
        assert "error" not in answer, answer["error"]
        return answer

    def refused(self, op: str, name: str = "a", **fields: Any) -> Answer:
        """Runs a command that fails, and returns the error."""
        answer = self.ask(op, name, **fields)
        assert "error" in answer, answer
        error: Answer = answer["error"] | {"seconds": answer["seconds"]}
        return error

    def register(
        self,
        tensor: str,
        values: Any,
        optimizer: str = "sgd",
        name: str = "a",
        group: str = "default",
        **settings: float,
    ) -> None:
        values = np.asarray(values, np.float32)
        spec = {"name": tensor, "shape": values.shape, "optimizer": optimizer, "settings": settings}
        self.do("register", name, tensor=spec | {"group": group}, values=packed(values))

    def push(self, tensor: str, values: Any, name: str = "a", **fields: Any) -> Answer:
        gradients = [{"tensor": tensor, "values": packed(values)}]
        return self.ask("push", name, gradients=gradients, **fields)

    def pull(self, tensor: str, name: str = "a") -> Float32:
        return unpacked(self.do("pull", name, tensors=[tensor])["values"][tensor])

    def versions(self, tensor: str, name: str = "a") -> list[int]:
        versions: list[int] = self.do("versions", name, tensors=[tensor])["versions"][tensor]
        return versions
