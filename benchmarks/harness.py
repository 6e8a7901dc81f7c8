"""Shared parts of the benchmarks: C references, alternating rounds, medians, tables, machine description."""

from __future__ import annotations

import datetime
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

import fastps

REFERENCE = Path(__file__).resolve().parent / "reference"

Step = Callable[[], object]
# How often -> nanoseconds of each repetition.
Runner = Callable[[int], list[int]]


def compile_c(target: Path, sources: Iterable[str], *flags: str) -> Path:
    """Compiles files of `reference/` with the system's C compiler for this machine."""
    files = [REFERENCE / source for source in sources]
    subprocess.run(
        ["cc", "-std=gnu11", "-O3", "-march=native", *flags, "-o", target, *files, "-lm"], check=True
    )
    return target


def timed(step: Step) -> int:
    """Nanoseconds of one step."""
    start = time.perf_counter_ns()
    step()
    return time.perf_counter_ns() - start


def runner(step: Step) -> Runner:
    """Repeats a step of Python."""
    return lambda repetitions: [timed(step) for _ in range(repetitions)]


def settled(run: Runner, repetitions: int = 20, seconds: float = 0.015) -> Runner:
    """Repeats for a moment before it counts: until the scheduler has given each process a core."""

    def after_a_moment(counted: int) -> list[int]:
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            run(repetitions)
        return run(counted)

    return after_a_moment


class Turns:
    """Times of several variants, round by round."""

    def __init__(self, runners: dict[str, Runner], rounds: int, seconds_per_turn: float) -> None:
        """All variants take turns, so that whatever else happens on the machine happens to all of them.

        A turn begins with a repetition that is not counted, because it brings the variant's data into the
        cache; but not where one repetition fills a turn.
        """
        counts, uncounted = {}, {}
        for name, run in runners.items():
            first = run(1)[0]
            fit = int(seconds_per_turn * 1e9 / max(1, min(first, *run(2)) if first < 1e8 else first))
            counts[name], uncounted[name] = max(1, min(200, fit)), int(fit > 0)
        self._medians: dict[str, list[float]] = {name: [] for name in runners}
        names = list(runners)
        for turn in range(rounds):
            shift = turn % len(names)
            for name in names[shift:] + names[:shift]:
                samples = runners[name](uncounted[name] + counts[name])
                self._medians[name].append(statistics.median(samples[uncounted[name] :]))

    def __contains__(self, name: str) -> bool:
        return name in self._medians

    def time(self, name: str) -> float:
        """Nanoseconds of one repetition."""
        return statistics.median(self._medians[name])

    def ratio(self, name: str, reference: str) -> float:
        """How many times as long as the reference: the median of the rounds' ratios."""
        pairs = zip(self._medians[name], self._medians[reference], strict=True)
        return statistics.median(ours / theirs for ours, theirs in pairs)


def readable(nanoseconds: float) -> str:
    """Three digits, in us or ms."""
    value, unit = (nanoseconds / 1e3, "us") if nanoseconds < 1e6 else (nanoseconds / 1e6, "ms")
    return f"{value:.{max(0, 2 - len(str(int(value))) + 1)}f} {unit}"


def size_name(size: int) -> str:
    """`65536` -> `64 KB`."""
    return f"{size >> 20} MB" if size >= 1 << 20 else f"{size >> 10} KB"


def table(columns: list[str], rows: Iterable[list[str]]) -> list[str]:
    """A table of Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    return ["| " + " | ".join(cells) + " |" for cells in lines]


def machine() -> list[str]:
    """Facts that the figures depend on."""
    facts = Path("/proc/cpuinfo").read_text() if sys.platform == "linux" else ""
    cpu = dict(line.split(":", 1) for line in facts.split("\n\n")[0].splitlines() if ":" in line)
    cpu = {key.strip(): value.strip() for key, value in cpu.items()}
    flags = set(cpu.get("flags", "").split())
    simd = next((isa for isa in ("avx512f", "avx2", "asimd") if isa in flags), "unknown")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    compiler = subprocess.run(["cc", "--version"], capture_output=True, text=True, check=True).stdout
    model = cpu.get("model name", platform.processor() or platform.machine())
    family = f"family {cpu.get('cpu family', '?')} model {cpu.get('model', '?')}"
    hypervisor = ", virtual machine" if "hypervisor" in flags else ""
    cpus, load = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    busy = " (**busy with other work: the figures say little, repeat them**)" if load > cpus / 2 else ""
    return [
        f"- {cpus} CPUs, {model} ({family}, {simd}{hypervisor}), {memory:.0f} GiB",
        f"- {platform.system()} {platform.release()}, Python {platform.python_version()}, "
        f"NumPy {np.__version__}, {compiler.splitlines()[0]}, fastps {fastps.__version__}",
        f"- {datetime.date.today()}, load average at the start {load:.2f}{busy}",
    ]


#: Columns of a figure's goal, which the scripts print and the document leaves out.
GOALS = {"asked", "reached", "target"}


def without_goals(lines: Iterable[str]) -> list[str]:
    """Leaves the columns of goals out of tables."""
    shown: list[str] = []
    kept: list[int] = []
    for line in lines:
        if not line.startswith("| "):
            kept = []
            shown.append(line)
            continue
        cells = line[2:-2].split(" | ")
        kept = kept or [k for k, cell in enumerate(cells) if cell not in GOALS]
        shown.append("| " + " | ".join(cells[k] for k in kept) + " |")
    return shown


def write_between_markers(path: Path, section: str, lines: list[str]) -> None:
    """Replaces the text between the markers of this section; each section belongs to one suite."""
    begin, end = f"<!-- {section}: begin -->", f"<!-- {section}: end -->"
    text = path.read_text()
    before, rest = text.split(begin)
    _, after = rest.split(end)
    path.write_text("\n".join([before + begin, *without_goals(lines), end + after]))
