"""Finished runs, which are not repeated: whatever uses this may be stopped and started again."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["Finished"]

Run = dict[str, Any]


class Finished:
    """Runs in a file, one JSON object a line: the settings, and what was measured.

    Args:
        path: The file, created if missing; None: the runs are only in memory.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        text = path.read_text() if path is not None and path.exists() else ""
        whole = text[: text.rfind("\n") + 1]
        if path is not None and whole != text:  # the last line was being written when its process died
            path.write_text(whole)
        lines = map(json.loads, whole.splitlines())
        # `lab/grids/workers/pays.py` has written pairs.
        self.all: list[Run] = [
            dict(zip(("key", "seconds"), line, strict=True)) if isinstance(line, list) else line
            for line in lines
        ]

    def find(self, settings: Run) -> Run | None:
        """The last run with these settings."""
        return next((run for run in reversed(self.all) if settings.items() <= run.items()), None)

    def add(self, run: Run) -> Run:
        """Writes a run."""
        self.all.append(run)
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a") as file:
                file.write(json.dumps(run) + "\n")
        return run

    def get(self, settings: Run, measure: Callable[[], Run]) -> Run:
        """The run with these settings, measured if it is not in the file."""
        return self.find(settings) or self.add({**settings, **measure()})
