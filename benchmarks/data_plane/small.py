"""4 KB steps, where only wake-ups matter: with both ends spinning, and with neither."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from harness import Runner, Step, Turns, readable, runner, settled, table
from processes import Reference, server_process

import fastps

SIZE = 4 << 10
WAYS = {"TCP": "tcp", "Unix": "unix", "shared memory": "shm"}
SPIN_US = {"spinning": 200, "sleeping": 0}


def step(ps: fastps.ParameterServer, name: str, size: int, optimizer: fastps.Optimizer | None = None) -> Step:
    """Push a gradient of `size` bytes and pull the values."""
    ps.register(name, np.zeros(size // 4, np.float32), optimizer=optimizer or fastps.SGD(lr=0.01))
    grads, out = {name: np.full(size // 4, 1e-3, np.float32)}, {name: np.zeros(size // 4, np.float32)}
    return lambda: ps.push_pull(grads, out=out)


def _references(folder: Path, stack: ExitStack) -> dict[str, Runner]:
    made = {
        "TCP spinning": Reference.sockets(folder, SIZE, "spin"),
        "TCP sleeping": Reference.sockets(folder, SIZE),
        "Unix spinning": Reference.sockets(folder, SIZE, "unix", "spin"),
        "Unix sleeping": Reference.sockets(folder, SIZE, "unix"),
        "shared memory spinning": Reference.memory(folder, SIZE),
        "shared memory sleeping": Reference.memory(folder, SIZE, "sleep"),
    }
    for reference in made.values():
        stack.callback(reference.close)
    return {f"raw {name}": reference.runner(SIZE) for name, reference in made.items()}


def small(quick: bool) -> list[str]:
    """The table."""
    with ExitStack() as stack:
        # A sleeping client has its own server, so that spinning clients do not affect it.
        runners: dict[str, Runner] = {}
        for mood, spin_us in SPIN_US.items():
            address = stack.enter_context(server_process(spin_us=spin_us))
            for name, transport in WAYS.items():
                ps = fastps.connect(address, check_finite=False, transport=transport, spin_us=spin_us)
                runners[f"{name} {mood}"] = runner(step(stack.enter_context(ps), name, SIZE))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        runners |= _references(folder, stack)
        runners = {name: settled(run) for name, run in runners.items()}
        turns = Turns(runners, rounds=5 if quick else 40, seconds_per_turn=0.02)

    def row(way: str) -> list[str]:
        cells = [way]
        for mood in SPIN_US:
            ours, theirs = f"{way} {mood}", f"raw {way} {mood}"
            cells += [
                readable(turns.time(theirs)),
                f"{readable(turns.time(ours))} ({turns.ratio(ours, theirs):.2f})",
            ]
        return cells

    columns = ["4 KB over", "raw, spinning", "push_pull, spinning", "raw, sleeping", "push_pull, sleeping"]
    return table(columns, map(row, WAYS))
