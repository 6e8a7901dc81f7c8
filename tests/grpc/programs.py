"""Foreign programs that tests build."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GRPCURL = "github.com/fullstorydev/grpcurl/cmd/grpcurl@v1.9.3"


@functools.cache
def grpcurl() -> str:
    """Path of grpcurl, built once per target folder; skips the test where that is not wanted or cannot be."""
    cache = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "go"
    program = cache / "bin" / "grpcurl"
    if not program.exists():
        if not os.environ.get("FASTPS_GRPCURL"):
            pytest.skip("grpcurl takes a minute to build; FASTPS_GRPCURL=1 asks for it")
        go = shutil.which("go")
        if go is None:
            pytest.skip("grpcurl needs go, which was not found")
        folders = {"GOBIN": cache / "bin", "GOMODCACHE": cache / "mod", "GOCACHE": cache / "cache"}
        settings = {name: str(path) for name, path in folders.items()} | {
            "GOFLAGS": "-modcacherw",
            "CGO_ENABLED": "0",
        }
        # Without optimizations and debug information it is built with less work.
        quick = ["-gcflags=all=-N -l -dwarf=false", "-ldflags=-s -w"]
        command = [go, "install", *quick, GRPCURL]
        built = subprocess.run(
            command, env=os.environ | settings, capture_output=True, text=True, timeout=500
        )
        if built.returncode:
            pytest.skip(f"grpcurl was not built: {built.stderr[-300:]}")
    return str(program)
