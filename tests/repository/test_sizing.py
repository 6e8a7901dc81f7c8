"""The constants of the page about sizing are those of the script that it names."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import fastps

ROOT = Path(__file__).resolve().parents[2]


def rows(text: str) -> dict[str, list[str]]:
    """Cells of the rows of all tables, by their first cell."""
    tables = re.findall(r"^\| (.*) \|$", text, re.MULTILINE)
    return {row.split(" | ")[0]: row.split(" | ")[1:] for row in tables}


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="the script reads /proc")
def test_the_page_shows_what_the_script_measures() -> None:
    command = [sys.executable, str(ROOT / "benchmarks/sizing.py"), "--quick"]
    measured = rows(subprocess.run(command, capture_output=True, text=True, timeout=100, check=True).stdout)
    shown = rows((ROOT / "docs/how-to/sizing.md").read_text())
    assert len(measured) == 14  # with the heads and the lines below them
    assert measured.keys() <= shown.keys()
    for name, cells in measured.items():
        kept = cells
        if name == "shared memory":
            kept = [cells[0], cells[1]]  # a machine without it has a Unix socket
        elif "Float" in name or name in ("`Int8`", "`OneBit`"):
            kept = cells[:2]  # the CPU time depends on the machine
        assert shown[name][: len(kept)] == kept, name


def test_the_page_says_what_a_client_takes_in_each_slice() -> None:
    found = re.search(r"W x (\d+) bytes x slices", (ROOT / "docs/how-to/sizing.md").read_text())
    assert found
    clients, tensors, ones = 10, [f"w{k}" for k in range(50)], np.ones(3, np.float32)
    with fastps.serve() as server, fastps.connect(server) as first:

        def taken() -> int:
            (shard,) = first.stats()["shards"]
            return int(shard["counters"]["memory_identities"])

        for name in tensors:
            first.register(name, ones, fastps.SGD(lr=1.0))
        others = [fastps.connect(server) for _ in range(clients)]
        before = taken()
        for ps in others:
            for _ in range(70):
                ps.push(dict.fromkeys(tensors, ones))
        each = (taken() - before) / (clients * len(tensors))
        assert int(found[1]) / 1.5 <= each <= int(found[1])
        for ps in others:
            ps.close()


@pytest.mark.skipif(sys.platform != "linux", reason="shared memory passes files")
def test_the_page_says_what_a_client_takes_over_shared_memory() -> None:
    page = (ROOT / "docs/how-to/sizing.md").read_text().replace("\n", " ")
    found = re.search(r"at most ([\d.]+) MiB while it is idle and ([\d.]+) MiB with pushes of 4 KB", page)
    assert found
    idle, small, clients = float(found[1]), float(found[2]), 10
    values = np.ones(1_000, np.float32)
    with fastps.serve() as server, fastps.connect(server) as first:
        first.register("w", values, fastps.SGD(lr=1.0))
        first.register("large", np.ones(1 << 18, np.float32), fastps.SGD(lr=1.0))

        def taken() -> float:
            (shard,) = first.stats()["shards"]
            return float(shard["counters"]["memory_connections"]) / clients / 2**20

        taken()
        before = taken()
        others = [fastps.connect(server, transport="shm") for _ in range(clients)]
        assert 0.05 < taken() - before <= idle
        for _ in range(20):
            for ps in others:
                ps.push_pull("w", values)
        assert taken() - before <= small
        for ps in others:
            ps.push("large", np.ones(1 << 18, np.float32))
        assert taken() - before > 2.0, "rings have grown"
        for ps in others:
            np.testing.assert_array_equal(ps.pull("large"), np.full(1 << 18, 1.0 - clients))
            ps.close()
