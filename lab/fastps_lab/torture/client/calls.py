"""Base of a client's calls: records each before it begins and when it ends, and resolves its doubts."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

import fastps
from fastps_lab.torture import tensors
from fastps_lab.torture.lag import Lag

__all__ = ["Call", "Calls", "Part", "Parts", "all_of"]


Part = tuple[str, int]
#: Slices and the units that a push adds to each.
Parts = dict[Part, float]


class Call:
    """A call under way."""

    def __init__(self, n: int, verb: str, parts: Parts, limit: float, lag: float) -> None:
        self.n, self.verb, self.parts, self.limit, self.lag = n, verb, parts, limit, lag
        self.began = time.monotonic()
        self._ignored = 0.0

    def is_waited_for(self) -> None:
        """Starts the caller's wait; its own work past the deadline is not the call's time."""
        self._ignored = max(0.0, time.monotonic() - self.began - self.limit)

    def took(self) -> float:
        """Seconds since it began, without ignored time."""
        return time.monotonic() - self.began - self._ignored


def all_of(*names: str, units: float = 1.0) -> Parts:
    return {(name, k): units for name in names for k in range(tensors.slices(name))}


class Calls:
    """A client with a separate identity, and a column.

    Args:
        number: Its column.
        reach: Makes the connection.
        tell: Records an event.
        lag: Measures the machine's delays.
        folder: Folder for the client's files.
    """

    def __init__(
        self, number: int, reach: Callable[[], fastps.ParameterServer], tell: Callable[..., None], lag: Lag,
        folder: Path,
    ) -> None:  # fmt: skip
        self.number, self._tell, self._lag, self._folder = number, tell, lag, folder
        self._calls = self._doubts = 0
        self._open: list[tuple[int, Any, Part]] = []
        self._assigned = 0
        self._worker: fastps.Worker | None = None
        self._refusals = 0
        self._uncertain = False
        #: Set when its session is over, so that it cannot continue.
        self.ended = False
        self.ps = reach()
        self._grads = {name: tensors.gradient(name, number) for name in tensors.SHAPES}
        self._row = fastps.Sparse([number], np.full((1, 2), -1.0, np.float32))
        self._bound: fastps.Bound | None = None
        self._int8: fastps.Bound | None = None
        self._out: dict[str, Any] = {name: np.empty_like(self._grads[name]) for name in tensors.COUNTED}

    def _begin(self, verb: str, parts: Parts, limit: float) -> Call:
        self._calls += 1
        changes = [[*part, units] for part, units in parts.items()]
        self._tell("ask", life=self.number, n=self._calls, verb=verb, parts=changes, limit=limit)
        return Call(self._calls, verb, parts, limit, self._lag.seconds())

    def _end(self, call: Call, error: Exception | None, *, counts: bool = True) -> None:
        took, lag = call.took(), self._lag.seconds() - call.lag
        fields: dict[str, Any] = {"applied": [], "refused": [], "doubts": [], "lost": []}
        if error is None:
            fields["applied"] = list(call.parts)
        elif isinstance(error, fastps.PartialPush):
            fields |= self._in_part(call, error)
        else:
            fields["refused"] = list(call.parts)
        if isinstance(error, fastps.VersionsLost):
            fields["lost"] = [list(lost) for lost in error.lost]
        cause = error.error if isinstance(error, fastps.PartialPush) else error
        self.ended |= isinstance(cause, fastps.LeaseError)
        name = None if error is None else type(error).__name__
        text = "" if error is None else f"{type(cause).__name__}: {cause}"[:300]
        limit = call.limit if counts else None
        self._tell(
            "done", life=self.number, n=call.n, verb=call.verb, took=round(took, 4), limit=limit,
            lag=round(lag, 4), error=name, text=text, **fields,
        )  # fmt: skip

    def _in_part(self, call: Call, error: fastps.PartialPush) -> dict[str, Any]:
        applied = {(name, e.start // tensors.SLICE) for name, e, _ in error.applied}
        applied |= {(name, k) for name in error.receipts for n, k in call.parts if n == name}
        refused = {(name, e.start // tensors.SLICE) for name, e, _ in error.refused}
        doubts = []
        for doubt in error.in_doubt:
            self._doubts += 1
            part = (doubt.tensor, doubt.elements.start // tensors.SLICE)
            self._open.append((self._doubts, doubt, part))
            doubts.append([self._doubts, *part])
        return {"applied": sorted(applied), "refused": sorted(refused), "doubts": doubts}

    def _try(
        self, verb: str, parts: Parts, limit: float, call: Callable[[], Any], counts: bool = True
    ) -> Any:
        """Makes a call and records its outcome; returns None if it failed."""
        record = self._begin(verb, parts, limit)
        try:
            result = call()
        except Exception as error:
            self._end(record, error, counts=counts)
            return None
        self._end(record, None, counts=counts)
        return result

    def resolve(self, timeout: float) -> None:
        """Asks for the outcomes of all doubts; keeps those still unknown."""
        asked, self._open = self._open, []
        for number, doubt, part in asked:
            # The second question gets the same answer.
            for _ in range(2):
                try:
                    fate = doubt.result(timeout)
                except fastps.UnknownOutcomeError:
                    fate = "unknown"
                except fastps.FastpsError:
                    self._open.append((number, doubt, part))
                    break
                self._tell(
                    "fate", life=self.number, doubt=number, tensor=part[0], slice=part[1], fate=fate
                )  # fmt: skip

    def _saw(self, values: Mapping[str, Any], versions: fastps.Versions | None = None) -> None:
        """Records this life's own column, and versions."""
        parts = []
        for name, value in values.items():
            for k, found in enumerate(tensors.columns(name, value)):
                version = None if versions is None else versions.slices(name)[k]
                own = {c: v for c, v in found.items() if c in (-1, self.number)}
                parts.append([name, k, version, {self.number: 0.0} | own])
        self._tell("seen", life=self.number, parts=parts)

    def _check_assigned(self, limit: float) -> None:
        name = f"assign/{self.number}"
        found = self._try("pull_assigned", {}, limit, lambda: self.ps.pull(name, timeout=limit))
        if found is not None:
            whole = bool((found == found[0]).all())
            self._tell("assigned", life=self.number, tensor=name, value=float(found[0]) if whole else -1.0)
