"""Makes `page/essay/recorded.js`: what the essay replays where it cannot run the thing itself.

``python lab/tests/live/recordings.py`` in the repository: a run of `fastps-lab live` in which a worker and a
server are killed, and conjugate gradients from 64 starts.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

import fastps
from fastps.optimize import CG, StrongWolfe, minimize
from fastps_lab.live.export import PAGE
from fastps_lab.live.problems import PLANES, Plane
from live.visits import Served

#: Seconds of the run at which something is killed, and at which it ends.
KILLS = {6.0: ("kill", 1), 12.0: ("kill_server", 0)}
END = 18.0
#: What the essay sets, too.
SETTINGS = {"problem": "digits", "workers": 4, "optimizer": "adagrad", "lr": 0.05, "mode": "async"}


def real_run() -> dict[str, Any]:
    """Points of (seconds, updates, loss), messages and the ledger at the end."""
    with tempfile.TemporaryDirectory() as folder:
        served = Served(Path(folder), "--workers", "4")
        try:
            with served.listen() as frame:
                served.take_controls(frame)
                served.call("POST", "/set", SETTINGS)
                return watched(served, frame)
        finally:
            served.close()


def watched(served: Served, frame: Any) -> dict[str, Any]:
    points: list[list[float]] = []
    messages: list[Any] = []
    due = dict(KILLS)
    began, now = None, frame()
    while began is None or now["state"]["time"] - began < END:
        now = frame()
        state = now["state"]
        if now["settings"]["problem"] != "digits":
            continue
        running = sum(worker["state"] == "running" for worker in now["workers"])
        if began is None and running < 4:
            continue
        if began is None:
            began = state["time"]
            before = state["pushes"], state["updates"]
        at = round(state["time"] - began, 2)
        if not points or points[-1][1] != state["updates"] - before[1]:
            loss = None if state["loss"] is None else round(state["loss"], 4)
            points.append([at, state["updates"] - before[1], loss])
        messages += [[round(m[1] - began, 2), *m[2:]] for m in now["messages"] if m[1] >= began]
        for second in [second for second in due if second <= at]:
            what, number = due.pop(second)
            served.call("POST", "/act", {"what": what, "number": number})
    return {
        "points": points,
        "messages": messages,
        "pushes": state["pushes"] - before[0],
        "lost": state["lost"],
    }


def conjugate_gradients(name: str, x: tuple[float, float], y: tuple[float, float]) -> list[Any]:
    """Points and losses from 8 by 8 starts."""
    starts = [(float(a), float(b)) for a in np.linspace(*x, 8) for b in np.linspace(*y, 8)]
    return [descent(PLANES[name], start) for start in starts]


def descent(plane: Plane, start: tuple[float, float]) -> dict[str, Any]:
    points: list[list[float]] = []
    losses: list[float] = []

    def objective(params: Any, indices: Any) -> tuple[float, Any]:
        at, count = plane.position(params), len(indices)
        return count * plane.value(*at), {"w": count * np.array(plane.slope(*at))}

    def note(result: Any) -> None:
        points.append([round(float(one), 4) for one in store.pull("w")])
        losses.append(float(f"{result.fun:.4g}"))

    with fastps.Store() as store:
        store.register("w", np.array(start), fastps.SGD(lr=1.0))
        search = StrongWolfe(c2=0.1)
        minimize(
            store,
            ["w"],
            objective,
            samples=2,
            portions=1,
            method=CG(),
            line_search=search,
            max_iterations=60,
            callback=note,
        )
    return {"points": points, "losses": losses}


def main() -> None:
    starts = {name: conjugate_gradients(name, (-1.9, 1.9), (-0.9, 2.9)) for name in ("beale", "rosenbrock")}
    text = [
        "// Made by lab/tests/live/recordings.py.\n",
        f"export const RECORDED = {json.dumps(starts, separators=(',', ':'))};\n",
        f"export const REAL = {json.dumps(real_run(), separators=(',', ':'))};",
    ]
    (PAGE / "essay/recorded.js").write_text("\n".join(text) + "\n")


if __name__ == "__main__":
    main()
