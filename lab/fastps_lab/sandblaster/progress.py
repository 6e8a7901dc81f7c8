"""The record that a resumed run must have of its predecessor."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from fastps.commands.kit import CommandError, replaced

__all__ = ["Progress"]


class Progress:
    """The file that says how far a run is.

    Args:
        out: The folder.
        settings: The options that a resumed run must have, too.
        resume: Read the file; else begin a new one, and remove the data of an earlier run.

    Attributes:
        done: The curves of methods that have ended, by name.
        curves: The points of methods that have begun, by name: evaluations, seconds and f.

    Raises:
        CommandError: There is nothing to resume, or it had other options.
    """

    def __init__(self, out: Path, settings: dict[str, Any], resume: bool) -> None:
        self._out, self._path, self._settings = out, out / "progress.json", settings
        self.done: dict[str, Any] = {}
        self.curves: dict[str, list[list[float]]] = {}
        if not resume:
            self.end()
            return
        try:
            saved = json.loads(self._path.read_text())
            before, self.done, self.curves = saved["settings"], saved["done"], saved["curves"]
        except (OSError, ValueError, KeyError, TypeError):
            raise CommandError(
                f"nothing to resume in {out}: run fastps-lab sandblaster first, without --resume"
            ) from None
        for name, value in settings.items():
            if before.get(name) != value:
                text = f"expected {name} {_shown(before.get(name))}, got {_shown(value)}"
                raise CommandError(f"the run in {out} had other options: {text}")

    def save(self) -> None:
        """Writes the file."""
        state = {"settings": self._settings, "done": self.done, "curves": self.curves}
        with replaced(self._path) as path:
            path.write_text(json.dumps(state))

    def end(self) -> None:
        """Removes the file, and the servers' data."""
        self._path.unlink(missing_ok=True)
        shutil.rmtree(self._out / "servers", ignore_errors=True)


def _shown(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
