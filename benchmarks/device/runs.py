"""Runs checks and measured rows in separate processes, so that one that fails ends no other.

Nothing here imports torch or fastps: the process that runs the rows survives whatever they do.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from device import verdicts

ROOT = Path(__file__).resolve().parents[2]
CHECKS = ROOT / "tests" / "gpu"
#: Seconds after which a session with the checks of one file is killed.
FILE_LIMIT = 90.0
#: Lines of a process's output that are kept when it fails.
KEPT_LINES = 100

#: pytest's exit codes when it has run all tests: passed, failed, a file that cannot be read, no test left.
ENDED = (0, 1, 2, 5)

Outcome = dict[str, Any]


class Budget:
    """The time that is left.

    Args:
        minutes: For everything.
        patience: Factor of the limits of files and rows, which are those of a machine with a GPU.
    """

    def __init__(self, minutes: float, patience: float = 1.0) -> None:
        self._until, self._patience = time.monotonic() + 60 * minutes, patience

    def left(self, most: float) -> float:
        """Seconds that a row may take: its own limit, or the rest of the time; 0 if there is none."""
        return max(0.0, min(self._patience * most, self._until - time.monotonic()))


class Run(NamedTuple):
    """The end of a process."""

    #: None: it was killed because its time was over.
    code: int | None
    output: str
    seconds: float


def run(command: list[str], environment: dict[str, str], limit: float) -> Run:
    """Runs a command, and kills it and its children when the time is over."""
    begun = time.monotonic()
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # also what a process has left behind
            with contextlib.suppress(subprocess.TimeoutExpired):  # one that is stuck in the driver
                process.wait(10)
        output.seek(0)
        lines = output.read().splitlines()
    return Run(code, "\n".join(lines[-KEPT_LINES:]), time.monotonic() - begun)


# -- measured rows -------------------------------------------------------------------------------------------


def row(name: str, setting: tuple[bool, str | None], environment: dict[str, str], limit: float) -> Outcome:
    """One measured row, or `facts`."""
    if limit < 1:
        return {"verdict": "not run", "reason": "the time was over", "seconds": 0.0}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "row.json"
        command = [sys.executable, "-m", "device.child", name, json.dumps(setting), str(out)]
        ended = run(command, environment, limit)
        if out.exists():
            found: Outcome = json.loads(out.read_text())
        else:
            found = fault(ended, limit)
    if found["verdict"] == "failed":
        found["output"] = ended.output
    return {**found, "seconds": round(ended.seconds, 1)}


def rows(
    limits: dict[str, float],
    setting: tuple[bool, str | None],
    environment: dict[str, str],
    budget: Budget,
    at_once: int,
) -> Iterator[tuple[str, Outcome]]:
    """Measured rows as they end. Only a rehearsal runs several at once: they would slow each other down."""
    with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
        running = {
            pool.submit(lambda name=name, most=most: row(name, setting, environment, budget.left(most))): name
            for name, most in limits.items()
        }
        for done in concurrent.futures.as_completed(running):
            yield running[done], done.result()


# -- checks --------------------------------------------------------------------------------------------------


def checks(environment: dict[str, str], budget: Budget, at_once: int) -> Iterator[tuple[str, list[Outcome]]]:
    """The files of checks as they end, with the verdicts of their tests."""
    files = sorted(CHECKS.glob("test_*.py"))
    with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
        running = {pool.submit(of_file, file, environment, budget): file for file in files}
        for done in concurrent.futures.as_completed(running):
            yield running[done].stem, done.result()


def of_file(file: Path, environment: dict[str, str], budget: Budget) -> list[Outcome]:
    """The verdicts of one file. A test that ends the process fails, and the rest follows in another one."""
    with tempfile.TemporaryDirectory() as folder:
        notes, outcomes = Path(folder) / "verdicts", dict[str, Outcome]()
        while (limit := budget.left(FILE_LIMIT)) >= 1:
            ended = session(file, {**environment, verdicts.FILE: str(notes)}, limit)
            found = verdicts.read(notes)
            begun = [test for test in found if test not in outcomes]
            outcomes = {**found, **outcomes}
            unfinished = [test for test in begun if found[test]["verdict"] == "started"]
            outcomes |= {test: fault(ended, limit) for test in unfinished}
            if not unfinished:
                if ended.code not in ENDED or not outcomes:
                    outcomes[file.name] = fault(ended, limit)
                break
        else:
            outcomes[file.name] = {"verdict": "not run", "reason": "the time was over", "seconds": 0.0}
    return [{"test": test, **outcome} for test, outcome in outcomes.items()]


def fault(ended: Run, limit: float) -> Outcome:
    """The verdict of a test in which the process ended."""
    found = {"verdict": "crashed", "reason": f"the process ended with {ended.code}"}
    if ended.code is None:
        found = {"verdict": "timed out", "reason": f"it took more than {limit:.0f} s"}
    return {**found, "seconds": round(ended.seconds, 1), "output": ended.output}


def session(file: Path, environment: dict[str, str], limit: float) -> Run:
    """A session of pytest, without the options of pyproject.toml and the fixtures of the other tests."""
    options = ["-c", os.devnull, "--rootdir", str(CHECKS), "--confcutdir", str(CHECKS)]
    options += ["-p", "no:cacheprovider", "-p", "device.verdicts", "-q", "--tb=short"]
    return run([sys.executable, "-m", "pytest", *options, str(file)], environment, limit)
