"""Servers of one cluster with TLS: the recipe of the guide on two machines, and servers without trust."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import fastps

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "how-to" / "operations.md"
BIN = Path(sys.executable).parent


def recipe() -> list[str]:
    """The blocks of the guide up to the cluster of two machines, without those for one."""
    section = GUIDE.read_text().partition("### TLS\n")[2].partition("\n### ")[0]
    blocks = re.findall(r"```bash\n(.*?)```", section, re.DOTALL)
    return [block for block in blocks if "req -x509" in block or "for host in" in block]


class Machines:
    """Two network namespaces with a cable between them, which know each other by name."""

    HOSTS = "10.77.0.1 host-e\n10.77.0.2 host-f\n127.0.0.1 localhost\n"

    def __init__(self) -> None:
        self.names = {f"host-{letter}": f"fastps-{os.getpid()}-{letter}" for letter in "ef"}

    def make(self) -> None:
        a, b = self.names.values()
        for name in (a, b):
            self.ip("netns", "add", name)
            folder = Path("/etc/netns") / name
            folder.mkdir(parents=True)
            (folder / "hosts").write_text(self.HOSTS)
        self.ip("link", "add", "cable", "netns", a, "type", "veth", "peer", "name", "cable", "netns", b)
        for k, name in enumerate((a, b), 1):
            self.ip("-n", name, "address", "add", f"10.77.0.{k}/24", "dev", "cable")
            for device in ("cable", "lo"):
                self.ip("-n", name, "link", "set", device, "up")

    def remove(self) -> None:
        for name in self.names.values():
            shutil.rmtree(Path("/etc/netns") / name, ignore_errors=True)
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)

    @staticmethod
    def ip(*arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=60)

    def command(self, host: str, script: str) -> list[str]:
        return ["ip", "netns", "exec", self.names[host], "bash", "-euxo", "pipefail", "-c", f"exec {script}"]


@pytest.fixture
def machines() -> Iterator[Machines]:
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    for program in ("ip", "openssl"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")
    both = Machines()
    try:
        try:
            both.make()
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"network namespaces cannot be made here: {getattr(error, 'stderr', error)}")
        yield both
    finally:
        both.remove()


def wait_for(text: str, log: Path) -> None:
    """Waits until a process has written this."""
    end = time.monotonic() + 60
    while text not in log.read_text():
        assert time.monotonic() < end, log.read_text()
        time.sleep(0.02)


@contextlib.contextmanager
def started(command: list[str], cwd: Path, log: Path) -> Iterator[None]:
    """A server, from the time when it listens."""
    path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    with log.open("w") as output:
        server = subprocess.Popen(
            command, cwd=cwd, stdout=output, stderr=subprocess.STDOUT, env=os.environ | {"PATH": path}
        )
    try:
        wait_for("listening on", log)
        yield
    finally:
        server.terminate()
        server.wait(60)


@pytest.mark.timeout(300)
def test_the_guide_s_recipe_works_on_two_machines(machines: Machines, tmp_path: Path) -> None:
    """Its lines are run as they are printed, where they say; workers run on both machines."""
    certificates, cluster = recipe()
    lines = cluster.replace("\\\n", " ").splitlines()
    served = {host: line for line in lines for host in machines.names if line.endswith(f"&   # on {host}")}
    assert served.keys() == machines.names.keys()
    first = lines.index(served["host-e"])
    setup = "\n".join([certificates, *lines[:first]])
    path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    subprocess.run(
        ["bash", "-euxo", "pipefail", "-c", setup],
        cwd=tmp_path,
        env=os.environ | {"PATH": path},
        check=True,
        capture_output=True,
    )
    (line,) = (line for line in lines if " python " in line)
    token, _, train = line.partition(" ")
    own = dict([token.split("=")])
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    with contextlib.ExitStack() as servers:
        for host, line in served.items():
            command = machines.command(host, line.partition(" &   #")[0])
            servers.enter_context(started(command, tmp_path, tmp_path / host))
        for host in machines.names:
            command = machines.command(host, train)
            done = subprocess.run(
                command,
                cwd=tmp_path,
                env=os.environ | own | {"PATH": path},
                capture_output=True,
                text=True,
                timeout=120,
            )
            assert done.returncode == 0, done.stdout + done.stderr
    for host in machines.names:
        log = (tmp_path / host).read_text()
        assert "handshake failed" not in log
        assert "does not answer" not in log


def free_addresses() -> list[str]:
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(2)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [f"127.0.0.1:{one.getsockname()[1]}" for one in sockets]


def test_servers_that_do_not_trust_each_other_say_so(ca, tmp_path):
    """Without the CA behind their certificates: clients get the reason at once, and both logs have it."""
    addresses = free_addresses()
    with contextlib.ExitStack() as servers:
        for k, address in enumerate(addresses):
            files = ca.issue(f"server-{k}", "127.0.0.1")
            only = Path(files["tls_cert"])
            own = only.read_text().partition("-----END CERTIFICATE-----\n")
            only.write_text(own[0] + own[1])  # without its issuer
            options = [f"--{name.replace('_', '-')}={file}" for name, file in files.items()]
            command = [sys.executable, "-m", "fastps", "serve", "--listen", address, *options]
            command += ["--cluster", ",".join(addresses)]
            servers.enter_context(started(command, tmp_path, tmp_path / f"log-{k}"))
        begin = time.monotonic()
        with pytest.raises(fastps.PermissionDeniedError, match=r"shard 1 cannot ask shard 0.*--tls-cert"):
            fastps.connect(",".join(addresses), tls_ca=ca.file, timeout=100)
        assert time.monotonic() - begin < 50, "it waited for its deadline"
        wait_for("shard 0 does not answer", tmp_path / "log-1")
        wait_for("was not signed by a CA", tmp_path / "log-1")
        wait_for("a TLS handshake failed", tmp_path / "log-0")
        assert re.search(r"handshake failed.*127\.0\.0\.1.*UnknownCA", (tmp_path / "log-0").read_text())


def test_a_refused_peer_is_logged_once_with_the_reason(ca, tmp_path):
    address, _ = free_addresses()
    options = [f"--{name.replace('_', '-')}={file}" for name, file in ca.server.items()]
    command = [sys.executable, "-m", "fastps", "serve", "--listen", address, *options, f"--tls-ca={ca.file}"]
    log = tmp_path / "log"
    with started(command, tmp_path, log):
        for _ in range(3):
            with pytest.raises(fastps.PermissionDeniedError):
                fastps.connect(address, **ca.trust)
        wait_for("a TLS handshake failed", log)
    text = log.read_text()
    assert re.search(r"WARN.*handshake failed.*127\.0\.0\.1.*peer sent no certificates", text), text
    assert text.count("peer sent no certificates") < 3, text
