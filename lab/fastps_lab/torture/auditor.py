"""A reader beside the clients: whole pulls with versions, the catalogue, and each server's resources."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import fastps
from fastps_lab.torture import tensors
from fastps_lab.torture.history import History
from fastps_lab.torture.lag import Lag
from fastps_lab.torture.resources import resources
from fastps_lab.torture.servers import Shard

__all__ = ["Auditor"]

TIMEOUT = 10.0


def _refusal(name: str, ps: fastps.ParameterServer) -> str:
    """Pulls a tensor; returns the error if there is none of this name, and an empty string otherwise."""
    try:
        ps.pull(name, timeout=TIMEOUT)
    except fastps.UnknownTensorError as error:
        return str(error)
    return ""


class Auditor:
    """Inspects all servers, without proxies."""

    def __init__(self, shards: Sequence[Shard], history: History, lag: Lag) -> None:
        self._shards, self._history, self._lag = shards, history, lag
        self._addresses = [shard.address for shard in shards]
        self._calls = 0
        self._ps: fastps.ParameterServer | None = None

    def register(self) -> dict[str, list[int]]:
        """Registers the tensors; returns their layout."""
        with fastps.connect(self._addresses, timeout=60.0) as ps:
            return tensors.register(ps)

    def _try(self, step: int | None, verb: str, call: Callable[[fastps.ParameterServer], Any]) -> Any:
        """Makes a call and records its outcome; returns None if it failed."""
        self._calls += 1
        self._history.add("ask", step, life=None, n=self._calls, verb=verb, parts=[], limit=TIMEOUT)
        began, lag, error = time.monotonic(), self._lag.seconds(), None
        result = None
        try:
            if self._ps is None:
                self._ps = fastps.connect(self._addresses, timeout=TIMEOUT)
                self._history.add("life", step, life=None, slot=None)
                began, lag = time.monotonic(), self._lag.seconds()
            result = call(self._ps)
        except Exception as caught:
            error = caught
        lost = [list(lost) for lost in error.lost] if isinstance(error, fastps.VersionsLost) else []
        name = None if error is None else type(error).__name__
        text = "" if error is None else f"{name}: {error}"[:300]
        took, lag = round(time.monotonic() - began, 4), round(self._lag.seconds() - lag, 4)
        limit = TIMEOUT if self._ps is not None else None
        self._history.add(
            "done", step, life=None, n=self._calls, verb=verb, took=took, limit=limit, lag=lag, error=name,
            text=text, applied=[], refused=[], doubts=[], lost=lost,
        )  # fmt: skip
        if isinstance(error, fastps.LeaseError):
            self.close()
        return result

    def look(self, step: int | None, args: Mapping[str, Any], *, final: bool = False) -> bool:
        """Pulls everything; returns whether that succeeded."""
        names = list(tensors.SHAPES)
        pulled = self._try(step, "pull", lambda ps: ps.pull(names, versions=True, timeout=TIMEOUT))
        if pulled is not None:
            values, versions = pulled
            parts = [
                [name, k, versions.slices(name)[k], found]
                for name in names
                for k, found in enumerate(tensors.columns(name, values[name]))
            ]
            self._history.add("seen", step, life=None, n=self._calls, parts=parts, final=final)
        for shard in self._shards:
            self.sample(shard, "run", step)
        return pulled is not None and (not args["catalogue"] or self._look_at_the_catalogue(step))

    def _look_at_the_catalogue(self, step: int | None) -> bool:
        listed = self._try(step, "names", lambda ps: ps.names(timeout=TIMEOUT))
        if listed is None:
            return False
        failed: dict[str, str] = {}
        for name in listed:
            refusal = self._try(step, "pull", partial(_refusal, name))
            if refusal is None:
                return False  # no result: a server is away, or a loss was reported
            if refusal:
                failed[name] = refusal
        # A tensor removed meanwhile is no longer listed.
        still = self._try(step, "names", lambda ps: ps.names(timeout=TIMEOUT)) if failed else listed
        if still is None:
            return False
        self._history.add(
            "catalogue", step, listed=listed, failed={n: e for n, e in failed.items() if n in still}
        )
        return True

    def sample(self, shard: Shard, at: str, step: int | None, sessions: int | None = None) -> dict[str, Any]:
        """Records a server's resources."""
        found = resources(shard.pid)
        if found is None:
            return {}
        sample = {"shard": shard.index, "pid": shard.pid, **found, "sessions": sessions, "at": at}
        self._history.add("sample", step, **sample)
        return sample

    def sessions(self) -> list[int] | None:
        """Number of sessions on each shard, this one included."""
        stats = self._try(None, "stats", lambda ps: ps.stats(timeout=TIMEOUT))
        return None if stats is None else [shard["counters"]["sessions"] for shard in stats["shards"]]

    def sample_all(self, at: str) -> list[dict[str, Any]]:
        """Records the resources of every server, sessions included."""
        sessions: Sequence[int | None] = self.sessions() or [None] * len(self._shards)
        return [
            self.sample(shard, at, None, count) for shard, count in zip(self._shards, sessions, strict=True)
        ]

    def close(self) -> None:
        """Ends its session."""
        if self._ps is not None:
            with contextlib.suppress(fastps.FastpsError):
                self._ps.close()
            self._ps = None
