"""Reads a trace of torch's profiler: in what part of a step the GPU idles, and what is copied."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from torch.profiler import ProfilerActivity, profile, record_function

#: The annotation around each `step()`.
STEP = "step()"
#: Begins the annotation around the steps of a way.
WAY = "way "

Interval = tuple[float, float]


class Copies(NamedTuple):
    """Copies in one direction."""

    bytes: int
    #: In which at least one copy was under way.
    seconds: float


class Steps(NamedTuple):
    """Means over the profiled steps, in seconds."""

    #: From the end of one `step()` to the end of the next, and the part of it in which no kernel ran.
    period: float
    idle: float
    step: float
    #: Part of `step()` in which no kernel ran.
    stall: float
    #: Part of `step()` in which data was copied.
    copying: float
    to_gpu: Copies
    to_cpu: Copies


def traced(
    ways: dict[str, Callable[[], object]], complete: Callable[[dict[str, Any]], None] | None = None
) -> dict[str, Steps]:
    """Profiles ways to take steps, all in one session: later sessions of a process may lose events.

    Args:
        ways: Functions that take some steps within `record_function(STEP)`, and wait for the GPU at their
            end. Each is called once before it counts, because the start of the profiler costs time.
        complete: Adds a pretended GPU's events to the trace, in a rehearsal.
    """
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if complete is None else [])
    with profile(activities=activities) as recorded:
        for name, run in ways.items():
            run()
            with record_function(WAY + name):
                run()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(path))
        trace = json.loads(path.read_text())
    if complete is not None:
        complete(trace)
    return {name: summary(events) for name, events in by_way(trace["traceEvents"]).items()}


def by_way(events: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The events that happened while each way counted."""
    windows = {
        event["name"].removeprefix(WAY): interval(event)
        for event in events
        if event.get("cat") == "user_annotation" and event["name"].startswith(WAY)
    }
    complete = [event for event in events if event.get("ph") == "X"]
    return {
        name: [event for event in complete if begin <= float(event["ts"]) <= end]
        for name, (begin, end) in windows.items()
    }


def summary(events: Iterable[dict[str, Any]]) -> Steps:
    """Figures of the events of a Chrome trace, whose times are microseconds."""
    by_kind: dict[str, list[dict[str, Any]]] = {}
    for event in events:
        if event.get("ph") == "X":
            by_kind.setdefault(event.get("cat", ""), []).append(event)
    steps = sorted(interval(e) for e in by_kind.get("user_annotation", []) if e["name"] == STEP)
    kernels = union(interval(event) for event in by_kind.get("kernel", []))
    copies = by_kind.get("gpu_memcpy", [])
    moved = union(interval(event) for event in copies)
    count, total = len(steps), sum(end - begin for begin, end in steps)
    window = steps[0][1], steps[-1][1]
    length, pauses = window[1] - window[0], max(1, count - 1)
    return Steps(
        period=length / pauses / 1e6,
        idle=(length - overlap(window, kernels)) / pauses / 1e6,
        step=total / count / 1e6,
        stall=(total - sum(overlap(step, kernels) for step in steps)) / count / 1e6,
        copying=sum(overlap(step, moved) for step in steps) / count / 1e6,
        to_gpu=direction(copies, "HtoD", count),
        to_cpu=direction(copies, "DtoH", count),
    )


def direction(copies: list[dict[str, Any]], kind: str, steps: int) -> Copies:
    """The copies of one direction, for each step."""
    those = [event for event in copies if kind in event["name"]]
    busy = sum(end - begin for begin, end in union(interval(event) for event in those))
    size = sum(int(event["args"].get("bytes", 0)) for event in those)
    return Copies(round(size / steps), busy / steps / 1e6)


def interval(event: dict[str, Any]) -> Interval:
    """Begin and end of an event."""
    return float(event["ts"]), float(event["ts"]) + float(event["dur"])


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same times as intervals that do not overlap, in order."""
    joined: list[Interval] = []
    for begin, end in sorted(intervals):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((begin, end))
    return joined


def overlap(one: Interval, others: list[Interval]) -> float:
    """The length that an interval has in common with others, which do not overlap."""
    return sum(max(0.0, min(one[1], end) - max(one[0], begin)) for begin, end in others)
