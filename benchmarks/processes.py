"""The processes that the transport benchmarks start: C references and servers, with certificates."""

from __future__ import annotations

import multiprocessing
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from harness import Runner, compile_c

import fastps


class Reference:
    """Two processes of a C program; the client among them repeats steps on demand."""

    def __init__(self, client: list[str | Path], server: subprocess.Popen[str] | None = None) -> None:
        pipe = subprocess.PIPE
        self._server = server
        self._client = subprocess.Popen(client, stdin=pipe, stdout=pipe, text=True)

    @classmethod
    def sockets(cls, folder: Path, largest: int, *how: str) -> Reference:
        """Over TCP loopback; `how`: `unix`, `spin`."""
        program = compile_c(folder / "raw_socket", ["raw_socket.c"])
        server = subprocess.Popen([program, "server", str(largest), *how], stdout=subprocess.PIPE, text=True)
        assert server.stdout is not None
        return cls([program, "client", server.stdout.readline().strip(), str(largest), *how], server)

    @classmethod
    def memory(cls, folder: Path, largest: int, *how: str) -> Reference:
        """Through shared memory; its client makes the server. `how`: `sleep`."""
        return cls([compile_c(folder / "shared_memory", ["shared_memory.c"]), str(largest), *how])

    def step(self, size: int, repetitions: int) -> list[int]:
        """Nanoseconds of each repetition."""
        assert self._client.stdin is not None
        assert self._client.stdout is not None
        print(size, repetitions, file=self._client.stdin, flush=True)
        return [int(word) for word in self._client.stdout.readline().split()]

    def runner(self, size: int) -> Runner:
        """Steps of one size."""
        return lambda repetitions: self.step(size, repetitions)

    def close(self) -> None:
        """Ends both processes."""
        self._client.communicate()
        if self._server:
            self._server.wait(10)


class Child:
    """A function of a module in its own process, with a pipe."""

    def __init__(self, work: Callable[..., None], *arguments: Any, start: str = "spawn") -> None:
        context = multiprocessing.get_context(start)
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(target=work, args=(theirs, *arguments), daemon=True)
        self._process.start()
        theirs.close()

    def ask(self, *question: Any) -> Any:
        """One message there, one back."""
        self.pipe.send(question)
        return self.pipe.recv()

    @property
    def pid(self) -> int:
        """Of the process."""
        assert self._process.pid
        return self._process.pid

    def cpu(self) -> int:
        """Nanoseconds that its threads have run."""
        return cpu_time(self.pid)

    def kill(self) -> None:
        """Ends it at once."""
        self._process.kill()

    def close(self) -> None:
        """Lets it end, or ends it."""
        try:
            self.pipe.send(None)
            self._process.join(10)
        except OSError:
            pass
        finally:
            self._process.kill()
            self._process.join()


def cpu_time(pid: int) -> int:
    """Nanoseconds that the threads of a process have run."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks)


def serve(pipe: Connection, options: dict[str, Any]) -> None:
    """Runs a server, by default of one shard, until it receives a request to stop."""
    with fastps.serve(**{"shards": 1, **options}) as server:
        pipe.send(server.addresses)
        pipe.recv()


@contextmanager
def server_process(**options: Any) -> Iterator[str]:
    """Starts a server in its own process, with options of `fastps.serve`. Returns its addresses."""
    child = Child(serve, options)
    try:
        yield child.pipe.recv()
    finally:
        child.close()


def certificate(folder: Path) -> tuple[dict[str, str], dict[str, str]]:
    """A certificate for this machine, as arguments of `fastps.serve` and of `fastps.connect`."""
    ca, key, cert = (str(folder / f"{name}.pem") for name in ("ca", "key", "cert"))
    ec = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-noenc"]
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1")
    for command in (
        ["req", "-x509", *ec, "-subj", "/CN=CA", "-keyout", folder / "ca-key.pem", "-out", ca],
        ["req", *ec, "-subj", "/CN=server", "-keyout", key, "-out", folder / "request"],
        [
            *("x509", "-req", "-in", folder / "request", "-CA", ca, "-CAkey", folder / "ca-key.pem"),
            *("-CAcreateserial", "-extfile", folder / "names", "-out", cert),
        ],
    ):
        subprocess.run(["openssl", *command], check=True, capture_output=True)
    return {"tls_cert": cert, "tls_key": key}, {"tls_ca": ca}
