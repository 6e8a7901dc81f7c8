"""SIGHUP reads files again; it ends only a server whose terminal was closed."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SERVE = [sys.executable, "-m", "fastps", "serve", "--listen", "127.0.0.1:0", "--web", "off"]
AGAIN = "certificates, tokens and configuration are read again"
NOTHING = "there are no certificates, tokens or configuration to read again"
LATE = 60.0


def started(log: Path, *options: str, **how: object) -> subprocess.Popen[str]:
    # The tests may run under nohup, and at a terminal.
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        with log.open("w") as errors:
            server = subprocess.Popen(  # type: ignore[call-overload]
                [*SERVE, *options], stdout=subprocess.PIPE, stderr=errors, text=True, **how
            )
    finally:
        signal.signal(signal.SIGHUP, before)
    assert "listening on" in server.stdout.readline()
    return server


def wait_for(text: str, log: Path) -> None:
    deadline = time.monotonic() + LATE
    while text not in log.read_text():
        assert time.monotonic() < deadline, (text, log.read_text())
        time.sleep(0.02)


def test_without_a_terminal_a_server_goes_on(tmp_path: Path) -> None:
    config, data = tmp_path / "fastps.toml", str(tmp_path / "data")
    config.write_text("lease-ms = 3000\n")
    cases = {
        "memory": ([], NOTHING),
        "data": (["--data-dir", data], NOTHING),
        "audit": (["--audit", str(tmp_path / "audit")], NOTHING),
        "configuration": (["--config", str(config)], AGAIN),
    }
    for name, (options, line) in cases.items():
        log = tmp_path / f"{name}.log"
        with started(log, *options, start_new_session=True) as server:
            server.send_signal(signal.SIGHUP)
            wait_for(f"SIGHUP: {line}", log)
            if name == "configuration":
                config.write_text("lease-ms = 4000\n")
                server.send_signal(signal.SIGHUP)
                wait_for("changed settings take effect at the next start", log)
                assert "lease-ms = 4000" in log.read_text()
                config.write_text("lease-ms = none\n")
                server.send_signal(signal.SIGHUP)
                wait_for("the next start would fail", log)
                assert f"{config}:1" in log.read_text()
            assert server.poll() is None, name
            server.terminate()
            assert server.wait(LATE) == 0, name


@pytest.mark.skipif(sys.platform != "linux", reason="opening a terminal makes it the session's on Linux")
def test_a_closed_terminal_ends_a_server_as_sigterm_does(tmp_path: Path) -> None:
    controller, terminal = pty.openpty()
    name = os.ttyname(terminal)

    def take_terminal() -> None:
        os.setsid()
        os.close(os.open(name, os.O_RDWR))

    options = ["--data-dir", str(tmp_path / "data")]
    with started(tmp_path / "log", *options, preexec_fn=take_terminal) as server:
        os.close(terminal)
        os.close(controller)
        assert server.wait(LATE) == 0
    assert "stopping" in (tmp_path / "log").read_text()
    assert list((tmp_path / "data" / "shard-0").glob("generation-*"))
