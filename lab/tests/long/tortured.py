"""`fastps-lab torture` must find every seeded fault of a build (`make mutants` runs it)."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from fastps_lab.torture.plan import Plan

ROOT = Path(__file__).resolve().parents[3]
TARGET = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))

SECONDS = 60.0
"""Within which a fault must be found, start and end included."""

TORTURED = {
    "identity_off": ("net", "logged", None),
    "fsync_skipped": ("crash", "logged", None),
    "lock_not_retaken": ("crash", "logged", 2),
    "loss_swallowed": ("crash", "applied", None),
    "entry_not_charged": ("hostile", "logged", ("hostile", "registrations")),
    "lease_never_expires": ("crash", "logged", None),
    "flight_not_noted": ("crash", "logged", None),
    "seat_for_all": ("hostile", "logged", ("stranger", "seat")),
    "work_unbounded": ("hostile", "logged", ("stranger", "program")),
    "free_pusher_bound": ("hostile", "logged", ("stranger", "join")),
    "hold_unbounded": ("hostile", "logged", ("stranger", "hold")),
    "window_charged": ("hostile", "logged", ("stranger", "workers")),
    "state_not_charged": ("hostile", "logged", ("stranger", "states")),
    "ended_forgotten": ("hostile", "logged", ("stranger", "replay")),
}
"""Profile and ack level of the run for each fault, which inject as few other faults as possible, and the lane
whose first action meets the fault, or a seed."""

EXPECTED = {
    "identity_off": {"ledger"},
    "fsync_skipped": {"ledger", "no internal"},
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
    command = ["cargo", "build", "--locked", "-p", "fastps-python", "--features", "mutants,failpoints"]
    subprocess.run(command, cwd=ROOT, check=True)
    folder = TARGET / "mutants"
    shutil.rmtree(folder, ignore_errors=True)
    ignored = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(ROOT / "python/fastps", folder / "fastps", ignore=ignored)
    shutil.copy(TARGET / "debug/lib_fastps.so", folder / "fastps/_fastps.abi3.so")
    return folder


def seed_of(profile: str, first: tuple[str, str] | int | None) -> int:
    """The first seed of a plan in which a lane begins with an action of this kind, or the given seed."""
    if first is None or isinstance(first, int):
        return first or 0
    lane, kind = first
    plans = ((seed, Plan(seed, profile)) for seed in itertools.count())
    return next(seed for seed, plan in plans if plan.action(plan.step(lane, 0)).kind == kind)


def violations(folder: Path, mutant: str, profile: str, ack: str, seed: int) -> set[str]:
    """The invariants that a run finds violated."""
    command = [sys.executable, "-P", "-m", "fastps_lab", "torture", "--json", "--seed", str(seed)]
    # A run waits up to 30 s at its end until nothing of its clients is left.
    command += ["--seconds", "15", "--profile", profile, "--ack", ack]
    env = {**os.environ, "PYTHONPATH": str(folder), "FASTPS_MUTANT": mutant}
    run = subprocess.run(command, cwd=folder, env=env, stdout=subprocess.PIPE, text=True, timeout=3 * SECONDS)
    report = json.loads(run.stdout.splitlines()[-1])
    if Path(report["history"]).exists():
        shutil.rmtree(Path(report["history"]).parent)
    return set(report["violations"])


def survivor(folder: Path, mutant: str) -> str | None:
    """Error in how the checker sees a fault; None if it is found."""
    profile, ack, first = TORTURED[mutant]
    try:
        found = violations(folder, mutant, profile, ack, seed_of(profile, first))
    except subprocess.TimeoutExpired:
        return "the run does not end"
    return None if found & EXPECTED[mutant] else f"violated: {sorted(found) or 'nothing'}"


def main() -> int:
    """Every fault, and a run without one; 1 if the checker misses something or sees what is not there."""
    folder, failed = build(), 0
    for seed, ack in enumerate(("logged", "applied")):
        if found := violations(folder, "", "all", ack, seed):
            print(f"without a fault, {ack}: violated: {sorted(found)}", flush=True)
            return 1
    for mutant in TORTURED:
        start = time.monotonic()
        wrong = survivor(folder, mutant)
        took = time.monotonic() - start
        if wrong is None and took > SECONDS:
            wrong = f"it took longer than {SECONDS:g} s"
        print(f"{mutant:24} {wrong or 'found by fastps-lab torture'} ({took:.0f} s)", flush=True)
        failed += wrong is not None
    return int(failed > 0)
