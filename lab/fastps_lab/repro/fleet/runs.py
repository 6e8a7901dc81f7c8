"""Plays the trace of a fleet: starts and kills its processes, and looks at the loss."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from fastps.commands.kit import CommandError
from fastps.commands.kit.children import Child, end
from fastps_lab.repro.fleet.arms import PATIENT, Arm, Look
from fastps_lab.repro.fleet.trace import Life, machine_seconds
from fastps_lab.repro.fleet.worker import READY, Job
from fastps_lab.repro.local_steps import Problem

__all__ = ["play"]

#: Seconds between two looks at what the fleet has reached.
LOOK = 1.0
#: Seconds from when all have imported what they need to the begin of the trace.
SOON = 0.5


def play(
    task: Problem,
    make: Callable[[Problem, Path], Arm],
    lives: list[Life],
    seconds: float,
    quick: bool,
    seed: int,
    look_every: float = LOOK,
) -> list[tuple[float, float, Look]]:
    """Trains with a fleet for so many seconds of its trace.

    Returns:
        Seconds of the trace, machine-seconds until then, and the look; none before there is something.
    """
    found: list[tuple[float, float, Look]] = []
    with tempfile.TemporaryDirectory(prefix="fastps-repro-") as folder, ExitStack() as stack:
        arm, running = stack.enter_context(make(task, Path(folder))), dict[int, Child]()
        stack.callback(lambda: end(list(running.values()), 0.0))
        clock, waiting = Path(folder) / "clock", list(enumerate(lives))

        def start(until: float) -> None:
            """Starts the processes of the machines that are there by then."""
            for k, life in [one for one in waiting if one[1].start <= until]:
                waiting.remove((k, life))
                job = Job("", ("", {}), life.machine, life.paces, str(clock), quick, 100 * seed + k)
                running[k] = arm.start(job, Path(folder) / f"worker-{k}.log")

        prepare = -time.monotonic()
        start(0.0)
        for child in running.values():
            _wait_until_ready(child)
        began, looked = time.monotonic() + SOON, 0
        prepare += began
        clock.with_suffix(".new").write_text(str(began))
        clock.with_suffix(".new").rename(clock)
        while (now := time.monotonic() - began) < seconds:
            start(now + prepare)
            for k, child in list(running.items()):
                if lives[k].end <= now:
                    running.pop(k).kill()
                elif child.process.poll() is not None:
                    raise CommandError(f"machine {lives[k].machine} has ended: {child.last_words()}")
            if now >= look_every * looked:
                looked += 1
                if (look := arm.look()) is not None:
                    found.append((now, machine_seconds(lives, now), look))
            time.sleep(0.01)
        if (look := arm.look()) is not None:
            found.append((seconds, machine_seconds(lives, seconds), look))
    return found


def _wait_until_ready(child: Child) -> None:
    """Waits until a process has imported what it needs."""
    end = time.monotonic() + PATIENT
    while child.read_line(0.05) != READY:
        if time.monotonic() > end or child.process.poll() is not None:
            raise CommandError(f"a machine does not start: {child.last_words()}")
