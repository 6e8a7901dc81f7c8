"""Runs a test file again as a program, on one instruction set."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

ISAS = ("scalar", "avx2", "avx512", "neon")


def printed_on(isa: str, file: str, timeout: float = 300) -> Any:
    """The JSON that `file` prints. Skips what the CPU lacks, unless `FASTPS_REQUIRE_ISA` lists it."""
    path = [os.path.dirname(__file__), *filter(None, [os.environ.get("PYTHONPATH")])]
    run = subprocess.run(
        [sys.executable, file],
        env=os.environ | {"FASTPS_ISA": isa, "PYTHONPATH": os.pathsep.join(path)},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    if run.returncode != 0 and f"this CPU lacks {isa}" in run.stderr:
        required = os.environ.get("FASTPS_REQUIRE_ISA", "").replace(",", " ").split()
        assert isa not in required, f"FASTPS_REQUIRE_ISA lists {isa}, and this CPU lacks it"
        pytest.skip(f"this CPU lacks {isa}")
    assert run.returncode == 0, run.stderr[-4000:]
    return json.loads(run.stdout)
