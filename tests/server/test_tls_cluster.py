"""Servers of one cluster with TLS: the commands of the pages on two machines, and servers without trust."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import fastps
from fastps.commands.kit.servers import free_ports

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
SNIFFER = """
import socket, sys
cable = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
with open(sys.argv[1], "wb", buffering=0) as trace:
    print("sniffing", flush=True)
    while True:
        trace.write(cable.recv(1 << 17))
"""
PUSH = """
import os, sys, numpy, fastps
gradient = numpy.fromfile(sys.argv[1], numpy.float32)
with fastps.connect(sys.argv[2], tls_ca="clients/ca.pem") as ps:
    ps.register("known", numpy.zeros_like(gradient), optimizer=fastps.SGD(lr=1.0))
    ps.push({"known": gradient})
    assert (ps.pull("known") == -gradient).all()
"""


def commands(page: Path) -> list[tuple[str, str]]:
    """The commands of the section about two machines, and the host that each is for."""
    section = page.read_text().partition("fastps cluster new cluster")
    block = "".join(section[1:]).partition("```")[0].replace("\\\n", " ")
    return [tuple(line.rsplit("   # on ", 1)) for line in block.splitlines()]  # type: ignore[misc]


class Machines:
    """Two network namespaces with a cable between them, which know each other by name."""

    HOSTS = "10.77.0.1 host-a\n10.77.0.2 host-b\n127.0.0.1 localhost\n"

    def __init__(self) -> None:
        self.names = {f"host-{letter}": f"fastps-{os.getpid()}-{letter}" for letter in "ab"}

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
        return [
            "ip",
            "netns",
            "exec",
            self.names[host],
            "bash",
            "-euxo",
            "pipefail",
            "-c",
            f"exec env {script}",
        ]


@pytest.fixture
def machines() -> Iterator[Machines]:
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    if shutil.which("ip") is None:
        pytest.skip("ip is not installed")
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
def started(command: list[str], cwd: Path, log: Path, ready: str = "listening on") -> Iterator[None]:
    """A process, from the time when it is ready."""
    path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    with log.open("w") as output:
        server = subprocess.Popen(
            command, cwd=cwd, stdout=output, stderr=subprocess.STDOUT, env=os.environ | {"PATH": path}
        )
    try:
        wait_for(ready, log)
        yield
    finally:
        server.terminate()
        server.wait(60)


@pytest.mark.timeout(300)
def test_six_commands_give_a_cluster_of_two_machines(machines: Machines, tmp_path: Path) -> None:
    """They run as the pages print them, except for `scp`; nothing secret passes through the cable."""
    printed = [commands(ROOT / "docs" / page) for page in ("how-to/security.md", "start/several-machines.md")]
    assert printed[0] == printed[1]
    (new, copy, *serve, train, look) = printed[0]
    assert len(printed[0]) == 6
    folders = {host: tmp_path / host for host in machines.names}
    for folder in folders.values():
        folder.mkdir()
    shutil.copytree(ROOT / "examples", folders["host-b"] / "examples")
    environment = os.environ | {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}

    def ran(line: str, host: str) -> str:
        command = machines.command(host, line)
        done = subprocess.run(
            command, cwd=folders[host], env=environment, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    said = ran(*new)
    copied = copy[0].removeprefix("scp ").replace("host-b:", str(folders["host-b"]))
    ran(f"cp {copied}", copy[1])
    for line, host in serve:
        # The command itself prints the same, for folders in the home directory.
        options = " ".join(line.removesuffix(" &").replace("cluster/host-a/", "host-a/").split())
        assert options in said, host
    gradient = np.random.default_rng(1).standard_normal(50_000, np.float32)
    gradient.tofile(folders["host-b"] / "gradient")
    trace = tmp_path / "trace"
    sniff = [*machines.command("host-a", shlex.join([sys.executable, "-c", SNIFFER, str(trace)]))]
    with contextlib.ExitStack() as running:
        running.enter_context(started(sniff, tmp_path, tmp_path / "sniffer", "sniffing"))
        for line, host in serve:
            command = machines.command(host, line.removesuffix(" &"))
            running.enter_context(started(command, folders[host], tmp_path / f"{host}.log"))
        assert "largest error of a weight" in ran(
            train[0].replace("train.py", "train.py --steps 100", 1), train[1]
        )
        token = "FASTPS_TOKEN_FILE=clients/worker.token"
        push = shlex.join([sys.executable, "-c", PUSH, "gradient", "host-a:7070,host-b:7070"])
        ran(f"{token} {push}", "host-b")
        assert "2 shards serving" in ran(*look)
        # A reader cannot train.
        reader = machines.command("host-b", f"FASTPS_TOKEN_FILE=clients/reader.token {push}")
        done = subprocess.run(
            reader, cwd=folders["host-b"], env=environment, capture_output=True, text=True, timeout=120
        )
        assert "PermissionDeniedError" in done.stderr
    seen = trace.read_bytes()
    assert b"host-a" in seen  # the name in the handshake is not secret
    assert len(seen) > gradient.nbytes / 2
    secrets = [file.read_bytes().strip() for file in folders["host-a"].rglob("*.token")]
    assert len(secrets) == 5
    data = gradient.tobytes()
    secrets += [data[first : first + 16] for first in range(0, len(data), 997)]
    assert not any(secret in seen for secret in secrets)
    for host in machines.names:
        log = (tmp_path / f"{host}.log").read_text()
        assert "handshake failed" not in log
        assert "does not answer" not in log


def free_addresses() -> list[str]:
    return [f"127.0.0.1:{port}" for port in free_ports(2)]


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
