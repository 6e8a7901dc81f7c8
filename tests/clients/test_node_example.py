"""The small client in Node, `examples/node`, trains on two shards."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fastps
from clients.toolchain import ROOT
from faults.shards import PATIENT, Shards

EXAMPLE = ROOT / "examples/node"
MODULES = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "node"


def modules() -> Path:
    """The packages of the example, installed once per target folder."""
    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        pytest.skip("the example in Node needs node and npm, which were not found")
    MODULES.mkdir(parents=True, exist_ok=True)
    with (MODULES / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (MODULES / "node_modules/@grpc/grpc-js").is_dir():
            shutil.copy(EXAMPLE / "package.json", MODULES)
            command = [npm, "install", "--no-audit", "--no-fund", "--no-package-lock", "--ignore-scripts"]
            command += ["--fetch-retries=0", "--loglevel=error"]
            had = subprocess.run(command, cwd=MODULES, capture_output=True, text=True, timeout=100)
            if had.returncode:
                pytest.skip(f"the packages of the example in Node cannot be had: {had.stderr[-300:]}")
    return MODULES / "node_modules"


def node(address: str) -> subprocess.CompletedProcess[str]:
    """Runs the example."""
    environment = os.environ | {"NODE_PATH": str(modules())}
    command = ["node", str(EXAMPLE / "client.js"), address]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENT)


def test_the_client_in_node_trains(clusters: Callable[..., Shards]) -> None:
    addresses = clusters().addresses
    done = node(addresses[1])
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"versions": ["11"] * 3, "first": -5, "last": -5, "length": 600_000}
    with fastps.connect(addresses[0]) as ps:
        assert (ps.pull("node") == -5).all()


def test_the_client_in_node_says_what_is_wrong_with_an_address(
    clusters: Callable[..., Shards], ca: Any
) -> None:
    options = [f"--{name.replace('_', '-')}={file}" for name, file in ca.server.items()]
    secure = clusters(*options, "--insecure", shards=1).addresses[0]
    for address, words in (
        (secure, "speaks TLS"),
        ("localhost", "host:port"),
        (f"http://{secure}", "host:port"),
    ):
        done = node(address)
        assert (done.returncode, done.stderr.count("\n")) == (1, 1), done
        assert done.stderr.startswith(f"{address}: "), done
        assert words in done.stderr, done
