"""Servers of a run, each in a process of its own, and what a resumed run must know of it."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fastps._shared.files import replaced
from fastps._shared.process import CommandError
from fastps._shared.servers import ServerProcess, free_ports

__all__ = ["Progress", "servers"]

#: Seconds that a server may take to recover and listen.
_START = 60.0


@contextlib.contextmanager
def servers(count: int, out: Path) -> Iterator[str]:
    """Starts servers, which keep their data below `out`; gives their addresses.

    Raises:
        CommandError: A server does not start.
    """
    data = out / "servers"
    cluster = [f"127.0.0.1:{port}" for port in free_ports(count)]
    started: list[ServerProcess] = []
    try:
        for k, address in enumerate(cluster):
            log = out / f"server-{k}.log"
            started.append(ServerProcess(address, cluster, log, ["--data-dir", str(data)]))
        for k, server in enumerate(started):
            if not server.listens(_START):
                raise CommandError(f"server {k} does not start: {server.last_words()}; see {server.log}")
        yield ",".join(cluster)
    finally:
        for server in started:
            server.kill()
            server.close()


class Progress:
    """The file that says how far a run is.

    Args:
        out: The folder.
        settings: The options that a resumed run must have, too.
        resume: Read the file; else begin a new one, and remove the data of an earlier run.

    Attributes:
        done: The curves of methods that have ended, by name.
        curves: The points of methods that have begun, by name: evaluations, seconds and f.

    Raises:
        CommandError: There is nothing to resume, or it had other options.
    """

    def __init__(self, out: Path, settings: dict[str, Any], resume: bool) -> None:
        self._out, self._path, self._settings = out, out / "progress.json", settings
        self.done: dict[str, Any] = {}
        self.curves: dict[str, list[list[float]]] = {}
        if not resume:
            self.end()
            return
        try:
            told = json.loads(self._path.read_text())
            before, self.done, self.curves = told["settings"], told["done"], told["curves"]
        except (OSError, ValueError, KeyError, TypeError):
            raise CommandError(
                f"nothing to resume in {out}: run fastps sandblaster --shards S first, without --resume"
            ) from None
        for name, value in settings.items():
            if before.get(name) != value:
                text = f"expected {name} {_shown(before.get(name))}, got {_shown(value)}"
                raise CommandError(f"the run in {out} had other options: {text}")

    def save(self) -> None:
        """Writes the file."""
        told = {"settings": self._settings, "done": self.done, "curves": self.curves}
        with replaced(self._path) as path:
            path.write_text(json.dumps(told))

    def end(self) -> None:
        """Removes the file, and the servers' data."""
        self._path.unlink(missing_ok=True)
        shutil.rmtree(self._out / "servers", ignore_errors=True)


def _shown(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
