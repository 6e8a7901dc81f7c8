"""The image's root and the systemd unit of `deploy`."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import select
import shutil
import signal
import socket
import ssl
import struct
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import trustme

import fastps
from server_image import DEPLOY, MOST, ROOT, USER, fill

UNIT = (DEPLOY / "fastps-server.service").read_text()
CONTAINERFILE = (DEPLOY / "Containerfile").read_text()
BUNDLE = "/etc/ssl/certs/ca-certificates.crt"
NUMBERS = Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")
LIBC = ctypes.CDLL(None)
LIBC.prctl.argtypes, LIBC.ptrace.argtypes = [ctypes.c_ulong] * 5, [ctypes.c_ulong] * 4


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The image, with the folder of its volume."""
    if os.geteuid() != 0:
        pytest.skip("chroot needs root")
    root = tmp_path / "image"
    fill(root)
    (root / "data").mkdir()
    os.chown(root / "data", USER, USER)
    for folder in (tmp_path, *tmp_path.parents[:2]):  # pytest's are closed to others
        folder.chmod(0o755)
    return root


def inside(root: Path, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    """Starts the image's program as its user, with the image as root and its environment."""
    (own,) = re.findall(r"^ENV (.*)", CONTAINERFILE, re.MULTILINE)
    environment = {"PATH": os.environ["PATH"]} | dict(one.split("=") for one in own.split()) | environment
    command = ["chroot", f"--userspec={USER}:{USER}", str(root), "/fastps-server", *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True)


def address_of(server: subprocess.Popen[str]) -> str:
    assert server.stdout is not None
    for line in server.stdout:
        if listens := re.search(r"listening on (\S+)", line):
            return listens[1]
    raise AssertionError(f"the server ended with {server.wait()}: {server.communicate()[1]}")


def test_the_image_s_root_has_all_that_a_server_needs(root: Path) -> None:
    """It serves as a user without rights, keeps its state only in /data, and ends with SIGTERM."""
    files = [path for path in root.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < MOST
    others = [path for path in files if path.name != "fastps-server" and ".so" not in path.name]
    assert others == [root / BUNDLE[1:]]
    for life in range(2):
        server = inside(root, "--listen", "127.0.0.1:0")
        address = address_of(server)
        try:
            with fastps.connect(address, timeout=60) as ps:
                ps.register("w", np.zeros(3, np.float32), fastps.SGD(lr=1.0))
                np.testing.assert_array_equal(ps.pull("w"), np.full(3, -float(life), np.float32))
                ps.push("w", np.ones(3, np.float32))
            server.send_signal(signal.SIGTERM)
            assert server.wait(60) == 0
        finally:
            server.kill()
            server.communicate()
    written = {path for path in root.rglob("*") if path.is_file()} - set(files)
    assert written
    assert all(root / "data" in path.parents for path in written)


@contextmanager
def object_store(authority: trustme.CA) -> Iterator[str]:
    """A server of the protocol of S3 behind TLS, with a bucket `models`."""
    moto = pytest.importorskip("moto.server", reason="moto is not installed")
    make_server = pytest.importorskip("werkzeug.serving").make_server
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(tls)
    app = moto.DomainDispatcherApplication(moto.create_backend_app)
    server = make_server("127.0.0.1", 0, app, threaded=True, ssl_context=tls)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        client = ssl.create_default_context()
        authority.configure_trust(client)
        url = f"https://127.0.0.1:{server.port}"
        request = urllib.request.Request(f"{url}/models", method="PUT")
        urllib.request.build_opener(urllib.request.HTTPSHandler(context=client)).open(request).close()
        yield url
    finally:
        server.shutdown()
        thread.join()


def test_the_image_reaches_an_object_store(root: Path) -> None:
    """Whose CA the image knows, and else the error says where to name it."""
    authority, other = trustme.CA(), trustme.CA()
    (root / "roots").mkdir(mode=0o755)
    authority.cert_pem.write_to_path(root / "roots/ca.crt")
    with object_store(authority) as endpoint:
        settings = {"AWS_ENDPOINT_URL": endpoint, "AWS_REGION": "us-east-1"}
        settings |= dict.fromkeys(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), "x")
        known = settings | {"SSL_CERT_FILE": "/roots/ca.crt"}
        server = inside(root, "--listen=127.0.0.1:0", "--copy-to=s3://models/run", **known)
        with fastps.connect(address_of(server), timeout=60) as ps:
            ps.register("w", np.zeros(3, np.float32), fastps.SGD(lr=1.0))
        server.terminate()
        assert "copied snapshot 1" in server.communicate(timeout=60)[1]
        listing = ("checkpoint", "list", "s3://models/run")
        said, errors = inside(root, *listing, **known).communicate(timeout=60)
        assert "snapshot 1, the latest" in said, errors
        other.cert_pem.write_to_path(root / BUNDLE[1:])
        errors = inside(root, *listing, **settings).communicate(timeout=100)[1]
        assert "UnknownIssuer: SSL_CERT_FILE must name the certificates of its CAs" in errors
        for file in (BUNDLE, "/no/such/file"):  # as an image that is filled otherwise
            (root / BUNDLE[1:]).unlink(missing_ok=True)
            missing = settings | {"SSL_CERT_FILE": file}
            server = inside(root, "--listen=127.0.0.1:0", "--copy-to=s3://models/run", **missing)
            errors = server.communicate(timeout=60)[1]
            assert server.returncode == 1
            assert "no certificates of CAs verify the servers of s3://models/run" in errors
            assert f"SSL_CERT_FILE names, got none in {file}" in errors
            assert "AWS_" not in errors


def test_the_containerfile_names_the_program_and_its_user() -> None:
    text = CONTAINERFILE
    assert f"USER {USER}:{USER}" in text
    # Only these reach the builder.
    everything, *kept = (ROOT / ".dockerignore").read_text().splitlines()[1:]
    assert everything == "*"
    assert all((ROOT / path.removeprefix("!")).exists() for path in kept)
    assert re.findall(r"^FROM (\S+)", text, re.MULTILINE)[-1] == "scratch"
    minimum = re.search(r'^rust-version = "([\d.]+)"', (ROOT / "Cargo.toml").read_text(), re.MULTILINE)
    assert minimum is not None
    assert f"/rust:{minimum[1]}-" in text


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / "fastps-server.service"
    unit.write_text(UNIT.replace("/usr/local/bin/fastps-server", shutil.which("true") or "/bin/true"))
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    unit.write_text(UNIT + "\n[Service]\nNoSuchSetting=1\n")  # it looks at the settings
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True)
    assert "NoSuchSetting" in done.stderr
    command = ["systemd-analyze", "security", "--offline=true", str(DEPLOY / "fastps-server.service")]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == 0:  # systemd 250 and later
        (exposure,) = re.findall(r"Overall exposure level.*: ([\d.]+)", done.stdout)
        assert float(exposure) < 2.5


def test_systemd_learns_what_a_server_does(tmp_path: Path) -> None:
    """That it serves, that the threads of its shards run, and that it stops."""
    for name in (str(tmp_path / "notify"), f"\0fastps-{os.getpid()}"):
        told = {"NOTIFY_SOCKET": name.replace("\0", "@"), "WATCHDOG_USEC": "1000000"}
        command = [sys.executable, "-m", "fastps", "serve", "--listen", "127.0.0.1:0"]
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
            manager.bind(name)
            manager.settimeout(60)
            server = subprocess.Popen(command, env=os.environ | told, stdout=subprocess.PIPE)
            try:
                assert manager.recv(99) == b"READY=1"
                assert select.select([server.stdout], [], [], 0)[0], "it listens before"
                assert manager.recv(99) == manager.recv(99) == b"WATCHDOG=1"
                hang(server.pid, "fastps-shard-0", manager)
                assert manager.recv(99) == b"WATCHDOG=1"
                server.terminate()
                while (said := manager.recv(99)) == b"WATCHDOG=1":
                    pass
                assert said == b"STOPPING=1"
                assert server.wait(60) == 0
            finally:
                server.kill()
                server.communicate()


def hang(pid: int, thread: str, manager: socket.socket) -> None:
    """Stops a thread until nothing has been heard of the process for a while, and lets it go on."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    (task,) = [int(one.name) for one in tasks if (one / "comm").read_text().strip() == thread]
    seize, interrupt, detach = 0x4206, 0x4207, 17
    if LIBC.ptrace(seize, task, 0, 0):
        pytest.skip("ptrace is not allowed here")
    LIBC.ptrace(interrupt, task, 0, 0)
    try:
        while select.select([manager], [], [], 5)[0]:
            assert manager.recv(99) == b"WATCHDOG=1"
    finally:
        os.waitpid(task, 0x40000000)  # __WALL
        assert LIBC.ptrace(detach, task, 0, 0) == 0


def calls(name: str) -> set[str]:
    """The system calls of one of systemd's sets."""
    command = ["systemd-analyze", "syscall-filter", name]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[1:]
    names = [line.strip() for line in lines if not line.strip().startswith("#")]
    return {call for name in names for call in (calls(name) if name.startswith("@") else {name})}


@pytest.mark.skipif(platform.machine() != "x86_64" or not NUMBERS.exists(), reason="no numbers of calls")
@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_a_server_runs_with_the_rights_of_the_unit(tmp_path: Path) -> None:
    """Any other system call, and memory that is written and executed, would end it or fail."""
    assert "\nMemoryDenyWriteExecute=yes\n" in UNIT
    (allowed, denied) = re.findall(r"^SystemCallFilter=(.*)", UNIT, re.MULTILINE)
    assert denied.startswith("~")
    names = calls(allowed) - set().union(*map(calls, denied[1:].split()))
    assert "read" in names
    assert "mount" not in names
    numbers = dict(re.findall(r"#define __NR_(\w+) (\d+)", NUMBERS.read_text()))
    kept = [int(numbers[name]) for name in sorted(names & numbers.keys())]
    # Each instruction of the filter: code, jumps, operand. It loads the number and compares.
    allow, kill = (0x06, 0, 0, 0x7FFF0000), (0x06, 0, 0, 0x80000000)
    rules = [(0x20, 0, 0, 0), *(rule for nr in kept for rule in ((0x15, 0, 1, nr), allow)), kill]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *rule) for rule in rules))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(rules), ctypes.addressof(code)))

    def confine() -> None:
        LIBC.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
        LIBC.prctl(65, 1, 0, 0, 0)  # PR_SET_MDWE, from Linux 6.3
        assert LIBC.prctl(22, 2, ctypes.addressof(program), 0, 0) == 0  # PR_SET_SECCOMP

    fill(tmp_path / "image")
    options = ("--listen=127.0.0.1:0", f"--data-dir={tmp_path}/data", f"--copy-to=file://{tmp_path}/copies")
    command = [str(tmp_path / "image/fastps-server"), *options, f"--audit={tmp_path}/audit"]
    pipe = subprocess.PIPE
    server = subprocess.Popen(command, preexec_fn=confine, stdout=pipe, stderr=pipe, text=True)
    address = address_of(server)
    try:
        assert "\nSeccomp:\t2\n" in Path(f"/proc/{server.pid}/status").read_text()
        for transport in (None, "tcp"):
            with fastps.connect(address, transport=transport, ack="logged") as ps:
                ps.register("w", np.zeros(600_000, np.float32), fastps.SGD(lr=1.0))
                ps.push("w", np.ones(600_000, np.float32))
                assert ps.pull("w")[-1] < 0
        server.terminate()
        assert server.wait(60) == 0, server.communicate()[1]
    finally:
        server.kill()
        said = server.communicate()[1]
    assert "copied snapshot" in said
    assert " WARN " not in said
