"""``fastps top`` in a terminal, in a pipe, and once."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest

import fastps
from fastps.commands.cli import main
from fastps.commands.kit.servers import free_ports

pyte = pytest.importorskip("pyte")

FASTPS = [sys.executable, "-m", "fastps"]
ZEROS = np.zeros(10, np.float32)
COLOUR = re.compile(rb"\x1b\[(?:[\d;]*;)?(?:3[0-8]|4[0-8]|9\d|10\d)(?:;[\d;]*)?m")
#: Workers, one of them slow, until the process is killed.
TRAIN = """
import sys, threading, time
import numpy as np
import fastps

def train(rank, pause):
    params, name = {"w": np.zeros(10, np.float32)}, f"trainer {rank}"
    with fastps.Worker(ps, params, fastps.Async(), rank=rank, name=name) as w:
        while True:
            w.step({"w": np.full(10, 1e-3, np.float32)}, loss=0.5)
            time.sleep(pause)

with fastps.connect(sys.argv[1]) as ps:
    threads = [threading.Thread(target=train, args=(k, p)) for k, p in enumerate([0.02, 0.02, 0.02, 0.8])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""


class Terminal:
    """A terminal that runs ``fastps top``."""

    def __init__(self, *arguments: str, size: tuple[int, int] = (80, 24), **variables: str) -> None:
        self._master, slave = pty.openpty()
        self.resize(size, slave)
        self._screen = pyte.Screen(*size)
        self._stream = pyte.ByteStream(self._screen)
        self.written = b""
        self.before = termios.tcgetattr(slave)
        environment = {k: v for k, v in os.environ.items() if k != "NO_COLOR"}
        self.process = subprocess.Popen(
            [*FASTPS, "top", *arguments],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={**environment, "TERM": "xterm-256color", **variables},
            start_new_session=True,
        )
        self._slave = slave

    def resize(self, size: tuple[int, int], end: int | None = None) -> None:
        columns, rows = size
        fcntl.ioctl(end or self._slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        if end is None:
            self._screen.resize(rows, columns)
            self.process.send_signal(signal.SIGWINCH)

    def read(self, timeout: float) -> None:
        """Reads the available output, or waits for some."""
        if select.select([self._master], [], [], timeout)[0]:
            read = os.read(self._master, 1 << 16)
            self.written += read
            self._stream.feed(read)

    @property
    def text(self) -> str:
        return "\n".join(self._screen.display)

    def until(self, seen: Callable[[str], bool]) -> str:
        """Waits until the screen shows something; returns its text."""
        deadline = time.monotonic() + 60
        while not seen(self.text):
            assert time.monotonic() < deadline, self.text
            self.read(0.1)
        return self.text

    def press(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def ends(self) -> int:
        """Waits for the end of the process; the terminal must be as before."""
        deadline = time.monotonic() + 60
        while self.process.poll() is None:
            assert time.monotonic() < deadline, self.text
            self.read(0.05)
        self.read(0)
        assert b"\x1b[?1049l" in self.written, "the former screen is not back"
        assert termios.tcgetattr(self._slave) == self.before
        return self.process.returncode

    def close(self) -> None:
        self.process.kill()
        self.process.wait(timeout=60)
        os.close(self._master)
        os.close(self._slave)


@contextmanager
def terminal(*arguments: str, size: tuple[int, int] = (80, 24), **variables: str) -> Iterator[Terminal]:
    opened = Terminal(*arguments, "--interval", "0.2", size=size, **variables)
    try:
        yield opened
    finally:
        opened.close()


@pytest.fixture(scope="module")
def trained() -> Iterator[str]:
    """The addresses of two shards with four workers."""
    with fastps.serve(shards=2) as server, fastps.connect(server.addresses) as ps:
        ps.register("w", ZEROS, fastps.SGD(lr=0.1))
        training = subprocess.Popen([sys.executable, "-c", TRAIN, server.addresses])
        try:
            yield server.addresses
        finally:
            training.kill()
            training.wait(timeout=60)


def workers(text: str) -> list[str]:
    return re.findall(r"^trainer (\d)", text, re.MULTILINE)


def test_the_screen_shows_rates_staleness_and_the_slow_worker_and_keys_work(trained: str) -> None:
    with terminal(trained, NO_COLOR="1") as shown:
        text = shown.until(lambda text: re.search(r"^trainer 3.* slow *$", text, re.MULTILINE) is not None)
        for part in ("2 shards serving", "4 workers", "pushes/s", "SHARD", "STALE", "! worker trainer 3"):
            assert part in text, text
        shown.until(lambda text: any(bar in text for bar in "▁▂▃▄▅▆▇█"))
        assert workers(shown.text) == ["0", "1", "2", "3"]
        shown.press("s")
        text = shown.until(lambda text: "s sort: slowest" in text)
        assert workers(text)[0] == "3"
        shown.press("?")
        shown.until(lambda text: "Keys" in text and "pause, and continue" in text)
        shown.press("?")
        shown.until(lambda text: "Keys" not in text)
        shown.press("p")
        paused = shown.until(lambda text: "PAUSED" in text)
        for _ in range(10):
            shown.read(0.1)
        assert shown.text == paused
        shown.press(" ")
        shown.until(lambda text: "PAUSED" not in text)
        for size in ((40, 8), (100, 30)):
            shown.resize(size)
            shown.until(lambda text: "2 shards serving" in text and "q quit" in text)
        shown.press("q")
        assert shown.ends() == 0
        assert not COLOUR.search(shown.written)


def test_colour_is_used_where_it_is_wanted_and_a_signal_restores_the_terminal(trained: str) -> None:
    with terminal(trained) as shown:
        shown.until(lambda text: "2 shards serving" in text)
        assert COLOUR.search(shown.written)
        shown.process.terminate()
        assert shown.ends() == 0
    with terminal(trained) as shown:
        shown.until(lambda text: "2 shards serving" in text)
        shown.press("\x03")
        assert shown.ends() == 0


def test_a_pipe_gets_a_line_per_interval(trained: str) -> None:
    command = [*FASTPS, "top", trained, "--interval", "0.2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        end = time.monotonic() + 60
        while (
            "4 workers" not in process.stdout.readline()
        ):  # which report themselves a moment after they begin
            assert time.monotonic() < end
        lines = [process.stdout.readline() for _ in range(3)]
        process.terminate()
        assert process.wait(timeout=60) == 0
    for line in lines:
        assert re.match(
            r"\d\d:\d\d:\d\dZ 2 shards serving, version .*; 4 workers.*; [\d.]+ pushes/s, ", line
        ), line
        assert "\x1b" not in line


def test_once_prints_the_screen_and_names_shards_that_are_late_or_missing(
    trained: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["top", trained, "--once", "--interval", "0.2"]) == 0
    text = capfd.readouterr().out
    assert text.startswith("2 shards serving")
    assert all(len(line) <= 80 for line in text.splitlines())
    assert "\x1b" not in text
    command = [*FASTPS, "serve", "--web", "off", "--listen"]
    addresses = [f"127.0.0.1:{port}" for port in free_ports(2)]
    cluster = ["--cluster", ",".join(addresses)]
    servers = [
        subprocess.Popen([*command, address, *cluster], stdout=subprocess.PIPE, text=True)
        for address in addresses
    ]
    try:
        for server in servers:
            assert server.stdout is not None
            assert "listening" in server.stdout.readline()
        once = ["top", addresses[0], "--once", "--interval", "0.2", "--timeout", "1"]
        assert main(once) == 0
        servers[1].send_signal(signal.SIGSTOP)
        assert main(once) == 1
        late = capfd.readouterr().out
        servers[1].kill()
        assert main(once) == 1
        for text in (late, capfd.readouterr().out):
            assert "1 of 2 shards does not answer" in text
            assert f"! shard 1 at {addresses[1]} does not answer" in text
    finally:
        for server in servers:
            server.kill()
            server.communicate(timeout=60)
    assert main(once) == 1
    assert addresses[0] in capfd.readouterr().err


def test_the_screen_continues_while_a_shard_is_away(trained: str) -> None:
    """A cluster that answers late or not at all leaves keys working, and the error is shown."""
    [port] = free_ports(1)
    with terminal(f"127.0.0.1:{port}", "--timeout", "1") as shown:
        shown.until(lambda text: "no answer yet" in text and f"127.0.0.1:{port}" in text)
        shown.press("q")
        assert shown.ends() == 0
