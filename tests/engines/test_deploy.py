"""The image's root and the systemd unit of `deploy`."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest

import fastps
from server_image import DEPLOY, MOST, ROOT, USER, fill


def serve(root: Path) -> tuple[subprocess.Popen[str], str]:
    """Starts the image's server as its user, with the image as root; returns it and its address."""
    command = ["chroot", f"--userspec={USER}:{USER}", str(root), "/fastps-server", "--listen", "127.0.0.1:0"]
    environment = {"PATH": os.environ["PATH"], "FASTPS_SERVER_DATA_DIR": "/data"}
    quiet = subprocess.DEVNULL
    server = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=quiet, text=True)
    assert server.stdout is not None
    for line in server.stdout:
        if listens := re.search(r"listening on (\S+)", line):
            return server, listens[1]
    raise AssertionError(f"the server ended with {server.wait()}")


@pytest.mark.skipif(os.geteuid() != 0, reason="chroot needs root")
def test_the_image_s_root_has_all_that_a_server_needs(tmp_path: Path) -> None:
    """It serves as a user without rights, keeps its state only in /data, and ends with SIGTERM."""
    root = tmp_path / "image"
    fill(root)
    files = [path for path in root.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < MOST
    assert not [path for path in files if path.name != "fastps-server" and ".so" not in path.name]
    (root / "data").mkdir()
    os.chown(root / "data", USER, USER)
    for folder in (tmp_path, *tmp_path.parents[:2]):  # pytest's are closed to others
        folder.chmod(0o755)
    for life in range(2):
        server, address = serve(root)
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


def test_the_containerfile_names_the_program_and_its_user() -> None:
    text = (DEPLOY / "Containerfile").read_text()
    assert f"USER {USER}:{USER}" in text
    assert re.findall(r"^FROM (\S+)", text, re.MULTILINE)[-1] == "scratch"
    minimum = re.search(r'^rust-version = "([\d.]+)"', (ROOT / "Cargo.toml").read_text(), re.MULTILINE)
    assert minimum is not None
    assert f"/rust:{minimum[1]}-" in text


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    text = (DEPLOY / "fastps-server.service").read_text()
    unit = tmp_path / "fastps-server.service"
    unit.write_text(text.replace("/usr/local/bin/fastps-server", shutil.which("true") or "/bin/true"))
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    unit.write_text(text + "\n[Service]\nNoSuchSetting=1\n")  # it looks at the settings
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True)
    assert "NoSuchSetting" in done.stderr
