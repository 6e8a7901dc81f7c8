"""The record of a run: events as JSON lines, in the order of their times.

Every event has ``t`` (seconds since the run began), ``ev`` (its kind) and ``step`` (of the action that it
belongs to; None for the run's own). Kinds:

- ``begin``: ``seed``, ``profile``, ``ack``, ``limit`` (bytes of memory a shard), ``lease``, ``machine``,
  ``version``
- ``action``: ``lane``, ``kind``, ``args``; ``layout``: ``tensors``, names to the shard of each slice
- ``server``: ``shard``, ``what`` (``started``, ``killed``, ``terminated``, ``stopped``, ``continued``,
  ``died``), ``pid``
- ``second``: ``shard``, ``started``: True if a second server came up on the first one's directory
- ``life``: a client begins: ``life`` (its number; None: the auditor's), ``slot``; ``ended``: ``life``,
  ``how`` (``killed``, ``closed``, ``gave up``)
- ``ask``: ``life``, ``n``, ``verb``, ``parts`` ([[tensor, slice, units], ...] that it changes), ``limit``
  (seconds)
- ``done``: ``life``, ``n``, ``verb``, ``took``, ``limit``, ``lag`` (seconds that the machine kept the
  process waiting), ``error`` (None or its class), ``text``, ``applied``, ``refused`` ([tensor, slice]
  each), ``doubts`` ([[number, tensor, slice], ...]), ``lost`` ([[tensor, shard, own, seen, now], ...])
- ``fate``: ``life``, ``doubt``, ``tensor``, ``slice``, ``fate``
- ``seen``: ``life`` (None: the auditor), ``parts``: [[tensor, slice, version or None, {life: units}], ...]
- ``assigned``: ``life``, ``tensor``, ``value``: found by a pull in a tensor that only this client assigns
- ``reported``: ``life``, ``own``: value of ``stats()["client"]["pushes_lost"]``; ``settled``: ``life``,
  nothing is under way
- ``worker``: ``life``, ``steps``, ``carried`` (maximum number of gradients in one push), ``uncertain``,
  ``lost``, ``torn`` (steps that a signal interrupted), ``tensors``
- ``worked``: ``life``, ``tensor``, ``value``: of a worker's own tensor after `flush`
- ``program``, ``minimum``: ``life``, ``expected``, ``found``: a sum that counts programs,
  the bits of a solution
- ``epoch``: ``life``, ``seen`` (indices), ``samples``, ``over``: True if the server said that it starts over
- ``cut``: ``lives``: clients to their values in the two tensors of pairs in a consistent cut
- ``sample``: ``shard``, ``pid``, ``rss``, ``descriptors``, ``threads``, ``sessions`` (None: not asked),
  ``at`` (``start``, ``run`` or ``end``)
- ``catalogue``: ``listed``, ``failed`` ({name: error})
- ``attack``: ``kind``, ``sent``, ``cut``; ``charged``: ``least``, ``grown``: bytes of names, and bytes
  counted for them
- ``stranger``: ``kind``, and either ``refused``, ``held`` (seconds), ``each`` (bytes), ``pushes``,
  ``before`` and ``after`` (values), ``least`` and ``grown`` (bytes), or ``failed``: no result, a server was
  away
- ``hung``: ``lane``, ``text``: something did not end
- ``internal``: ``text``, a line of a server's log that reports a bug; ``end``
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

__all__ = ["Event", "History", "read"]

Event = Mapping[str, Any]


class History:
    """Collects events from several threads."""

    def __init__(self, began: float | None = None) -> None:
        self.began = time.monotonic() if began is None else began
        self._events: list[Event] = []
        self._tally: Counter[str] = Counter()
        self._frozen = False
        self._lock = threading.Lock()

    def now(self) -> float:
        """Seconds since the run began."""
        return time.monotonic() - self.began

    def add(self, ev: str, step: int | None = None, **fields: Any) -> None:
        """Records an event that happens now."""
        self.take({"t": round(self.now(), 6), "ev": ev, "step": step, **fields})

    def take(self, event: Event) -> None:
        """Records an event of another process."""
        with self._lock:
            if not self._frozen:
                self._events.append(event)
                self._tally[event["ev"]] += 1

    def freeze(self) -> None:
        """Drops all later events."""
        with self._lock:
            self._frozen = True

    def tally(self) -> Counter[str]:
        """Number of events of each kind so far."""
        with self._lock:
            return self._tally.copy()

    def events(self) -> list[Event]:
        """All events so far, by time."""
        with self._lock:
            return sorted(self._events, key=lambda event: float(event["t"]))

    def since(self, count: int) -> list[Event]:
        """The events after the first `count` recorded ones, in the order of recording."""
        with self._lock:
            return self._events[count:]

    def write(self, path: Path) -> None:
        """Writes them to a file, one JSON object a line."""
        with path.open("w") as file:
            file.writelines(json.dumps(event) + "\n" for event in self.events())


def read(lines: Iterable[str]) -> list[Event]:
    """The events of JSON lines."""
    return [json.loads(line) for line in lines if line.strip()]
