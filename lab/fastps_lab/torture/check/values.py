"""The invariants of values and versions: one function for each, each a pure function of the events."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fastps_lab.torture.check.ledger import Books, Key
from fastps_lab.torture.check.violation import Violation
from fastps_lab.torture.history import Event
from fastps_lab.torture.tensors import COUNTED, WORKERS

__all__ = ["doubt", "ledger", "monotone", "reported"]

#: Ends of a server that may lose pushes.
_ENDS = ("killed", "died")

#: Calls that name no tensor and so report no loss, or are another client's.
_SILENT = ("stats", "portions", "close_space", "worker", "step", "flush", "close_worker", "close")


def _books(events: Sequence[Event]) -> Iterator[tuple[Event, Books]]:
    """Each event, and the books with it."""
    books = Books()
    for event in events:
        books.take(event)
        yield event, books


def _ack(events: Sequence[Event]) -> str:
    return next((str(event["ack"]) for event in events if event["ev"] == "begin"), "logged")


def _own(event: Event) -> Iterator[tuple[Key, float]]:
    """Yields a client's view of its pushes."""
    if event["ev"] == "seen" and event["life"] is not None:
        for tensor, k, _, columns in event["parts"]:
            for life, value in columns.items():
                if int(life) == event["life"]:
                    yield (event["life"], tensor, k), value


def _all(event: Event, books: Books) -> Iterator[tuple[Key, float]]:
    """Yields the auditor's view of every client's pushes."""
    if event["ev"] == "seen" and event["life"] is None:
        for tensor, k, _, columns in event["parts"]:
            found = {int(life): value for life, value in columns.items()}
            lives = {life for life, name, part in books.accounts if (name, part) == (tensor, k)}
            for life in sorted(lives | set(found)):
                if tensor not in WORKERS:
                    yield (life, tensor, k), found.get(life, 0.0)


def _what(key: Key) -> str:
    life, tensor, k = key
    return f"slice {k} of {tensor!r}, client {life}"


def lost_logged(event: Event) -> Iterator[Violation]:
    """No push that was acknowledged as logged is lost."""
    if event["ev"] == "done" and any(lost[2] for lost in event["lost"]):
        evidence = f"client {event['life']} lost logged pushes: {event['lost']}"
        yield Violation("ledger", event.get("step"), evidence)


def ledger(events: Sequence[Event]) -> Iterator[Violation]:
    """A value is the sum of acknowledged pushes less reported losses; pushes in doubt may count or not."""
    logged = _ack(events) != "applied"
    crashed = False
    least: dict[Key, float] = {}
    for event, books in _books(events):
        step = event.get("step")
        crashed |= event["ev"] == "server" and event["what"] in _ENDS
        while books.unreported:
            life, n, parts = books.unreported.pop()
            yield Violation("ledger", step, f"call {n} of client {life} says nothing of {parts}")
        if logged:
            yield from lost_logged(event)
        if event["ev"] == "ask" and event["life"] is None:
            least = {key: account.bounds_without_fates[0] for key, account in books.accounts.items()}
        for key, value in _own(event):
            low, high = books.accounts[key].bounds_without_fates
            # With "applied", another invariant checks for losses that no call reported.
            if value > high or (value < low and (logged or not crashed)):
                yield Violation("ledger", step, f"{_what(key)}: {value:g}, not within {low:g} and {high:g}")
        for key, value in _all(event, books):
            low, high = books.accounts[key].bounds_without_fates
            final = event.get("final", False) and key[0] in books.settled
            low = low if final and (logged or not crashed) else least.get(key, 0.0) if logged else 0.0
            if not low <= value <= high:
                yield Violation("ledger", step, f"{_what(key)}: {value:g}, not within {low:g} and {high:g}")
        yield from _whole(event)
        yield from _workers(event, books, logged or not crashed)
        yield from _own_tensor(event, books, logged or not crashed)
        if event["ev"] == "assigned":
            register = books.registers[event["tensor"]]
            allowed = register.allowed
            # With "applied" a crash loses the last values; `reported` checks that a call reports it.
            former = register.former if crashed and not logged else set()
            if event["value"] not in allowed | former:
                evidence = f"{event['tensor']!r} has {event['value']:g}, not one of {sorted(allowed)}"
                yield Violation("ledger", step, evidence)


def _whole(event: Event) -> Iterator[Violation]:
    """A slice's version counts its pushes, and all of its elements are of one version."""
    if event["ev"] != "seen":
        return
    for tensor, k, version, columns in event["parts"]:
        found = {int(life): value for life, value in columns.items()}
        where = f"slice {k} of {tensor!r}"
        if -1 in found:
            yield Violation("ledger", event.get("step"), f"{where} has values that no client pushed")
        total = sum(value for life, value in found.items() if life >= 0)
        if event["life"] is None and version is not None and tensor in COUNTED and version - 1 != total:
            yield Violation("ledger", event.get("step"), f"{where}: version {version}, {total:g} pushes")


def _workers(event: Event, books: Books, exact: bool) -> Iterator[Violation]:
    if event["ev"] != "seen" or event["life"] is not None:
        return
    for tensor, _, _, columns in event["parts"]:
        if tensor not in WORKERS:
            continue
        found = {int(life): value for life, value in columns.items()}
        for life, account in books.workers.items():
            if tensor not in account.tensors:
                continue
            low, high = account.bounds(tensor)
            final = event.get("final", False) and life in books.settled
            value = found.get(life, 0.0)
            if value > high or (final and value < low):
                evidence = f"{tensor!r}, worker {life}: {value:g}, not within {low:g} and {high:g}"
                invariant = "ledger" if exact or value > high else "reported"
                yield Violation(invariant, event.get("step"), evidence)


def _own_tensor(event: Event, books: Books, exact: bool) -> Iterator[Violation]:
    """Checks the tensor of a worker that has flushed."""
    if event["ev"] == "worked":
        low, high = books.workers[event["life"]].bounds(event["tensor"])
        if not low <= event["value"] <= high:
            evidence = f"{event['tensor']!r}: {event['value']:g}, not within {low:g} and {high:g}"
            invariant = "ledger" if exact or event["value"] > high else "reported"
            yield Violation(invariant, event.get("step"), evidence)


class _Unreported:
    """Losses seen by a call during a restart; the client's next call must report them before it succeeds."""

    def __init__(self) -> None:
        self._waiting: dict[int | None, list[tuple[str, Violation]]] = {}

    def add(self, life: int | None, tensor: str, violation: Violation) -> None:
        self._waiting.setdefault(life, []).append((tensor, violation))

    def take(self, event: Event) -> Iterator[Violation]:
        if event["ev"] == "life":
            self._waiting.pop(event["life"], None)
        # A call that fails otherwise, as with an earlier push's error, leaves the report to the next one.
        if event["ev"] == "done" and event["verb"] not in _SILENT and (event["lost"] or not event["error"]):
            lost = {loss[0] for loss in event["lost"]}
            yield from (v for tensor, v in self._waiting.pop(event["life"], []) if tensor not in lost)


def reported(events: Sequence[Event]) -> Iterator[Violation]:
    """Every loss is reported once: by the first call after the restart, or the next if the first met it."""
    logged = _ack(events) != "applied"
    crashed = False
    unreported = _Unreported()
    for event, books in _books(events):
        step = event.get("step")
        crashed |= event["ev"] == "server" and event["what"] in _ENDS
        if logged or not crashed:
            continue
        yield from unreported.take(event)
        for key, value in _own(event):
            low, _ = books.accounts[key].bounds_without_fates
            if value < low:
                evidence = f"{_what(key)}: {value:g} of {low:g}, and no loss was reported"
                unreported.add(key[0], key[1], Violation("reported", step, evidence))
        if event["ev"] == "assigned":
            tensor, value = event["tensor"], event["value"]
            register = books.registers[tensor]
            if value in register.applied and value not in register.allowed:
                evidence = f"{tensor!r} has {value:g}, not {register.applied[-1]:g}, and no loss was reported"
                unreported.add(event["life"], tensor, Violation("reported", step, evidence))
        for key, value in _all(event, books):
            low, _ = books.accounts[key].bounds_without_fates
            if event.get("final", False) and key[0] in books.settled and value < low:
                evidence = f"{_what(key)}: {value:g} of {low:g}, and no loss was reported"
                yield Violation("reported", step, evidence)
        if event["ev"] == "reported":
            own = books.reported[event["life"]]
            if own is not None and own != event["own"]:
                who = f"client {event['life']}"
                evidence = f"{own} losses were reported to {who}, which counts {event['own']}"
                yield Violation("reported", step, evidence)


def monotone(events: Sequence[Event]) -> Iterator[Violation]:
    """A client never sees a change undone that it has seen, unless its loss is reported (see `reported`)."""
    layout: dict[str, list[int]] = {}
    newest: dict[tuple[int | None, str, int], int] = {}
    values: dict[Key, float] = {}
    unreported = _Unreported()
    for event in events:
        yield from unreported.take(event)
        if event["ev"] == "layout":
            layout = dict(event["tensors"])
        if event["ev"] == "life" and event["life"] is None:
            newest = {key: version for key, version in newest.items() if key[0] is not None}
        if event["ev"] == "done":
            for tensor, shard, _, _, now in event["lost"]:
                for k in (k for k, where in enumerate(layout.get(tensor, [])) if where == shard):
                    newest[event["life"], tensor, k] = now
                    values.pop((event["life"], tensor, k), None)
        if event["ev"] != "seen":
            continue
        for tensor, k, version, _ in event["parts"]:
            seen = newest.get((event["life"], tensor, k), 0)
            if version is not None and version < seen:
                who = "the auditor" if event["life"] is None else f"client {event['life']}"
                evidence = f"slice {k} of {tensor!r}: {who} saw version {seen}, then {version}"
                unreported.add(event["life"], tensor, Violation("monotone", event.get("step"), evidence))
            newest[event["life"], tensor, k] = seen if version is None else version
        for key, value in _own(event):
            if value < values.get(key, 0.0):
                evidence = f"{_what(key)}: it saw {values[key]:g} of its units, then {value:g}"
                unreported.add(key[0], key[1], Violation("monotone", event.get("step"), evidence))
            values[key] = value


def doubt(events: Sequence[Event]) -> Iterator[Violation]:
    """The outcome of a push in doubt is reported, stays the same, and agrees with the value."""
    logged = _ack(events) != "applied"
    began: dict[tuple[int, int], Event] = {}
    fates: dict[tuple[int, int], str] = {}
    crashed = False
    gave_up = {event["life"] for event in events if event["ev"] == "ended" and event["how"] == "gave up"}
    for event, books in _books(events):
        step = event.get("step")
        crashed |= event["ev"] == "server" and event["what"] in _ENDS
        if event["ev"] == "done":
            began |= {(event["life"], number): event for number, _, _ in event["doubts"]}
        if event["ev"] == "fate":
            key = (event["life"], event["doubt"])
            what = f"doubt {key[1]} of client {key[0]} ({event['tensor']!r})"
            if key not in began:
                yield Violation("doubt", step, f"{what}: was not reported as in doubt")
            if fates.setdefault(key, event["fate"]) != event["fate"]:
                yield Violation("doubt", step, f"{what}: reported {fates[key]!r}, then {event['fate']!r}")
            if event["fate"] == "unknown" and logged and key[0] not in gave_up:
                yield Violation(
                    "doubt", step, f"{what}: 'unknown', although its session lives and pushes are logged"
                )
        if event["ev"] == "settled":
            for key in began:
                if key[0] == event["life"] and key not in fates:
                    evidence = f"doubt {key[1]} of client {key[0]} has no reported outcome"
                    yield Violation("doubt", step, evidence)
        # A client's view of its pushes, with the servers' reports and without them.
        for key_of_value, value in _own(event):
            account = books.accounts[key_of_value]
            low, high = account.bounds
            loose = account.bounds_without_fates
            # With "applied", a push reported as applied may be lost, and that is reported later.
            low = low if logged or not crashed else loose[0]
            if loose[0] <= value <= loose[1] and not low <= value <= high:
                evidence = f"{_what(key_of_value)}: {value:g}; by the reported outcomes {low:g} to {high:g}"
                yield Violation("doubt", step, evidence)
