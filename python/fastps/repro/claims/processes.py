"""Real processes: a worker that is killed, one that is paused, and one that comes late."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from fastps._shared.process import CommandError
from fastps.repro.claim import Claim, Figures, Setting, Verdict, row

__all__ = ["CLAIMS"]

UPDATES = 8000
PAUSE = 2.0


def measure(setting: Setting) -> Figures:
    """Runs ``fastps demo`` on MNIST with faults and without; it checks its ledger itself."""
    accuracy: dict[str, list[float]] = {"without": [], "with": []}
    balances = []
    for seed in setting.seeds(3):
        for arm, found in accuracy.items():
            result = demo(setting, seed, faults=arm == "with")
            found.append(100 * result["test_accuracy"])
            balances.append([result["acknowledged"], result["versions"], result["in_flight"]])
    return {"task": "mnist", "updates": UPDATES, "accuracy": accuracy, "balances": balances}


def demo(setting: Setting, seed: int, faults: bool) -> dict[str, Any]:
    """One run; with faults, a worker is killed half-way, one starts late, and one is paused."""
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "-m", "fastps", "demo", "--json", "--data", "mnist"]
        command += ["--data-dir", f"{setting.data_dir}/mnist", "--updates", str(UPDATES), "--seconds", "600"]
        command += ["--seed", str(seed), "--out", out, *([] if faults else ["--no-kill"])]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        if faults:
            threading.Thread(target=pause_a_worker, args=[process.pid], daemon=True).start()
        told, _ = process.communicate()
    if process.returncode != 0:  # 3: acknowledged pushes and versions do not reconcile
        raise CommandError(f"fastps demo ended with exit code {process.returncode} (seed {seed})")
    result: dict[str, Any] = json.loads(told.splitlines()[-1])
    return result


def pause_a_worker(demo: int) -> None:
    """Stops the first of a demo's worker processes for some time."""
    late = time.monotonic() + 120
    while time.monotonic() < late:
        workers = [pid for pid in children(demo) if b"worker" in command_of(pid)]
        if workers:
            time.sleep(3.0)
            with contextlib.suppress(ProcessLookupError):
                os.kill(workers[0], signal.SIGSTOP)
                time.sleep(PAUSE)
                os.kill(workers[0], signal.SIGCONT)
            return
        time.sleep(0.1)


def children(pid: int) -> list[int]:
    """Process ids of a process's children (Linux)."""
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    try:
        return sorted(int(child) for task in tasks for child in task.read_text().split())
    except OSError:  # it has ended
        return []


def command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def judge(figures: Figures) -> Verdict:
    accuracy = figures["accuracy"]
    points = float(np.mean(accuracy["with"]) - np.mean(accuracy["without"]))
    exact = all(
        told <= made <= told + flying
        for told, versions, flying in figures["balances"]
        for made in versions.values()
    )
    without, faults = row(accuracy["without"], 4), row(accuracy["with"], 4)
    text = f"accuracy {without} % without, {faults} % with: {points:+.2f} points"
    return Verdict(
        abs(points) <= 0.5 and exact, f"{text}; ledger {'exact' if exact else 'wrong'} in all 6 runs"
    )


def draw(figures: Figures, figure: Any) -> None:
    axes = figure.subplots()
    for k, accuracy in enumerate(figures["accuracy"].values()):
        axes.plot([k] * len(accuracy), accuracy, "o", color=("#2166ac", "#b2182b")[k])
        axes.plot([k - 0.1, k + 0.1], [np.mean(accuracy)] * 2, color="black")
        axes.annotate(f"{np.mean(accuracy):.2f} %", (k + 0.12, np.mean(accuracy)), va="center")
    axes.set_xticks(range(2), [f"{arm} faults" for arm in figures["accuracy"]])
    axes.set_xlim(-0.5, 1.5)
    axes.set_ylabel(f"test accuracy after {figures['updates']} updates (%)\none dot a seed; line: mean")


CLAIMS = [
    Claim(
        name="faults",
        says="A worker that is killed, one that is paused and one that comes late cost no accuracy.",
        source="Dean et al., NIPS 2012",
        paper="a dead replica only stops contributing",
        threshold="mean accuracy of 3 seeds within .5 points; every acknowledged push is in the versions",
        measure=measure,
        judge=judge,
        draw=draw,
        forms="full",
        clock="wall",
        repeats=False,
        note="Each run is a `fastps demo` of 8,000 updates.",
    ),
]
