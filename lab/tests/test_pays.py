"""The quick form of the script behind the page "Does it pay?"."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(300)
def test_the_script_measures_gains_and_costs() -> None:
    command = [sys.executable, str(ROOT / "lab/grids/workers/pays.py"), "--quick"]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=280, check=True).stdout
    uneven, equal, processes = re.split(r"^\w+:$", printed, flags=re.MULTILINE)[1:]
    for name, text in ("uneven", uneven), ("equal", equal):
        head, _, row = (line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|"))
        cells = dict(zip(head, row, strict=True))
        for way in head[2:]:
            gain, cost = map(float, cells[way].split(", "))
            assert abs(cost - 4 / gain) <= 0.06 * (cost + cost / gain), (name, way)  # both are rounded
        # A worker that takes ten times as long holds up all who wait for it, and only them.
        assert (float(cells["`Sync`"].split(", ")[0]) < 0.5) == (name == "uneven")
    assert [row.split(" | ")[:2] for row in processes.splitlines()[4:] if row] == [
        ["| 1", "`Async()`"],
        ["| 2", "`Async()`"],
        ["| 2", "`Sync`"],
    ]
    assert "inf" not in processes
