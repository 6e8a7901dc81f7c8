"""Enables one seeded fault after the other and expects the test suite to fail (`make mutants`).

The cargo feature `mutants` compiles the faults in (rust/core/src/base/fault.rs); FASTPS_MUTANT selects one.
The test that is known to find a fault runs first. If it passes, all the others run until one fails. The exit
code is 1 if a fault survives, or if one of the known tests fails without a fault.
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
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "lab/tests/long"))
import tortured

ROOT = Path(__file__).resolve().parents[2]


class Mutant(NamedTuple):
    """A seeded fault."""

    what: str
    test: str
    """The test that finds it: program and name of a Rust test, or file and name of a Python test."""


MUTANTS = {
    "unfused_multiply_add": Mutant(
        "SGD multiplies and adds with two roundings",
        "fastps_core kernel::optim::sgd::tests::multiplication_and_addition_round_once",
    ),
    "identity_off": Mutant(
        "a repeated push is applied again", "api store::a_repeat_is_answered_and_not_applied"
    ),
    "residual_lost": Mutant(
        "the content of a refused push does not return to the residual",
        "api codec::what_was_refused_comes_back",
    ),
    "version_not_bumped": Mutant(
        "an applied push leaves the version as it was", "api store::a_repeat_is_answered_and_not_applied"
    ),
    "slice_border": Mutant(
        "slices are cut one block early", "fastps_core tensor::spec::tests::slices_cover_the_tensor_once"
    ),
    "codec_tail": Mutant(
        "the last, incomplete byte of a 1-bit body is not decoded", "api codec::cases_of_the_vectors"
    ),
    "placement_ignored": Mutant(
        "the client sends every slice to shard 0", "rpc client::slices_are_spread_over_the_shards_by_load"
    ),
    "check_after_apply": Mutant(
        "a bad frame is refused after it was applied", "api correction::to_refuse_without_a_limit_is_refused"
    ),
    "epoch_accepted": Mutant(
        "a frame for another epoch is accepted", "grpc/test_bad_frames.py::test_a_bad_frame_is_refused"
    ),
    "secret_ignored": Mutant(
        "who names a client's session need not show its secret",
        "fastps_server cluster::session::tests::who_has_no_secret_renews_and_learns_nothing",
    ),
    "entry_not_charged": Mutant(
        "a tensor in the cluster map takes no memory that is counted",
        "fastps_server cluster::map::tests::what_the_map_has_is_charged",
    ),
    "lease_never_expires": Mutant(
        "a silent client keeps its session for ever",
        "fastps_server cluster::session::tests::a_session_lives_as_long_as_signs_of_life_come",
    ),
    "copy_on_write_skipped": Mutant(
        "a pull copies instead of pinning, and the push never notices",
        "api store::a_pinned_version_stays_whole_while_pushes_go_on",
    ),
    "frame_length_trusted": Mutant(
        "the length of a body is not checked", "api image::what_does_not_fit_is_refused"
    ),
    "fence_forgotten": Mutant(
        "a push that was answered with 'fenced' is applied when it arrives late",
        "api store::a_held_push_completes_later_or_is_fenced",
    ),
    "spare_not_filled": Mutant(
        "the copy of copy-on-write keeps what was in the spare buffer",
        "api store::a_pinned_version_stays_whole_while_pushes_go_on",
    ),
    "torn_lane": Mutant(
        "a hogwild store writes each lane in two halves",
        "fastps_core kernel::litmus::tests::no_lane_tears_on_this_cpu",
    ),
    "drop_half": Mutant(
        "every second push is acknowledged but not applied",
        "api store::pushes_from_many_threads_lose_nothing",
    ),
    "cut_unseen": Mutant(
        "a cut has each slice as it is when it is written",
        "api cut::pushes_behind_the_moment_are_in_no_slice_of_it",
    ),
    "fsync_skipped": Mutant(
        "a change is said to be durable before it is synced, or even written",
        "files log::a_snapshot_records_how_much_of_the_log_was_durable",
    ),
    "lock_not_retaken": Mutant(
        "a server whose folder is made again goes on there without a lock",
        "history a_server_that_lost_its_lock_leaves_the_log_to_the_new_owner",
    ),
    "resend_as_new": Mutant(
        "a frame is sent again under a new identity",
        "rpc exactly_once::patient_pushes_are_applied_once_whatever_breaks",
    ),
    "loss_swallowed": Mutant(
        "what a restart lost is counted, and no call tells it",
        "rpc durable::each_client_learns_once_which_of_its_pushes_are_gone",
    ),
    "seat_for_all": Mutant(
        "whoever knows the number of a space may command it",
        "fastps_core coordination::spaces::tests::a_seat_belongs_to_the_key_that_has_taken_it",
    ),
    "work_unbounded": Mutant(
        "a program may be any work", "fastps_core tensor::program::tests::the_work_of_a_program_is_bounded"
    ),
    "free_pusher_bound": Mutant(
        "a client that pushes without a place is bound by a synchronous worker",
        "rpc groups::a_client_that_pushes_without_a_place_is_not_bound_by_sync",
    ),
    "hold_unbounded": Mutant(
        "writes are held for as long as a call asks for",
        "fastps_server persistence::gate::tests::a_hold_ends_by_itself",
    ),
    "window_charged": Mutant(
        "a connection is charged all that its peer might send",
        "rpc working::many_clients_work_in_little_memory",
    ),
    "state_not_charged": Mutant(
        "the stored state of a space takes no memory that is counted",
        "fastps_core coordination::spaces::tests::memory_is_given_back_and_what_does_not_fit_is_refused",
    ),
    "part_applied_twice": Mutant(
        "a slice that shares a message takes its part twice",
        "grpc/test_parts.py::test_a_message_is_as_frames_of_their_own",
    ),
    "other_part_answered": Mutant(
        "the answer to one part of a message has another's outcome",
        "grpc/test_parts.py::test_a_part_is_refused_alone",
    ),
    "ended_forgotten": Mutant(
        "a session that has ended may begin again",
        "fastps_server cluster::session::tests::an_ended_incarnation_never_comes_back",
    ),
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


def run(command: list[str | Path], directory: str | Path, mutant: str, seconds: float) -> str | None:
    """Runs tests with a fault; the names of the first that fail, or None if all pass."""
    env = {**os.environ, "FASTPS_MUTANT": mutant, "RUST_BACKTRACE": "0", "RUST_TEST_THREADS": "8"}
    try:
        done = subprocess.run(
            command, cwd=directory, env=env, capture_output=True, text=True, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return f"no end within {seconds:.0f} s"
    if done.returncode == 0:
        return None
    failed = re.findall(r"^    ([\w:]+)$|^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    return (
        ", ".join(sorted({rust or python for rust, python in failed})[:3]) or f"exit code {done.returncode}"
    )


class Suite:
    """The Rust tests and a Python package, both with the faults in."""

    def __init__(self, seconds: float) -> None:
        self.tests, self.package, self.seconds = build(), tortured.build(), seconds

    def first_failure(self, test: str, mutant: str) -> str | None:
        """Runs one test: the file and name of a Python test, or the program and name of a Rust test."""
        if "::" in test and test.partition("::")[0].endswith(".py"):
            return self.pytest_failure(mutant, test)
        program, _, name = test.partition(" ")
        directory, executable = next(found for found in self.tests if name_of(found[1]) == program)
        return run([executable, name, "--exact", "-q"], directory, mutant, self.seconds)

    def pytest_failure(self, mutant: str, *tests: str) -> str | None:
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-x",
            "-q",
            "--no-header",
            "-p",
            "no:cacheprovider",
            *tests,
        ]
        environment = {"PYTHONPATH": str(self.package)}
        return run(
            ["env", *(f"{k}={v}" for k, v in environment.items()), *command],
            ROOT / "tests",
            mutant,
            10 * self.seconds,
        )

    def search(self, mutant: str) -> str | None:
        """Runs the programs one after the other, and then all of pytest, until one fails."""
        for directory, executable in self.tests:
            if failed := run([executable, "-q"], directory, mutant, self.seconds):
                return f"{name_of(executable)}: {failed}"
        return self.pytest_failure(mutant, ".", "../lab/tests")


def name_of(executable: Path) -> str:
    return executable.name.rsplit("-", 1)[0]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("mutants", nargs="*", default=list(MUTANTS), help="which (default: all)")
    parser.add_argument("--seconds", type=float, default=300.0, help="longest run of one test program")
    parser.add_argument(
        "--torture",
        action="store_true",
        help="only ask `fastps-lab torture` about its faults",
    )
    options = parser.parse_args()
    if options.torture:
        return tortured.main()
    suite = Suite(options.seconds)
    for test in sorted({MUTANTS[mutant].test for mutant in options.mutants}):
        if failed := suite.first_failure(test, ""):
            print(f"{test} is red without a fault: {failed}")
            return 1
    survivors = []
    for mutant in options.mutants:
        start = time.monotonic()
        test = MUTANTS[mutant].test
        caught = test if suite.first_failure(test, mutant) else None
        if caught is None and (caught := suite.search(mutant)):
            caught += f", but not by {test}"
        print(f"{mutant:24} {caught or 'SURVIVED'} ({time.monotonic() - start:.0f} s)", flush=True)
        if caught is None:
            survivors.append(mutant)
    print(f"{len(options.mutants) - len(survivors)} caught, {len(survivors)} survived")
    if set(options.mutants) == set(MUTANTS) and tortured.main():
        return 1
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
