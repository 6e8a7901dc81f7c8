"""Summary of a run: counts of its actions and checks, as one JSON object and as lines of text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from fastps_lab.torture.check import Violation
from fastps_lab.torture.history import Event

__all__ = ["counts", "lines"]

_FAULTS = ("shard", "net", "hostile", "stranger")
_CHECKS = (
    "seen",
    "assigned",
    "reported",
    "fate",
    "sample",
    "second",
    "catalogue",
    "charged",
    "worked",
    "program",
    "minimum",
    "epoch",
    "stranger",
    "cut",
)


def counts(events: Sequence[Event], violations: Sequence[Violation]) -> dict[str, Any]:
    """The numbers of a run."""
    begin = next(event for event in events if event["ev"] == "begin")
    done = [event for event in events if event["ev"] == "done"]
    actions = [event for event in events if event["ev"] == "action"]
    faults = Counter(a["kind"] for a in actions if a["lane"].startswith(_FAULTS))
    faults += Counter(
        f"client {a['kind']}" for a in actions if a["kind"] in ("killed", "stopped", "interrupted")
    )
    return {
        "seed": begin.get("seed"),
        "profile": begin.get("profile"),
        "ack": begin["ack"],
        "seconds": round(float(events[-1]["t"]), 1),
        "machine": begin["machine"],
        "version": begin["version"],
        "pushes": sum(bool(event["applied"]) for event in done),
        "slices": sum(len(event["applied"]) for event in done),
        "calls": len(done),
        "refused": sum(event["error"] is not None for event in done),
        "doubts": sum(len(event["doubts"]) for event in done),
        "losses_reported": sum(lost[2] or 0 for event in done for lost in event["lost"]),
        "clients": sum(event["ev"] == "life" and event["life"] is not None for event in events),
        "restarts": sum(event["ev"] == "server" and event["what"] == "started" for event in events),
        "faults": dict(sorted(faults.items())),
        "checks": sum(event["ev"] in _CHECKS for event in events),
        "violations": dict(Counter(violation.invariant for violation in violations)),
    }


def lines(report: dict[str, Any], violations: Sequence[Violation]) -> list[str]:
    """Formats the counts as text, with the first violations of each failed invariant."""
    faults = ", ".join(f"{kind.replace('_', ' ')} {count}" for kind, count in report["faults"].items())
    text = [
        f"{report['pushes']} pushes and {report['calls']} calls of {report['clients']} clients",
        f"{report['refused']} refused, {report['doubts']} slices in doubt, "
        f"{report['losses_reported']} losses reported",
        f"{sum(report['faults'].values())} faults, {report['restarts']} restarts: {faults}",
        f"{report['checks']} checks",
    ]
    shown: Counter[str] = Counter()
    for violation in violations:
        shown[violation.invariant] += 1
        if shown[violation.invariant] <= 3:
            text.append(f"VIOLATION {violation}")
    return text
