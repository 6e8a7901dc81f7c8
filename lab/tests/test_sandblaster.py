"""``fastps-lab sandblaster`` as a user runs it, and with a replica that is killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

import fastps
from fastps_lab import problems
from fastps_lab.sandblaster.replica import ReplicaProcess
from fastps_lab.sandblaster.run import _LR, Config, _downpour, run

DATA = os.environ.get("FASTPS_DATA_DIR", "/nowhere")


def sandblaster(*options: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fastps_lab", "sandblaster", *options]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=100)


def test_it_prints_a_table_and_draws_a_picture(tmp_path: Path) -> None:
    options = [
        "--replicas",
        "2",
        "--method",
        "lbfgs,cg-hs",
        "--iterations",
        "20",
        "--beside",
        "downpour",
        "--json",
    ]
    ran = sandblaster(*options, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    [line] = ran.stdout.splitlines()
    result = json.loads(line)
    assert [curve["method"] for curve in result["curves"]] == ["lbfgs", "cg-hs", "downpour"]
    for curve in result["curves"]:
        first, last = curve["curve"][0][2], curve["curve"][-1][2]
        # Downpour gets as much time as the others took, not as many steps.
        assert last < (first if curve["method"] == "downpour" else 0.2 * first)
        assert curve["method"] in ran.stderr
    assert set(result["curves"][0]["replicas"]) <= {"replica 0", "replica 1"}
    assert result["curves"][0]["nit"] == 20
    out = tmp_path / "fastps-sandblaster"
    assert json.loads((out / "report.json").read_text()) == result
    assert (out / "sandblaster.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in out.iterdir()) == ["report.json", "sandblaster.png"]


def test_a_replica_that_is_killed_changes_no_bit(tmp_path: Path) -> None:
    problem, said = problems.load("digits", None), []
    config = Config("digits", None, 1, ["lbfgs"], False, 12, 0.0, 24)
    [alone] = run(config, problem, tmp_path, lambda _: None, said.append)
    others = set(psutil.Process().children())  # of other tests

    def kill(line: str) -> None:
        children = [child for child in psutil.Process().children() if child not in others]
        if "batch     6" in line and len(children) == 4:  # a server and three replicas
            children[2].kill()

    [killed] = run(Config(**{**vars(config), "replicas": 3}), problem, tmp_path, kill, said.append)
    assert (killed.fun, killed.evaluations) == (alone.fun, alone.evaluations)
    assert any("replica 1 ended with exit code -9" in line for line in said), said
    assert set(psutil.Process().children()) <= others


def test_a_command_that_is_killed_continues_with_the_same_bits(tmp_path: Path) -> None:
    problem, said = problems.load("digits", None), []
    alone = Config("digits", None, 1, ["lbfgs", "cg-pr"], False, 7, 0.0, 12)
    expected = run(alone, problem, tmp_path, lambda _: None, said.append)
    options = ["--replicas", "2", "--method", "lbfgs,cg-pr", "--iterations", "7", "--tol", "0"]
    options += ["--portions", "12", "--shards", "2", "--json"]
    command = [sys.executable, "-m", "fastps_lab", "sandblaster", *options]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL) as process:
        progress = tmp_path / "fastps-sandblaster" / "progress.json"
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if progress.exists() and len(json.loads(progress.read_text())["curves"].get("cg-pr", [])) > 2:
                break
            time.sleep(0.005)
        children = psutil.Process(process.pid).children()
        process.kill()
    psutil.wait_procs(children, timeout=30)
    other = sandblaster(*[*options[:-3], "--shards", "3", "--resume"], cwd=tmp_path)
    assert other.returncode == 1
    assert "had other options: expected shards 2, got 3" in other.stderr
    ran = sandblaster(*options, "--resume", cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    result = json.loads(ran.stdout)
    for curve, whole in zip(result["curves"], expected, strict=True):
        assert (curve["fun"], curve["evaluations"]) == (whole.fun[-1], whole.evaluations[-1])
        assert [fun for _, _, fun in curve["curve"]] == whole.fun
    assert not progress.exists()
    again = sandblaster(*options, "--resume", cwd=tmp_path)
    assert again.returncode == 1
    assert "nothing to resume in" in again.stderr


def test_losses_have_the_gradients_that_they_say() -> None:
    rng = np.random.default_rng(0)
    for name in ("digits", *(name for name in ("a9a", "w8a") if (Path(DATA) / name).is_dir())):
        problem = problems.load(name, DATA)
        at = {key: p + 0.01 * rng.standard_normal(p.shape) for key, p in problem.start.items()}
        along = {key: rng.standard_normal(p.shape) for key, p in at.items()}
        indices = np.arange(50, 90)

        def loss(step: float) -> float:
            return problem.objective({k: at[k] + step * along[k] for k in at}, indices)[0]  # noqa: B023

        _, gradients = problem.objective(at, indices)
        slope = sum(float((gradients[key] * along[key]).sum()) for key in at)
        assert (loss(1e-6) - loss(-1e-6)) / 2e-6 == pytest.approx(slope, rel=1e-5)


def test_a_replica_that_ends_has_last_words(tmp_path: Path) -> None:
    process = ReplicaProcess("7", "w8a", None, "127.0.0.1:1", tmp_path / "log")
    try:
        text = str(process.ended())
    finally:
        process.close()
    assert text.startswith("replica 7 ended with exit code 1: ")
    assert "needs --dataset-dir" in text


def test_downpour_begins_at_the_start_also_after_an_interrupted_one() -> None:
    problem = problems.load("digits", None)
    config = Config("digits", None, 1, [], True, 1, 0.0, 1)
    with fastps.Store() as store:
        for name, values in problem.start.items():
            store.register(f"downpour/{name}", -50 * values, optimizer=fastps.Adagrad(lr=_LR))
        curve = _downpour(store, config, problem, 0.0, lambda _: None)
    assert curve.fun[0] < problem.fun(problem.start) + 1


WRONG = [
    (["--method", "newton"], 2, "'newton' is not one of lbfgs, cg-pr, cg-hs, cg-fr, gd"),
    (["--replicas", "0"], 2, "'0' is not a whole number above 0"),
    (["--tol", "-1"], 2, "'-1' is not a number >= 0"),
    (["--data", "a9a"], 1, "--data a9a needs --dataset-dir DIR"),
    (["--resume"], 1, "nothing to resume in"),
    (["--data", "w8a", "--dataset-dir", "."], 1, "w8a.gz cannot be read"),
]


@pytest.mark.parametrize(("options", "code", "text"), WRONG, ids=str)
def test_wrong_usage_is_explained(options: list[str], code: int, text: str, tmp_path: Path) -> None:
    ran = sandblaster(*options, cwd=tmp_path)
    assert ran.returncode == code
    assert text in ran.stderr
