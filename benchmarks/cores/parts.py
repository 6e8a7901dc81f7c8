"""Models in 1 to 8 parts with one thread each, against one part with one thread and with as many threads."""

from __future__ import annotations

import statistics
from contextlib import ExitStack

from cores.counts import up_to_cores
from device.row import Figures, Row, Setting
from harness import table

PARTS = (1, 2, 4, 8)
#: The net of `benchmarks/parallel.py`, its batch, and its micro-batches if it has several parts. A pipeline
#: of 8 parts and 16 micro-batches can be 5.6 times as fast as one part.
NETS = {
    "convolutional, by rows": ("rows", 128, 1),
    "8 layers of 1,024, by layers": ("deep", 256, 16),
}
SMALL_NETS = {net: (kind, 8, min(2, micro_batches)) for net, (kind, _, micro_batches) in NETS.items()}


def measure(setting: Setting) -> Figures:
    """Samples a second, and ratios of alternating runs."""
    import parallel

    counts = up_to_cores(PARTS, setting)
    rounds, seconds = (1, 0.1) if setting.small else (2, 0.3)
    with ExitStack() as stack:
        ways = {f"{n} threads": stack.enter_context(parallel.Processes(1, n)) for n in counts}
        ways |= {f"{n} parts": stack.enter_context(parallel.Processes(n)) for n in counts if n > 1}
        nets = []
        for net, (kind, batch, micro_batches) in (SMALL_NETS if setting.small else NETS).items():
            times: dict[str, list[float]] = {way: [] for way in ways}
            for _ in range(rounds):
                for way, processes in ways.items():
                    pieces = micro_batches if way.endswith("parts") else 1
                    times[way].append(processes.do("steps", kind, batch, pieces, seconds))
            # One part with one thread is both.
            times["1 parts"] = times["1 threads"]
            speeds = {way: batch / statistics.median(found) for way, found in times.items()}
            to_one = {way: parallel.ratios(times, way, "1 threads") for way in times}
            nets.append({"net": net, "batch": batch, "speeds": speeds, "to one": to_one})
    return {"counts": counts, "nets": nets}


def show(figures: Figures) -> list[str]:
    """The table."""
    rows = []
    for one in figures["nets"]:
        for count in figures["counts"]:
            cells = [f"{one['net']}, batches of {one['batch']}", str(count)]
            for way in (f"{count} parts", f"{count} threads"):
                cells += [f"{one['speeds'][way]:,.0f}", f"{one['to one'][way]:.2f}"]
            rows.append(cells)
    columns = ["net", "n", "n parts, samples/s", "to 1", "1 part, n threads, samples/s", "to 1"]
    return table(columns, rows)


ROWS = [Row("a model in parts", measure, show, limit=120)]
