"""``fastps demo --compare``: a short comparison of all modes, its picture and its sentences."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fastps.commands.demo.strip import BIN, Strip


@pytest.mark.timeout(240)
def test_sync_waits_for_the_slow_worker_and_async_does_not(tmp_path: Path) -> None:
    options = [
        "--data",
        "shifted",
        "--compare",
        "sync,async,local,bounded",
        "--slow-worker",
        "20",
        "--seconds",
        "2",
    ]
    command = [sys.executable, "-m", "fastps", "demo", *options, "--json"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert ran.returncode == 0, ran.stderr
    assert [line for line in ran.stderr.splitlines() if len(line) > 80 and "/" not in line] == []
    result = json.loads(ran.stdout)
    modes = result["modes"]
    assert list(modes) == ["sync", "async", "local", "bounded"]
    for mode, one in modes.items():
        assert len(one["steps"]) == 5  # with the late worker
        assert min(one["steps"]) > 0
        assert (one["waiting"] > 0.5) >= (mode in ("sync", "bounded"))
    # Its slow worker takes 20 times as long; on a busy machine the others lose a part of that.
    assert modes["async"]["updates"] > 3 * modes["sync"]["updates"]
    assert sum(modes["local"]["steps"]) > 3 * sum(modes["bounded"]["steps"])
    assert modes["async"]["waiting"] < modes["sync"]["waiting"]
    report = json.loads((tmp_path / "fastps-demo/report.json").read_text())
    assert set(report["curves"]) == {*modes, "serial"}
    assert {event["text"].split(" ", 2)[2].split(",")[0] for event in report["events"]["sync"]} == {
        "killed (SIGKILL)", "started late",
    }  # fmt: skip
    assert report["curves"]["serial"][-1]["updates"] >= modes["async"]["updates"]
    pytest.importorskip("matplotlib")
    assert sorted(path.name for path in (tmp_path / "fastps-demo").iterdir()) == [
        "compare.png",
        "gain.png",
        "report.json",
    ]


def test_a_strip_counts_each_moment_once() -> None:
    strip, began = Strip(), time.monotonic()
    strip.computed(began, began + 2.5 * BIN)
    strip.computed(began + 3.25 * BIN, began + 3.5 * BIN)
    taken: dict[int, float] = {}
    over = False
    while not over:
        over = time.monotonic() > began + 6 * BIN  # before the last look, however late it is
        new = strip.take()
        assert not taken.keys() & new.keys()
        taken.update(new)
    assert sum(taken.values()) * BIN == pytest.approx(2.75 * BIN, abs=0.02 * BIN * len(taken))
    assert all(0.0 <= share <= 1.0 for share in taken.values())
