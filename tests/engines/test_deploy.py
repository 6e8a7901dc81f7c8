"""The image's root and the systemd unit of `deploy`."""

from __future__ import annotations

import os
import re
import shutil
import signal
import ssl
import subprocess
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
