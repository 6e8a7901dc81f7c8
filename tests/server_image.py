"""The root of the image of `deploy/Containerfile`, for tests that run it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DEPLOY = ROOT / "deploy"
USER = 65532
#: As much as an image may have: a release has at most 40 MB, and code that is not optimised is larger.
MOST = 56 << 20


def fill(root: Path) -> None:
    """Fills a folder with the image's root, with the server that `make test-rust` has built."""
    program = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "debug/fastps-server"
    if not program.exists():
        pytest.skip("fastps-server is not built (make test-rust)")
    subprocess.run([str(DEPLOY / "image-root"), str(program), str(root)], check=True)
