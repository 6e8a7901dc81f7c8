"""Consistent cuts while clients push, made and read as by an operator."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np

from fastps.checkpoint import arrays
from fastps.commands.kit import tensor_file
from fastps.commands.kit.children import python_module
from fastps_lab.torture.history import History
from fastps_lab.torture.tensors import PAIR

__all__ = ["Cuts"]

TIMEOUT = 60.0


class Cuts:
    """Records the pairs of a cut.

    Args:
        addresses: Of all shards.
        data: Their data directory.
        folder: For exported files.
        history: The record.
    """

    def __init__(self, addresses: list[str], data: Path, folder: Path, history: History) -> None:
        self._addresses, self._data, self._history = ",".join(addresses), data, history
        self._file = folder / "cut.safetensors"

    def cut(self, step: int | None) -> None:
        """Makes a cut and exports it; records nothing if a server was away."""
        if self._checkpoint("save", "--consistent", "--", self._addresses):
            self._file.unlink(missing_ok=True)
            exported = self._checkpoint("export", "--consistent", str(self._data), str(self._file))
            if exported and tensor_file.is_available():
                self._read(step)

    def _checkpoint(self, *arguments: str) -> bool:
        command = [*python_module("fastps"), "checkpoint", *arguments]
        try:
            run = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TIMEOUT
            )
        except subprocess.TimeoutExpired:
            self._history.add(
                "hung", None, lane="cuts", text=f"fastps checkpoint {arguments[0]} does not end"
            )
            return False
        return run.returncode == 0

    def _read(self, step: int | None) -> None:
        found = arrays(self._file)
        first, second = (found[name] for name in PAIR)
        lives = {
            int(k): [float(first[k]), float(second[k])] for k in np.flatnonzero((first != 0) | (second != 0))
        }
        self._history.add("cut", step, lives=lives)
