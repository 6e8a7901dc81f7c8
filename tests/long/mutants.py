"""Enables one seeded fault after the other and expects the test suite to fail (`make mutants`).

The cargo feature `mutants` compiles the faults in (rust/core/src/base/fault.rs); FASTPS_MUTANT selects one.
The Rust tests run first. A fault that they miss must be found by pytest, which runs against an installed
package built with the same feature (`--pytest`). The exit code is 1 if a fault survives, or if the suite
fails without one.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import tortured

ROOT = Path(__file__).resolve().parents[2]

MUTANTS = {
    "unfused_multiply_add": "SGD multiplies and adds with two roundings",
    "identity_off": "a repeated push is applied again",
    "residual_lost": "the content of a refused push does not return to the residual",
    "version_not_bumped": "an applied push leaves the version as it was",
    "slice_border": "slices are cut one block early",
    "codec_tail": "the last, incomplete byte of a 1-bit body is not decoded",
    "placement_ignored": "the client sends every slice to shard 0",
    "check_after_apply": "a bad frame is refused after it was applied",
    "epoch_accepted": "a frame for another epoch is accepted",
    "secret_ignored": "who names a client's session need not show its secret",
    "entry_not_charged": "a tensor in the cluster map takes no memory that is counted",
    "lease_never_expires": "a silent client keeps its session for ever",
    "copy_on_write_skipped": "a pull copies instead of pinning, and the push never notices",
    "frame_length_trusted": "the length of a body is not checked",
    "fence_forgotten": "a push that was answered with 'fenced' is applied when it arrives late",
    "spare_not_filled": "the copy of copy-on-write keeps what was in the spare buffer",
    "torn_lane": "a hogwild store writes each lane in two halves",
    "drop_half": "every second push is acknowledged but not applied",
    "cut_unseen": "a cut has each slice as it is when it is written",
    "fsync_skipped": "a change is said to be durable before it is synced, or even written",
    "lock_not_retaken": "a server whose folder is made again goes on there without a lock",
    "resend_as_new": "a frame is sent again under a new identity",
    "loss_swallowed": "what a restart lost is counted, and no call tells it",
    "seat_for_all": "whoever knows the number of a space may command it",
    "work_unbounded": "a program may be any work",
    "free_pusher_bound": "a client that pushes without a place is bound by a synchronous worker",
    "hold_unbounded": "writes are held for as long as a call asks for",
    "window_charged": "a connection is charged all that its peer might send",
    "state_not_charged": "the stored state of a space takes no memory that is counted",
    "ended_forgotten": "a session that has ended may begin again",
}


def build() -> list[tuple[str, Path]]:
    """Builds the Rust tests with the faults in; returns (directory to run in, executable)."""
    command = [
        "cargo",
        "test",
        "--workspace",
        "--exclude",
        "fastps-python",
        "--exclude",
        "fastps-transport-loom",
        "--no-run",
        "--message-format=json",
    ]
    command += ["--features", "fastps-core/mutants"]
    output = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
    tests = []
    for line in output.splitlines():
        message = json.loads(line)
        if (
            message.get("reason") == "compiler-artifact"
            and message.get("executable")
            and message["profile"]["test"]
        ):
            tests.append((str(Path(message["manifest_path"]).parent), Path(message["executable"])))
    # The core's quick ones come first, those with servers last, and of a crate the unit tests.
    slow = ["core", "live", "durable", "proto", "transport", "client", "server", "cli"]

    def order(test: tuple[str, Path]) -> tuple[int, bool, str]:
        name = test[1].name
        return slow.index(Path(test[0]).name), not name.startswith("fastps_"), name

    return sorted(tests, key=order)


def first_failure(tests: list[tuple[str, Path]], mutant: str, seconds: float) -> str | None:
    """Runs the executables until one fails; says which, or None if all pass."""
    env = {**os.environ, "FASTPS_MUTANT": mutant, "RUST_BACKTRACE": "0", "RUST_TEST_THREADS": "8"}
    for directory, executable in tests:
        name = executable.name.rsplit("-", 1)[0]
        try:
            run = subprocess.run(
                [executable, "-q"], cwd=directory, env=env, capture_output=True, text=True, timeout=seconds
            )
        except subprocess.TimeoutExpired:
            return f"{name} (no end within {seconds:.0f} s)"
        if run.returncode != 0:
            failed = re.findall(r"^    ([\w:]+)$", run.stdout, re.MULTILINE)
            return f"{name}: {', '.join(sorted(set(failed))[:3]) or f'exit code {run.returncode}'}"
    return None


def pytest_failure(mutant: str, seconds: float) -> str | None:
    """Runs the Python tests; says which one failed first, or None if all pass."""
    env = {**os.environ, "FASTPS_MUTANT": mutant}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider", "."]
    try:
        run = subprocess.run(
            command, cwd=ROOT / "tests", env=env, capture_output=True, text=True, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return f"pytest (no end within {seconds:.0f} s)"
    failed = [line for line in run.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return f"pytest: {failed[0] if failed else run.returncode}" if run.returncode != 0 else None


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("mutants", nargs="*", default=list(MUTANTS), help="which (default: all)")
    parser.add_argument(
        "--pytest", action="store_true", help="ask pytest about what the Rust tests do not see"
    )
    parser.add_argument("--seconds", type=float, default=300.0, help="longest run of one test program")
    parser.add_argument(
        "--torture", action="store_true", help="only ask `fastps torture` about the faults that it must find"
    )
    parser.add_argument(
        "--known-green", action="store_true", help="do not run the suite without a fault first"
    )
    options = parser.parse_args()
    if options.torture:
        return tortured.main()
    tests = build()
    if not options.known_green and (healthy := first_failure(tests, "", options.seconds)):
        print(f"the suite is red without a fault: {healthy}")
        return 1
    survivors = []
    for mutant in options.mutants:
        start = time.monotonic()
        seen = first_failure(tests, mutant, options.seconds)
        if seen is None and options.pytest:
            seen = pytest_failure(mutant, 10 * options.seconds)
        print(f"{mutant:24} {seen or 'SURVIVED'} ({time.monotonic() - start:.0f} s)", flush=True)
        if seen is None:
            survivors.append(mutant)
    print(f"{len(options.mutants) - len(survivors)} caught, {len(survivors)} survived")
    if set(options.mutants) == set(MUTANTS) and tortured.main():
        return 1
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
