"""A server in a separate process, which takes signals."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Served:
    """A server that listens. Its output goes to the file `log`."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process, self._log = process, log
        end = time.monotonic() + 60
        while not re.search(r"^fastps: version .*\n", self.printed(), re.MULTILINE):
            assert process.poll() is None, self.printed()
            assert time.monotonic() < end, self.printed()
            time.sleep(0.02)
        (self.address,) = re.findall(r"^fastps: shard 0 listening on (\S+)$", self.printed(), re.MULTILINE)
        (self.page,) = re.findall(r"metrics and health at (\S+)$", self.printed(), re.MULTILINE)

    def printed(self) -> str:
        return self._log.read_text()

    def reload(self) -> None:
        """Makes it read its files again."""
        self.process.send_signal(signal.SIGHUP)


@contextmanager
def served(tokens: Path, log: Path) -> Iterator[Served]:
    """``fastps serve --tokens`` with all that it can log."""
    command = [sys.executable, "-m", "fastps", "serve", "--listen", "127.0.0.1:0", "--web", "127.0.0.1:0"]
    environment = os.environ | {"FASTPS_LOG": "trace"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--tokens", str(tokens)], stdout=output, stderr=subprocess.STDOUT, env=environment
        )
    try:
        yield Served(process, log)
    finally:
        process.terminate()
        code = process.wait(60)
    assert code == 0, log.read_text()
