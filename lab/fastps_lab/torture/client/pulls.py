"""Every kind of pull, and of other query."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

import fastps
from fastps import checkpoint
from fastps.commands.kit import tensor_file
from fastps_lab.torture import tensors
from fastps_lab.torture.client.calls import Calls

__all__ = ["Pulls"]


class Pulls(Calls):
    """Calls that record the values found in this client's column."""

    def pull(self, order: Mapping[str, Any]) -> None:
        name, limit = tensors.DENSE[order["place"]], order["timeout"]
        values = self._try("pull", {}, limit, lambda: self.ps.pull(name, timeout=limit))
        if values is not None:
            self._saw({name: values})

    def pull_list(self, order: Mapping[str, Any]) -> None:
        limit = order["timeout"]
        values = self._try("pull_list", {}, limit, lambda: self.ps.pull(list(tensors.COUNTED), timeout=limit))
        if values is not None:
            self._saw(values)

    def pull_rows(self, order: Mapping[str, Any]) -> None:
        name, limit, row = tensors.TABLES[order["place"]], order["timeout"], [self.number]
        values = self._try("pull_rows", {}, limit, lambda: self.ps.pull(name, indices=row, timeout=limit))
        if values is not None:
            whole = values[0, 0] == values[0, 1]
            own = {self.number: float(values[0, 0])} | ({} if whole else {-1: 1.0})
            self._tell("seen", life=self.number, parts=[[name, 0, None, own]])

    def pull_out(self, order: Mapping[str, Any]) -> None:
        name, limit, out = tensors.BIG, order["timeout"], self._out[tensors.BIG]
        values = self._try("pull_out", {}, limit, lambda: self.ps.pull(name, out=out, timeout=limit))
        if values is not None:
            self._saw({name: values})

    def pull_versions(self, order: Mapping[str, Any]) -> None:
        limit, names = order["timeout"], list(tensors.COUNTED)
        pulled = self._try(
            "pull_versions", {}, limit, lambda: self.ps.pull(names, versions=True, timeout=limit)
        )
        if pulled is not None:
            self._saw(*pulled)

    def names(self, order: Mapping[str, Any]) -> None:
        limit = order["timeout"]
        self._try("names", {}, limit, lambda: self.ps.names(timeout=limit))

    def versions(self, order: Mapping[str, Any]) -> None:
        limit, names = order["timeout"], list(tensors.COUNTED)
        self._try("versions", {}, limit, lambda: self.ps.versions(names, timeout=limit))

    def spec(self, order: Mapping[str, Any]) -> None:
        limit = order["timeout"]
        self._try("spec", {}, limit, lambda: self.ps.spec(tensors.BIG, timeout=limit))

    def state(self, order: Mapping[str, Any]) -> None:
        name, limit = tensors.DENSE[order["place"]], order["timeout"]
        self._try("state", {}, limit, lambda: self.ps.state(name, timeout=limit))

    def save(self, order: Mapping[str, Any]) -> None:
        if not tensor_file.is_available():
            return
        path = self._folder / f"life-{self.number}.safetensors"
        names = [tensors.DENSE[order["place"]]]
        # It makes several calls, each with the connection's timeout.
        self._try("save", {}, 60.0, lambda: checkpoint.save(self.ps, path, names), counts=False)

    def register(self, order: Mapping[str, Any]) -> None:
        """Makes a tensor, reads it, and removes every second one."""
        name, limit = f"temporary/{self.number}/{self._calls}", order["timeout"]
        sgd, zeros = fastps.SGD(lr=1.0), np.zeros(order["size"], np.float32)
        self._try("register", {}, limit, lambda: self.ps.register(name, zeros, optimizer=sgd, timeout=limit))
        self._try("pull_new", {}, limit, lambda: self.ps.pull(name, timeout=limit))
        if self._calls % 2:
            self._try("unregister", {}, limit, lambda: self.ps.unregister(name, timeout=limit))
