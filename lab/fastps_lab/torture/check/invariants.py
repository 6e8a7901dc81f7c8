"""The invariants of every history: one function for each, a pure function of the events."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from fastps_lab.torture.check.computed import computed
from fastps_lab.torture.check.values import doubt, ledger, lost_logged, monotone, reported
from fastps_lab.torture.check.violation import Violation
from fastps_lab.torture.history import Event

__all__ = ["GRACE", "INVARIANTS", "SLACK", "SPARE", "Violation", "certain", "check", "kept", "starts"]

#: Seconds by which a call may be late.
GRACE = 0.25

#: Bytes that a server's process may have beyond its limit.
SLACK = 64 * 2**20

#: Resources that a server may have gained at the end: files of the log and of a snapshot.
SPARE = {"descriptors": 8, "threads": 0, "sessions": 0}

CUT = ("ping", "settings", "window_update", "priority", "unknown_frame")
#: Frames of these kinds after which a connection must have been cut.
FLOOD = 2000

#: Message of a second server on a directory.
OWNED = "another server"

#: Errors that an honest call under faults may end with.
_TYPED = {
    "CapacityError", "ConfigError", "ConnectionLostError", "DeadlineError", "FencedError", "LeaseError",
    "PartialPush", "PermissionDeniedError", "StalePush", "UnavailableError", "UnknownOutcomeError",
    "UnknownTensorError", "VersionsLost",
}  # fmt: skip


def budget(events: Sequence[Event]) -> Iterator[Violation]:
    """A server keeps its memory limit, and ends with the resources that it started with."""
    limit = next((event["limit"] for event in events if event["ev"] == "begin"), None)
    start = starts(events)
    end: dict[int, Event] = {}
    for event in events:
        if event["ev"] == "attack" and event["kind"] in CUT and event["sent"] >= FLOOD and not event["cut"]:
            evidence = f"{event['sent']} {event['kind']} frames, and the connection stays open"
            yield Violation("budget", event.get("step"), evidence)
        if event["ev"] == "charged" and event["grown"] < event["least"]:
            evidence = f"{event['least']} bytes of names were registered; {event['grown']} were counted"
            yield Violation("budget", event.get("step"), evidence)
        if event["ev"] != "sample":
            continue
        shard = event["shard"]
        if limit is not None and event["rss"] > limit + SLACK:
            evidence = (
                f"shard {shard} takes {event['rss'] / 2**20:.0f} MiB; its limit is {limit / 2**20:.0f} MiB"
            )
            yield Violation("budget", event.get("step"), evidence)
        if event["at"] == "end":
            end[shard] = event
    for shard, event in end.items():
        for what, more in kept(start.get(shard, {}), event):
            yield Violation("budget", event.get("step"), f"shard {shard} has {more}, {what} at the start")


def starts(events: Sequence[Event]) -> dict[int, dict[str, int]]:
    """Maximum resources that each shard's server had at its starts."""
    most: dict[int, dict[str, int]] = {}
    for event in events:
        if event["ev"] == "sample" and event["at"] == "start":
            own = most.setdefault(event["shard"], {})
            for what in SPARE:
                own[what] = max(own.get(what, 0), event[what] or 0)
    return most


def kept(start: Mapping[str, int], sample: Mapping[str, Any]) -> Iterator[tuple[int, str]]:
    """Yields the resources that a server has gained: the count at the start, and a text for the end."""
    for what, spare in SPARE.items():
        allowed, now = start.get(what), sample.get(what)
        if allowed is not None and now is not None and now > allowed + spare:
            yield allowed, f"{now} {what} at the end"


def liveness(events: Sequence[Event]) -> Iterator[Violation]:
    """No call takes longer than its deadline, the machine's own delays excluded."""
    for event in events:
        if event["ev"] == "hung":
            yield Violation("liveness", event.get("step"), f"{event['lane']}: {event['text']}")
        if event["ev"] != "done" or event["limit"] is None:
            continue
        late = event["took"] - event["limit"] - event["lag"]
        if late > GRACE:
            who = f"{event['verb']} of client {event['life']}"
            evidence = f"{who} took {event['took']:.2f} s; its deadline was {event['limit']:g} s"
            yield Violation("liveness", event.get("step"), evidence)


#: Seconds: servers hold writes for at most 2 s, and may be stopped and have a restart before them.
LONGEST_HOLD = 6.0

#: Bytes for the connections of a client that has pushed a slice of 1 MiB.
MOST_CHARGED = 3 * 2**20

_ACTS = {
    "seat": "ran a program of another client's space",
    "program": "ran a program of boundless work",
    "join": "kept a client that trains freely from pushing",
}


def strangers(events: Sequence[Event]) -> Iterator[Violation]:
    """No client acts for another or takes resources that others need."""
    undisturbed: set[int] = set()  # Steps of acts since whose start no server was killed or stopped.
    for event in events:
        if event["ev"] == "action" and event["lane"] == "stranger":
            undisturbed.add(event["step"])
        if event["ev"] == "server":
            undisturbed.clear()
        if event["ev"] != "stranger" or "failed" in event:
            continue
        kind, step = event["kind"], event.get("step")
        # A restarted server does not know who pushed before.
        if kind in _ACTS and not event["refused"] and (kind != "join" or step in undisturbed):
            yield Violation("strangers", step, f"a stranger {_ACTS[kind]}")
        if kind == "hold" and event["held"] > LONGEST_HOLD:
            yield Violation("strangers", step, f"a stranger held writes for {event['held']:.1f} s")
        if kind == "workers" and event["each"] > MOST_CHARGED:
            evidence = f"the connections of a client that pushes slices take {event['each'] / 2**20:.1f} MiB"
            yield Violation("strangers", step, evidence)
        # The sessions of others end meanwhile.
        if kind == "states" and 2 * event["grown"] < event["least"]:
            evidence = f"{event['least']} bytes of states were stored; {event['grown']} were counted"
            yield Violation("strangers", step, evidence)
        # A restarted server keeps the sessions of its log for a new lease: pushes it lost may be repeated.
        if kind == "replay" and event["after"] > event["pushes"]:
            counts = f"{event['before']:g} became {event['after']:g}, of {event['pushes']} pushes"
            yield Violation("strangers", step, f"pushes of an ended session were applied again: {counts}")


def one_owner(events: Sequence[Event]) -> Iterator[Violation]:
    """Never two servers on one directory."""
    for event in events:
        if event["ev"] == "second" and event["started"]:
            evidence = f"a second server came up on the directory of shard {event['shard']}"
            yield Violation("one owner", event.get("step"), evidence)


def catalogue(events: Sequence[Event]) -> Iterator[Violation]:
    """Every listed tensor can be pulled, and every registered tensor stays listed."""
    layout: set[str] = set()
    for event in events:
        if event["ev"] == "layout":
            layout = set(event["tensors"])
        if event["ev"] == "catalogue":
            for name, error in sorted(event["failed"].items()):
                yield Violation(
                    "catalogue", event.get("step"), f"{name!r} is listed, and a pull says: {error}"
                )
            for name in sorted(layout - set(event["listed"])):
                yield Violation("catalogue", event.get("step"), f"{name!r} was registered and is not listed")


def no_internal(events: Sequence[Event]) -> Iterator[Violation]:
    """No error reports a bug, and no server ends unasked."""
    for event in events:
        step = event.get("step")
        if event["ev"] == "internal":
            yield Violation("no internal", step, event["text"])
        if event["ev"] == "server" and event["what"] == "died":
            yield Violation(
                "no internal", step, f"shard {event['shard']} ended unasked: {event.get('text', '')}"
            )
        if event["ev"] == "second" and not event["started"] and OWNED not in event["text"]:
            evidence = f"a second server on the directory of shard {event['shard']} ended for another reason"
            yield Violation("no internal", step, f"{evidence}: {event['text']}")
        if event["ev"] == "done" and event["error"] is not None:
            kinds = {event["error"], event["text"].partition(":")[0]}
            if not kinds <= _TYPED:
                yield Violation(
                    "no internal", step, f"{event['verb']} of client {event['life']}: {event['text']}"
                )


INVARIANTS: dict[str, Callable[[Sequence[Event]], Iterator[Violation]]] = {
    "ledger": ledger,
    "reported": reported,
    "monotone": monotone,
    "doubt": doubt,
    "computed": computed,
    "budget": budget,
    "strangers": strangers,
    "liveness": liveness,
    "one owner": one_owner,
    "catalogue": catalogue,
    "no internal": no_internal,
}


def check(events: Sequence[Event]) -> list[Violation]:
    """All violations, invariant by invariant."""
    return [violation for invariant in INVARIANTS.values() for violation in invariant(events)]


def certain(events: Sequence[Event], ack: str) -> bool:
    """Returns whether these events alone, some of a run, prove that an invariant is violated."""
    if ack != "applied" and any(any(lost_logged(event)) for event in events):
        return True
    return any(any(invariant(events)) for invariant in (strangers, liveness, one_owner, no_internal))
