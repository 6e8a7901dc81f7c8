"""Processes that train one torch model in `fastps.Store(shared=True)`, against torch's `share_memory_()`."""

from __future__ import annotations

from cores.counts import up_to_cores
from device.row import Figures, Row, Setting
from harness import table

PROCESSES, SMALL_PROCESSES = (1, 4, 12), (2,)


def measure(setting: Setting) -> Figures:
    """Samples a second, worst accuracies, and lost updates; the two ways alternate."""
    import shared_store

    counts = SMALL_PROCESSES if setting.small else up_to_cores(PROCESSES, setting)
    rows = []
    for turn, processes in enumerate(counts):
        found = {}
        for way in shared_store.WAYS if turn % 2 else reversed(shared_store.WAYS):
            found[way] = shared_store.measure(way, processes, 0.2 if setting.small else 1.0)
        (theirs, their_accuracy, _), (ours, accuracy, lost) = found["torch"], found["fastps"]
        row = {"processes": processes, "torch": theirs, "fastps": ours, "lost": lost}
        rows.append({**row, "torch accuracy": their_accuracy, "fastps accuracy": accuracy})
    return {"rows": rows}


def show(figures: Figures) -> list[str]:
    """The table."""
    first = figures["rows"][0]

    def row(one: Figures) -> list[str]:
        cells = [str(one["processes"])]
        for way in ("torch", "fastps"):
            cells += [f"{one[way] / 1e3:.0f} k", f"{one[way] / first[way]:.2f}"]
        cells.append(f"{one['fastps'] / one['torch']:.2f}")
        accuracies = [f"{100 * one[f'{way} accuracy']:.1f} %" for way in ("torch", "fastps")]
        return [*cells, " / ".join(accuracies), f"{100 * one['lost']:.2f} %"]

    to = f"to {first['processes']}"
    columns = ["processes", "torch, samples/s", to, "fastps, samples/s", to, "fastps / torch"]
    return table([*columns, "test accuracy, torch / fastps", "updates lost"], map(row, figures["rows"]))


ROWS = [Row("processes that share a store", measure, show, limit=120)]
