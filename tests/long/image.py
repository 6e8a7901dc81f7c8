"""The image of `deploy/Containerfile` in Docker: `make test-engines`.

Needs the Debian package docker.io, and root. The daemon is a separate one, with its files in a temporary
folder. There is no registry, so the image's last stage is built of a server that is built here.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import numpy as np
import pytest

import fastps
from server_image import DEPLOY, MOST, USER, fill

LIMIT = 120.0
DAEMON = ("--iptables=false", "--ip6tables=false", "--bridge=none", "--storage-driver=overlay2")
LOCKED = ("--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges")


class Docker:
    """A daemon in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = os.environ | {"DOCKER_HOST": f"unix://{folder / 'socket'}", "DOCKER_BUILDKIT": "0"}
        self.environment["DOCKER_CONFIG"] = str(folder / "config")

    def __enter__(self) -> Self:
        folders = {"data-root": "data", "exec-root": "exec", "pidfile": "pid"}
        files = [f"--{option}={self.folder / name}" for option, name in folders.items()]
        # Its mounts end with it.
        command = [
            "unshare",
            "--mount",
            "dockerd",
            *DAEMON,
            *files,
            f"--host=unix://{self.folder / 'socket'}",
        ]
        with (self.folder / "log").open("w") as log:
            self._daemon = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        late = time.monotonic() + LIMIT
        while self.run("version", check=False).returncode:
            if self._daemon.poll() is not None or time.monotonic() > late:
                self.__exit__()
                pytest.skip(f"dockerd does not start here: {(self.folder / 'log').read_text()[-300:]}")
            time.sleep(0.1)
        return self

    def __exit__(self, *_: object) -> None:
        self._daemon.terminate()
        try:
            self._daemon.wait(60)
        except subprocess.TimeoutExpired:
            self._daemon.kill()
            self._daemon.wait()

    def run(self, *command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            ["docker", *command], env=self.environment, capture_output=True, text=True, timeout=LIMIT
        )
        assert not check or done.returncode == 0, done.stderr
        return done

    def inspect(self, what: str, name: str) -> str:
        return self.run("inspect", "--format", what, name).stdout.strip()

    def address(self, name: str, life: int) -> str:
        """Address of the server in a container, in this life of it."""
        late = time.monotonic() + LIMIT
        while len(listens := re.findall(r"listening on \S+:(\d+)", self.run("logs", name).stdout)) <= life:
            runs = self.inspect("{{.State.Running}}", name) == "true"
            assert runs, self.run("logs", name).stderr
            assert time.monotonic() < late, "it does not listen"
            time.sleep(0.05)
        return f"127.0.0.1:{listens[-1]}"


@pytest.fixture
def docker() -> Iterator[Docker]:
    if os.geteuid() != 0 or not (shutil.which("dockerd") and shutil.which("docker")):
        pytest.skip("docker.io is not installed, or this is not root")
    # The path of a socket has at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="docker-") as folder, Docker(Path(folder)) as daemon:
        yield daemon


def build(docker: Docker, folder: Path) -> None:
    """Builds the last stage of the Containerfile."""
    fill(folder / "image")
    (folder / "data").mkdir()
    last = (DEPLOY / "Containerfile").read_text().rpartition("\nFROM ")[2]
    assert last.startswith("scratch\n")
    file = folder / "Containerfile"
    file.write_text("FROM " + re.sub(r"--from=build (\S+ )?/(image|data) ", r"\1\2 ", last))
    assert "--from" not in file.read_text()
    docker.run("build", "--quiet", "--tag=fastps-server", f"--file={file}", str(folder))


@pytest.mark.timeout(600)
def test_the_image_serves_without_any_right(docker: Docker, tmp_path: Path) -> None:
    """It finds names, keeps its state in the volume, and ends with SIGTERM."""
    build(docker, tmp_path)
    assert int(docker.inspect("{{.Size}}", "fastps-server")) < MOST
    network = ("--network=host", "--add-host=shard-0:127.0.0.1", "--volume=data:/data")
    docker.run(
        "run",
        "--detach",
        "--name=server",
        *LOCKED,
        *network,
        "fastps-server",
        "--listen=shard-0:0",
        "--web=off",
    )
    for life in range(2):
        with fastps.connect(docker.address("server", life), timeout=60) as ps:
            status = Path(f"/proc/{docker.inspect('{{.State.Pid}}', 'server')}/status").read_text()
            ps.register("w", np.zeros(3, np.float32), fastps.SGD(lr=1.0))
            np.testing.assert_array_equal(ps.pull("w"), np.full(3, -float(life), np.float32))
            ps.push("w", np.ones(3, np.float32))
        assert re.findall(r"^Uid:\s+(\d+)", status, re.MULTILINE) == [str(USER)]
        assert {int(one, 16) for one in re.findall(r"^Cap\w+:\s+(\w+)", status, re.MULTILINE)} == {0}
        docker.run("stop", "--time=60", "server")
        assert docker.inspect("{{.State.ExitCode}}", "server") == "0"
        docker.run("start", "server")
    assert docker.run("diff", "server").stdout == "", "it writes to the volume only"
    docker.run("rm", "--force", "server")
