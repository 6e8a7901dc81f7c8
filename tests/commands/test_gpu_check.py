"""`benchmarks/gpu.py`: the whole rehearsal, and verdicts of rows that end in every way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu.py"
WHEEL = Path(os.environ.get("FASTPS_WHEEL", "")).absolute()

needs_a_wheel = pytest.mark.skipif(
    not WHEEL.is_file(), reason="FASTPS_WHEEL names no wheel; make test builds one and names it"
)


@pytest.fixture
def device(monkeypatch):
    """The package beside the script."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from device import report, runs

    return runs, report


def variables(*paths):
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [ROOT / "benchmarks", *paths]))}


def run(*arguments, cwd, script=SCRIPT):
    command = [sys.executable, str(script), *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=2400)


@pytest.mark.nightly
@needs_a_wheel
@pytest.mark.timeout(2400)
def test_the_rehearsal_passes_in_every_row(tmp_path):
    """In the folder for the GPU machine, which has neither the repository nor an installation of fastps."""
    box = tmp_path / "gpu-check"
    collected = run("--wheel", WHEEL, "--collect", box, cwd=tmp_path)
    assert f"--wheel {WHEEL.name}" in collected.stdout, collected.stderr
    out = box / "out"
    command = ["--wheel", WHEEL.name, "--out", "out", "--rehearse", "--cores", "--minutes", "38"]
    done = run(*command, cwd=box, script=box / "benchmarks" / "gpu.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(path.name for path in out.iterdir()) == ["gpu.json", "gpu.md"]
    result = json.loads((out / "gpu.json").read_text())
    assert result["rehearsal"] is True
    files = {path.stem for path in (ROOT / "tests" / "gpu").glob("test_*.py")}
    assert result["checks"].keys() == files
    for file, outcomes in result["checks"].items():
        assert {outcome["verdict"] for outcome in outcomes} == {"passed"}, file
    assert len(result["rows"]) >= 13
    for name, row in result["rows"].items():
        assert row["verdict"] == "passed", name
        assert any(line.startswith("| ") for line in row["table"]), name
    page = (out / "gpu.md").read_text()
    assert "a rehearsal" in page
    assert str(tmp_path) not in page


CHECKS = {
    "test_ends.py": """
import os, pytest, time
def test_passes(): pass
def test_fails(): assert 1 == 2
@pytest.mark.parametrize("k", [0, 1])
def test_dies(k):
    if k: os._exit(7)
def test_is_skipped(): pytest.skip("no card")
def test_passes_after_it(): pass
""",
    "test_hangs.py": """
import time
def test_first(): pass
def test_hangs(): time.sleep(600)
""",
    "test_ends_badly.py": """
import atexit, os
atexit.register(lambda: os._exit(9))
def test_before_it(): pass
""",
    "test_is_wrong.py": "import no_such_module",
    "test_has_no_jax.py": "import pytest; pytest.importorskip('no_such_module', reason='no JAX')",
}


@pytest.mark.timeout(300)
def test_a_check_that_dies_or_hangs_ends_no_other(tmp_path, monkeypatch, device):
    runs, report = device
    for name, code in CHECKS.items():
        (tmp_path / name).write_text(code)
    monkeypatch.setattr(runs, "CHECKS", tmp_path)
    monkeypatch.setattr(runs, "FILE_LIMIT", 20.0)
    found = dict(runs.checks(variables(), runs.Budget(4), 4))
    verdicts = {
        outcome["test"].rpartition("::")[2]: outcome["verdict"]
        for outcomes in found.values()
        for outcome in outcomes
    }
    assert verdicts == {
        "test_passes": "passed",
        "test_fails": "failed",
        "test_dies[0]": "passed",
        "test_dies[1]": "crashed",
        "test_is_skipped": "skipped",
        "test_passes_after_it": "passed",
        "test_first": "passed",
        "test_hangs": "timed out",
        "test_before_it": "passed",
        "test_ends_badly.py": "crashed",
        "test_is_wrong.py": "failed",
        "test_has_no_jax.py": "skipped",
    }
    result = {"checks": found, "rows": {}}
    assert len(report.failed(result)) == 5
    page = "\n".join(report.verdicts(found))
    assert "| test_ends: dies | 1 | 0 | 1 |" in page
    assert "test_ends.py::test_dies[1]: crashed: the process ended with 7" in page
    assert "test_ends.py::test_is_skipped: skipped: no card" in page
    assert "assert 1 == 2" in page


ROWS = """
import os, time
from device.row import Row, Skipped
def fails(setting): raise ValueError("no such card\\nmore")
def is_skipped(setting): raise Skipped("needs scikit-learn")
def dies(setting): os._exit(3)
def hangs(setting): time.sleep(600)
def passes(setting): return {"small": setting.small}
def cannot_be_shown(setting): return {}
def show(figures): return [f"small: {figures['small']}"]
CORES = []
GPU = [Row(f.__name__, f, show, 20.0) for f in (fails, is_skipped, dies, hangs, passes, cannot_be_shown)]
ROWS = {row.name: row for row in GPU}
"""


@pytest.mark.timeout(300)
def test_a_row_that_fails_ends_no_other(tmp_path, device):
    runs, _ = device
    for file in (ROOT / "benchmarks" / "device").glob("*.py"):
        (tmp_path / "device").mkdir(exist_ok=True)
        (tmp_path / "device" / file.name).write_text(file.read_text())
    (tmp_path / "device" / "rows.py").write_text(ROWS)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    limits = dict.fromkeys(["fails", "is_skipped", "dies", "hangs", "passes", "cannot_be_shown"], 20.0)
    found = dict(runs.rows(limits, (True, None), environment, runs.Budget(4), 2))
    assert {name: row["verdict"] for name, row in found.items()} == {
        "fails": "failed",
        "is_skipped": "skipped",
        "dies": "crashed",
        "hangs": "timed out",
        "passes": "passed",
        "cannot_be_shown": "failed",
    }
    assert found["fails"]["reason"] == "ValueError: no such card"
    assert found["is_skipped"]["reason"] == "needs scikit-learn"
    assert found["passes"]["table"] == ["small: True"]
    late = dict(runs.rows(limits, (True, None), environment, runs.Budget(0), 1))
    assert {row["verdict"] for row in late.values()} == {"not run"}


def event(kind, name, begin, end, **arguments):
    return {"ph": "X", "cat": kind, "name": name, "ts": begin, "dur": end - begin, "args": arguments}


def test_the_summary_of_a_trace(device):
    """Two steps of 10 ms: in the first a kernel runs for 4 ms of it, in the second none does."""
    from device.trace import STEP, Copies, summary

    found = summary(
        [
            event("user_annotation", STEP, 1_000, 11_000),
            event("gpu_user_annotation", STEP, 1_000, 11_000),
            event("user_annotation", STEP, 31_000, 41_000),
            event("kernel", "gemm", 0, 3_000),
            event("kernel", "gemm", 2_000, 4_000),
            event("kernel", "gemm", 9_000, 10_000),
            event("kernel", "gemm", 15_000, 30_000),
            event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 4_000, 6_000, bytes=2_000_000),
            event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 5_000, 8_000, bytes=4_000_000),
            event("cpu_op", "aten::copy_", 0, 50_000),
            {"ph": "i", "cat": "kernel", "name": "instant", "ts": 5_000},
        ]
    )
    assert found.step == pytest.approx(10e-3)
    assert found.period == pytest.approx(30e-3)
    assert found.idle == pytest.approx(15e-3)
    assert found.stall == pytest.approx((6e-3 + 10e-3) / 2)
    assert found.copying == pytest.approx(4e-3 / 2)
    assert found.to_cpu == Copies(1_000_000, pytest.approx(1e-3))
    assert found.to_gpu == Copies(2_000_000, pytest.approx(1.5e-3))


def test_wrong_calls_are_refused(tmp_path):
    for arguments, text in [
        ([], "--wheel and --out are needed"),
        (["--wheel", "none.whl", "--out", "out"], "there is no file none.whl"),
    ]:
        done = run(*arguments, cwd=tmp_path)
        assert done.returncode == 2
        assert text in done.stderr


@needs_a_wheel
@pytest.mark.timeout(300)
def test_a_wheel_that_does_not_work_is_named(tmp_path):
    with zipfile.ZipFile(tmp_path / "broken.whl", "w") as archive:
        archive.writestr("fastps/__init__.py", "raise ImportError('built for another machine')")
    done = run("--wheel", "broken.whl", "--out", "out", "--rehearse", cwd=tmp_path)
    assert done.returncode == 1
    assert "ImportError: built for another machine" in done.stderr
