"""A plugin of pytest that writes each verdict to a file at once, so that it outlives the process.

A later session with the same file continues after the test in which the former one ended.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

#: The variable that names the file.
FILE = "FASTPS_GPU_VERDICTS"


def read(file: Path) -> dict[str, dict[str, Any]]:
    """The last note of each test."""
    lines = file.read_text().splitlines() if file.exists() else []
    return {found.pop("test"): found for found in map(json.loads, lines)}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leaves out tests that an earlier session has begun."""
    done = read(Path(os.environ[FILE]))
    items[:] = [item for item in items if short(item.nodeid) not in done]


def pytest_runtest_logstart(nodeid: str) -> None:
    """A test that ends the process has this verdict."""
    note(nodeid, "started", 0.0, "")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """The verdict of a test, or the failure of its fixtures."""
    if report.when == "call" or report.outcome != "passed":
        note(report.nodeid, report.outcome, report.duration, reason(report), output(report))


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """The verdict of a file that cannot be read, or is skipped."""
    if report.outcome != "passed":
        note(report.nodeid, report.outcome, 0.0, reason(report))


def reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    """The last line of a failure, or the reason of a skip."""
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    return "" if report.passed else str(crash.message if crash else report.longrepr)


def output(report: pytest.TestReport) -> str:
    """The traceback of a failure and the standard error: there is no second run to look at."""
    return (report.longreprtext + "\n" + report.capstderr)[-6000:] if report.failed else ""


def note(test: str, verdict: str, seconds: float, reason: str, output: str = "") -> None:
    """Appends one line."""
    line = {"test": short(test), "verdict": verdict, "seconds": round(seconds, 2), "reason": reason}
    line |= {"output": output} if output else {}
    with open(os.environ[FILE], "a") as file:
        file.write(json.dumps(line) + "\n")


def short(test: str) -> str:
    """The name without folders."""
    file, colons, rest = test.partition("::")
    return file.rpartition("/")[2] + colons + rest
