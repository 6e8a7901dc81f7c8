"""The WebAssembly of the live page, called as `rust/live/README.md` says."""

from __future__ import annotations

import json
import math
import os
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

import fastps_lab

#: `make live-check` names another one.
FILE = Path(
    os.environ.get("FASTPS_LIVE_MODULE") or Path(fastps_lab.__file__).parent / "live/page/fastps.wasm"
)


class Module:
    """One instance of the module; every name of its README is a method that raises on an error."""

    def __init__(self, file: Path = FILE) -> None:
        import wasmtime

        self._store = wasmtime.Store()
        module = wasmtime.Module.from_file(self._store.engine, str(file))
        self.imports = [one.name for one in module.imports]
        self._exports = wasmtime.Instance(self._store, module, []).exports(self._store)

    def __getattr__(self, name: str) -> Any:
        function = self._exports[name]

        def call(*arguments: Any) -> int:
            result = function(self._store, *arguments)
            if result < 0:
                raise ValueError(self.text())
            return result

        setattr(self, name, call)
        return call

    def give(self, settings: Any) -> None:
        """Writes the input."""
        data = np.asarray(settings, np.float64).tobytes()
        self._exports["memory"].write(self._store, data, self.input(len(data)))

    def output_bytes(self) -> bytes:
        """The output of the last call."""
        at = self.output()
        return bytes(self._exports["memory"].read(self._store, at, at + self.output_len()))

    def text(self) -> str:
        """The output as text."""
        return self.output_bytes().decode()

    def numbers(self, columns: int | None = None) -> Any:
        """The output as numbers, or as rows of them."""
        numbers = np.frombuffer(self.output_bytes(), np.float64)
        return numbers if columns is None else numbers.reshape(-1, columns)

    @cached_property
    def about(self) -> dict[str, Any]:
        """The output of `describe`."""
        self.describe()
        return json.loads(self.text())

    def settings(self, optimizer: str = "SGD", **named: float) -> list[float]:
        """The default settings with some replaced, those of the optimizer included."""
        settings = [math.nan if one is None else one for one in self.about["defaults"]]
        fields = {one["name"]: one["index"] for one in self.about["fields"]}
        chosen = next(one for one in self.about["optimizers"] if one["name"] == optimizer)
        settings[fields["optimizer"]] = chosen["id"]
        own = [one["name"] for one in chosen["settings"]]
        for name, value in named.items():
            place = fields[name] if name in fields else fields["optimizer"] + 1 + own.index(name)
            settings[place] = value
        return settings

    def started(self, **named: Any) -> int:
        """A simulation with these settings."""
        self.give(self.settings(**named))
        return self.make()

    def state(self, run: int) -> tuple[Any, Any]:
        """Head and workers of `read`."""
        self.read(run)
        numbers = self.numbers()
        return numbers[:24], numbers[24:].reshape(-1, 14)

    def values_of(self, run: int) -> Any:
        """The server's values."""
        self.values(run)
        return self.numbers()
