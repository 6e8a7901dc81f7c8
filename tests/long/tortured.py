"""`fastps torture` must find every seeded fault of a build (`make mutants` runs it)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TARGET = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))

SECONDS = 60.0
"""Within which a fault must be found, start and end included."""

TORTURED = {
    "identity_off": ("--profile", "net", "--ack", "logged"),
    "fsync_skipped": ("--profile", "crash", "--ack", "logged"),
    "lock_not_retaken": ("--profile", "crash", "--ack", "logged"),
    "loss_swallowed": ("--profile", "crash", "--ack", "applied"),
    "entry_not_charged": ("--profile", "hostile", "--ack", "logged"),
    "lease_never_expires": ("--profile", "crash", "--ack", "logged"),
    "flight_not_noted": ("--profile", "crash", "--ack", "logged"),
    "seat_for_all": ("--profile", "hostile", "--ack", "logged", "--seconds", "25"),
    "work_unbounded": ("--profile", "hostile", "--ack", "logged", "--seconds", "25"),
    "free_pusher_bound": ("--profile", "hostile", "--ack", "logged", "--seconds", "25"),
    "hold_unbounded": ("--profile", "hostile", "--ack", "logged", "--seconds", "25"),
    "window_charged": ("--profile", "hostile", "--ack", "logged", "--seconds", "25"),
    "state_not_charged": ("--profile", "hostile", "--ack", "logged", "--seconds", "25"),
    "ended_forgotten": ("--profile", "hostile", "--ack", "logged", "--seconds", "25"),
}
"""The options of the run for each fault; they inject as few other faults as possible."""

EXPECTED = {
    "identity_off": {"ledger"},
    "fsync_skipped": {"ledger"},
    "lock_not_retaken": {"one owner"},
    "loss_swallowed": {"reported"},
    "entry_not_charged": {"budget"},
    "lease_never_expires": {"budget"},
    "flight_not_noted": {"ledger"},
    "seat_for_all": {"strangers"},
    "work_unbounded": {"strangers"},
    "free_pusher_bound": {"strangers"},
    "hold_unbounded": {"strangers"},
    "window_charged": {"strangers"},
    "state_not_charged": {"strangers"},
    "ended_forgotten": {"strangers"},
}
"""Invariants of which one must be violated."""


def build() -> Path:
    """Builds the extension module with the faults in; the folder to import fastps from."""
    command = ["cargo", "build", "--locked", "-p", "fastps-python", "--features", "mutants"]
    subprocess.run(command, cwd=ROOT, check=True)
    folder = TARGET / "mutants"
    shutil.rmtree(folder, ignore_errors=True)
    ignored = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(ROOT / "python/fastps", folder / "fastps", ignore=ignored)
    shutil.copy(TARGET / "debug/lib_fastps.so", folder / "fastps/_fastps.abi3.so")
    return folder


def violations(folder: Path, mutant: str, arguments: tuple[str, ...], seed: int) -> set[str]:
    """The invariants that a run finds violated."""
    command = [sys.executable, "-P", "-m", "fastps", "torture", "--json", "--seed", str(seed)]
    # A run waits up to 30 s at its end until nothing of its clients is left.
    command += ["--seconds", "15", *arguments]
    env = {**os.environ, "PYTHONPATH": str(folder), "FASTPS_MUTANT": mutant}
    run = subprocess.run(command, cwd=folder, env=env, stdout=subprocess.PIPE, text=True, timeout=3 * SECONDS)
    report = json.loads(run.stdout.splitlines()[-1])
    if Path(report["history"]).exists():
        shutil.rmtree(Path(report["history"]).parent)
    return set(report["violations"])


def survivor(folder: Path, mutant: str, seed: int) -> str | None:
    """What is wrong with how the checker sees a fault; None if it is found."""
    try:
        found = violations(folder, mutant, TORTURED[mutant], seed)
    except subprocess.TimeoutExpired:
        return "the run does not end"
    return None if found & EXPECTED[mutant] else f"violated: {sorted(found) or 'nothing'}"


def main() -> int:
    """Every fault, and a run without one; 1 if the checker misses something or sees what is not there."""
    folder, failed = build(), 0
    for seed, ack in enumerate(("logged", "applied")):
        if found := violations(folder, "", ("--ack", ack), seed):
            print(f"without a fault, {ack}: violated: {sorted(found)}", flush=True)
            return 1
    for seed, mutant in enumerate(TORTURED):
        start = time.monotonic()
        wrong = survivor(folder, mutant, seed)
        took = time.monotonic() - start
        if wrong is None and took > SECONDS:
            wrong = f"it took longer than {SECONDS:g} s"
        print(f"{mutant:24} {wrong or 'found by fastps torture'} ({took:.0f} s)", flush=True)
        failed += wrong is not None
    return int(failed > 0)
