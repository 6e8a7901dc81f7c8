"""Checks that `fastps demo` keeps its promises with 10 seeds and every codec (`make acceptance`).

Each run must reach 96 % test accuracy, end within 60 s, and reconcile its ledger (exit code 0). A server that
acknowledges every push but applies every second one (the seeded fault `drop_half`, built here by cargo, see
rust/core/src/base/fault.rs) must be caught: exit code 3. This script exits with 1 if any of this fails.
`--mnist DIR` adds one run on MNIST (97.5 % within five minutes) and a race on 3 seeds: two Downpour workers
must reach 97.5 % in less time than one (the median of the ratios).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
CODECS = ("float32", "bfloat16", "int8", "onebit")
MISMATCH = 3
RACE = ("--codec", "float32", "--push-every", "5", "--pull-every", "5", "--seconds", "20")
"""Options with which both sides of the race train."""


def demo(
    options: list[str], folder: Path, limit: float, env: dict[str, str] | None = None
) -> tuple[int, str, str, float]:
    """Runs the demo in `folder`; exit code, standard output, standard error, seconds."""
    began = time.monotonic()
    command = [sys.executable, "-m", "fastps", "demo", "--json", *options]
    try:
        run = subprocess.run(
            command,
            cwd=folder,
            env={**os.environ, **(env or {})},
            capture_output=True,
            text=True,
            timeout=2 * limit,
        )
    except subprocess.TimeoutExpired:
        return -1, "", f"no end within {2 * limit:.0f} s", time.monotonic() - began
    return run.returncode, run.stdout, run.stderr, time.monotonic() - began


def judge(options: list[str], goal: float, limit: float) -> tuple[str, str | None]:
    """One run that must succeed: what to print, and what is wrong with it (None: nothing)."""
    with tempfile.TemporaryDirectory(prefix="fastps-acceptance-") as folder:
        code, out, err, seconds = demo(options, Path(folder), limit)
        left = sorted(path.name for path in Path(folder).iterdir())
    name = " ".join(options)
    if code != 0:
        last = err.strip().splitlines()[-1:] or ["no message"]
        return "FAILED", f"{name}: exit code {code}: {last[0]}"
    result = json.loads(out.splitlines()[-1])
    accuracy = 100 * result["test_accuracy"]
    cell = f"{accuracy:.2f} % {seconds:3.0f} s"
    if accuracy < goal:
        return cell, f"{name}: {accuracy:.2f} % test accuracy, {goal} % is the goal"
    if seconds > limit:
        return cell, f"{name}: took {seconds:.0f} s, {limit:.0f} s is the limit"
    if left != ["fastps-demo"]:
        return cell, f"{name}: left {left} beside its output folder"
    low = result["acknowledged"]
    if not all(low <= version <= low + result["in_flight"] for version in result["versions"].values()):
        return cell, f"{name}: {low} pushes acknowledged, versions {result['versions']}"
    return cell, None


def seconds_to(goal: float, workers: int, seed: int, mnist: str) -> float:
    """Seconds until workers of one server reach this test accuracy; infinity if they never do."""
    with tempfile.TemporaryDirectory(prefix="fastps-acceptance-") as folder:
        options = [
            "--data",
            "mnist",
            "--dataset-dir",
            mnist,
            "--seed",
            str(seed),
            "--no-kill",
            "--shards",
            "1",
        ]
        options += ["--workers", str(workers), *RACE]
        code, _, err, _ = demo(options, Path(folder), 300.0)
        if code != 0:
            print(f"{workers} workers, seed {seed}: exit code {code}: {err.strip()[-150:]}")
            return float("inf")
        curve = json.loads((Path(folder) / "fastps-demo" / "report.json").read_text())["curve"]
    return next((point["seconds"] for point in curve if 100 * point["accuracy"] >= goal), float("inf"))


def race(goal: float, seeds: int, mnist: str) -> str | None:
    """Two workers against one; what is wrong."""
    ratios = []
    for seed in range(seeds):
        one, two = (seconds_to(goal, workers, seed, mnist) for workers in (1, 2))
        ratios.append(two / one)
        print(f"seed {seed}: {goal} % after {one:.1f} s with 1 worker, {two:.1f} s with 2", flush=True)
    ratio = statistics.median(ratios)
    print(f"2 workers need {ratio:.2f} of the time of 1")
    return None if ratio < 1.0 else f"2 workers need {ratio:.2f} of the time of 1"


def faulty_server() -> Path | None:
    """Builds a server with the seeded faults in; None without cargo."""
    if shutil.which("cargo") is None:
        return None
    target = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "mutants"
    command = ["cargo", "build", "--locked", "--quiet", "--package", "fastps-cli", "--bin", "fastps-server"]
    command += ["--features", "fastps-core/mutants", "--target-dir", str(target)]
    subprocess.run(command, cwd=ROOT, check=True)
    return target / "debug" / "fastps-server"


def fault_is_caught(server: Path, mutant: str, seconds: float) -> str | None:
    """Runs the demo against `server`; what is wrong if the outcome is not the one expected."""
    env = {"FASTPS_DEMO_SERVER": str(server), "FASTPS_MUTANT": mutant}
    with tempfile.TemporaryDirectory(prefix="fastps-acceptance-") as folder:
        code, _, err, _ = demo(["--data", "digits", "--seconds", f"{seconds:g}"], Path(folder), 60.0, env)
    last = (err.strip().splitlines() or ["no message"])[-1]
    expected = MISMATCH if mutant else 0
    which = f"server with fault {mutant or 'none'}: exit code {code}"
    print(f"{which}: {last[:150]}")
    return None if code == expected else f"{which}, expected {expected}: {last}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=10, help="number of seeds, from 0 (10)")
    parser.add_argument("--codecs", nargs="+", choices=CODECS, default=CODECS)
    parser.add_argument("--seconds", type=float, help="shorter training than the defaults, for a quick look")
    parser.add_argument(
        "--mnist",
        metavar="DIR",
        default=os.environ.get("FASTPS_DATA_DIR") and os.path.join(os.environ["FASTPS_DATA_DIR"], "mnist"),
        help="folder of the original MNIST files: one run on them too (default: that of FASTPS_DATA_DIR)",
    )
    parser.add_argument("--no-fault", action="store_true", help="leave out the server that drops pushes")
    args = parser.parse_args()

    problems: list[str] = []
    options = ["--data", "digits", *([] if args.seconds is None else ["--seconds", f"{args.seconds:g}"])]
    print("seed" + "".join(f"{codec:>18}" for codec in args.codecs), flush=True)
    for seed in range(args.seeds):
        print(f"{seed:>4}", end="", flush=True)
        for codec in args.codecs:
            cell, problem = judge(["--seed", str(seed), "--codec", codec, *options], 96.0, 60.0)
            print(f"{cell:>18}", end="", flush=True)
            problems += [problem] if problem else []
        print()
    if args.mnist:
        directory = str(Path(args.mnist).resolve())
        cell, problem = judge(["--data", "mnist", "--dataset-dir", directory], 97.5, 300.0)
        print(f"mnist {cell}")
        problems += [problem] if problem else []
        problem = race(97.5, 3, directory)
        problems += [problem] if problem else []
    if not args.no_fault:
        server = faulty_server()
        if server is None:
            problems.append("no cargo: the faulty server cannot be built; --no-fault leaves it out")
        else:
            # The same build without its fault must pass: what is caught is the fault and nothing else.
            problems += filter(None, (fault_is_caught(server, mutant, 3.0) for mutant in ("", "drop_half")))
    for problem in problems:
        print(f"FAILED {problem}")
    print("accepted" if not problems else f"not accepted: {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
