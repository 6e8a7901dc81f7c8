"""Watches processes, output and progress of the engines' examples."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable
from pathlib import Path

import psutil

import fastps

EXAMPLES = Path(__file__).resolve().parents[2] / "examples/engines"
LIMIT = 240.0


def until(condition: Callable[[], object], what: str) -> None:
    late = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < late, f"{what} within {LIMIT} s"
        time.sleep(0.05)


def pushes(ps: fastps.ParameterServer) -> int:
    """The largest number of changes of a tensor since it was registered."""
    names = ps.names()
    versions = ps.versions(names) if names else {}
    return max((versions[name] - 1 for name in names), default=0)


def progress(addresses: str, least: int) -> None:
    """Waits until training has made this many pushes."""
    with fastps.connect(addresses, timeout=LIMIT, wait=LIMIT) as ps:
        until(lambda: pushes(ps) > least, "training makes progress")


def processes_with(text: str) -> list[psutil.Process]:
    """Processes with this text in their command, which live."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and any(text in part for part in process.cmdline()):
                found.append(process)
    return found


def children() -> list[psutil.Process]:
    """All processes that this one has started, and theirs."""
    return psutil.Process().children(recursive=True)


def assert_gone(family: list[psutil.Process]) -> None:
    """These processes end."""
    _, alive = psutil.wait_procs(family, timeout=LIMIT)
    assert [one for one in alive if one.status() != psutil.STATUS_ZOMBIE] == []


def errors(text: str) -> list[float]:
    return [float(one) for one in re.findall(r"(?:weight|loss) (\d\S*)", text)]
