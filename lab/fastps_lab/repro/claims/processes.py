"""Real processes: a worker that is killed, one that is paused, and one that comes late."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from fastps.commands.kit import CommandError
from fastps.commands.kit.children import python_module
from fastps.commands.kit.ledger import Ledger
from fastps_lab.repro.claim import Claim, Figures, Setting, Verdict, row

__all__ = ["CLAIMS"]

UPDATES = 8000
PAUSE = 2.0
#: Pushes of a worker before it is paused.
FIRST = 100


def measure(setting: Setting) -> Figures:
    """Runs ``fastps demo`` on MNIST with faults and without; it checks its ledger itself."""
    accuracy: dict[str, list[float]] = {"without": [], "with": []}
    balances, pauses = [], []
    for seed in setting.seeds(3):
        for arm, found in accuracy.items():
            result, pause = demo(setting, seed, faults=arm == "with")
            found.append(100 * result["test_accuracy"])
            balances.append([result["acknowledged"], result["versions"], result["in_flight"]])
            if arm == "with":
                pauses.append(pause)
    return {
        "task": "mnist", "updates": UPDATES, "accuracy": accuracy, "balances": balances, "pauses": pauses
    }  # fmt: skip


def demo(setting: Setting, seed: int, faults: bool) -> tuple[dict[str, Any], Figures | None]:
    """One run; with faults, a worker is killed half-way, one starts late, and one is paused."""
    with tempfile.TemporaryDirectory() as out, ThreadPoolExecutor(1) as threads:
        command = [*python_module("fastps", "demo"), "--json", "--data", "mnist"]
        command += [
            "--dataset-dir",
            f"{setting.dataset_dir}/mnist",
            "--updates",
            str(UPDATES),
            "--seconds",
            "600",
        ]
        command += ["--seed", str(seed), "--out", out, *([] if faults else ["--no-kill"])]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        pause = threads.submit(pause_a_worker, process, Path(out)) if faults else None
        output, complaints = process.communicate()
        if process.returncode != 0:  # 3: acknowledged pushes and versions do not reconcile
            why = complaints.splitlines()[-1:] or ["it left no message"]
            raise CommandError(
                f"fastps demo ended with exit code {process.returncode} (seed {seed}): {why[0]}"
            )
        return json.loads(output.splitlines()[-1]), pause.result() if pause else None


def pause_a_worker(demo: subprocess.Popen[str], out: Path) -> Figures | None:
    """Stops a demo's worker 0 when it has pushed for a while; returns as `pause`."""
    while demo.poll() is None:
        time.sleep(0.02)
        pid = worker_process(demo.pid, out / "worker-0.ledger")
        if pid is not None and acknowledged(out).get(0, 0) >= FIRST:
            return pause(pid, out)
    return None


def pause(pid: int, out: Path) -> Figures | None:
    """Stops the process of worker 0 for some time.

    Returns:
        Its pushes ``before`` the pause and ``meanwhile``, and those of ``others`` meanwhile; None if the demo
        ended before the pause did.
    """
    try:
        os.kill(pid, signal.SIGSTOP)
        while not is_stopped(pid):
            time.sleep(0.001)
        first = acknowledged(out)
        time.sleep(PAUSE)
        last, stopped = acknowledged(out), is_stopped(pid)
        os.kill(pid, signal.SIGCONT)
    except OSError:
        return None
    if not stopped or 0 not in first or 0 not in last:
        return None
    mine = last[0] - first[0]
    return {
        "before": first[0], "meanwhile": mine, "others": sum(last.values()) - sum(first.values()) - mine
    }  # fmt: skip


def acknowledged(out: Path) -> dict[int, int]:
    """Acknowledged pushes of each of a demo's workers, from their ledgers."""
    found = {}
    for path in out.glob("worker-*.ledger"):
        with contextlib.suppress(OSError, ValueError):  # it is being made, or was removed
            found[int(path.stem.partition("-")[2])] = Ledger(path).read().acknowledged
    return found


def worker_process(demo: int, ledger: Path) -> int | None:
    """The process id of the child that has mapped this ledger (Linux)."""
    try:
        tasks = Path(f"/proc/{demo}/task").glob("*/children")
        children = [int(child) for task in tasks for child in task.read_text().split()]
        return next((pid for pid in children if str(ledger) in Path(f"/proc/{pid}/maps").read_text()), None)
    except OSError:  # one has ended
        return None


def is_stopped(pid: int) -> bool:
    """Returns whether a process is stopped by a signal (Linux)."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def judge(figures: Figures) -> Verdict:
    accuracy, pauses = figures["accuracy"], figures["pauses"]
    points = float(np.mean(accuracy["with"]) - np.mean(accuracy["without"]))
    exact = all(
        acknowledged <= made <= acknowledged + flying
        for acknowledged, versions, flying in figures["balances"]
        for made in versions.values()
    )
    paused = sum(pause is not None and pause["others"] > 0 == pause["meanwhile"] for pause in pauses)
    without, faults = row(accuracy["without"], 4), row(accuracy["with"], 4)
    ledger = f"ledger {'exact' if exact else 'wrong'} in all {len(figures['balances'])} runs"
    return Verdict(
        abs(points) <= 0.5 and exact and paused == len(pauses),
        f"accuracy {without} % without, {faults} % with: {points:+.2f} points; {ledger}; a worker was "
        f"paused while others pushed in {paused} of {len(pauses)}",
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
        threshold="mean accuracy of 3 seeds within .5 points; every acknowledged push is in the versions; "
        "a worker is paused while the others push",
        measure=measure,
        judge=judge,
        draw=draw,
        forms="full",
        clock="wall",
        repeats=False,
        note="Each run is a `fastps demo` of 8,000 updates. The pause needs Linux.",
    ),
]
