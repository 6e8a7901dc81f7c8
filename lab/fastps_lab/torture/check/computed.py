"""The invariant of a coordinator's computations on servers, of samples that they share out, and of cuts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from fastps_lab.torture.check.violation import Violation
from fastps_lab.torture.history import Event

__all__ = ["computed"]


def computed(events: Sequence[Event]) -> Iterator[Violation]:
    """A program runs once, a minimum has the bits of an undisturbed run, an epoch has each sample once, and a
    cut is consistent.

    If receipts do not mean that a change is logged, changes may be lost with a killed server.
    """
    logged = next((event["ack"] for event in events if event["ev"] == "begin"), "logged") != "applied"
    crashed = False
    for event in events:
        crashed |= event["ev"] == "server" and event["what"] in ("killed", "died")
        who = f"client {event.get('life')}"
        exact = logged or not crashed
        if event["ev"] == "program" and (
            event["found"] > event["expected"] or (exact and event["found"] != event["expected"])
        ):
            evidence = f"{who}: a program counts {event['found']:g}, not {event['expected']:g}"
            yield Violation("computed", event.get("step"), evidence)
        if event["ev"] == "minimum" and exact and event["found"] != event["expected"]:
            yield Violation("computed", event.get("step"), f"{who}: a minimum has other bits")
        if event["ev"] == "cut" and exact:
            for life, (first, second) in event["lives"].items():
                if not first - 1 <= second <= first:
                    evidence = f"a cut has {first:g} and {second:g} pushes of client {life}'s pairs"
                    yield Violation("computed", event.get("step"), evidence)
        if event["ev"] == "epoch":
            counts: Counter[int] = Counter(event["seen"])
            missing = [k for k in range(event["samples"]) if not counts[k]]
            twice = sorted(k for k, count in counts.items() if count > 1 and not event["over"])
            if missing or twice:
                evidence = f"{who}: an epoch lacks the samples {missing} and has {twice} twice"
                yield Violation("computed", event.get("step"), evidence)
