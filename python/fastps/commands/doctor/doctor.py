"""``fastps doctor``: is this machine fit, how fast are its parts, and what about it would surprise?

It takes about ten seconds: short looks that find what is wrong by a factor, not benchmarks.
"""

from __future__ import annotations

import argparse
import json
import os
import textwrap
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fastps import _fastps
from fastps._shared.process import EXIT_FAILED, EXIT_OK
from fastps.commands.doctor import _machine, _measure
from fastps.commands.doctor._advice import about_litmus, about_machine, about_speed, size_text
from fastps.commands.doctor._machine import Machine
from fastps.commands.doctor._measure import GIB, MIB, Measured, Trial
from fastps.errors import ConfigError


@dataclass(frozen=True)
class Report:
    """Findings of ``fastps doctor``."""

    #: Instruction set in use; None: `FASTPS_ISA` names one that the CPU lacks.
    isa: str | None
    isas: list[str]
    options: dict[str, str]
    litmus: list[Trial]
    measured: Measured
    machine: Machine
    warnings: list[str]

    @property
    def torn(self) -> int:
        """Torn lanes of all trials: there must be none."""
        return sum(trial.torn for trial in self.litmus)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``fastps doctor``."""
    parser.add_argument(
        "--quick", action="store_true", help="measure for 3 seconds instead of 10, less exactly"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def execute(args: argparse.Namespace) -> int:
    """Print what was found; the exit code."""
    report = examine(quick=args.quick)
    print(json.dumps(as_json(report)) if args.json else "\n".join(as_text(report)))
    return EXIT_FAILED if report.torn else EXIT_OK


def examine(*, quick: bool = False, root: Path = Path("/")) -> Report:
    """Measures and looks around; `root` holds the `proc` and `sys` to read."""
    try:
        isa, isa_problem = _fastps.instruction_set(), []
    except ConfigError as error:
        isa, isa_problem = None, [f"{error}: nothing of fastps works until it is unset or right"]
    machine = _machine.examine(root)
    litmus = _measure.litmus(0.25 if quick else 1.0)
    measured = measure(machine, 0.25 if quick else 0.8)
    return Report(
        isa=isa,
        isas=_fastps.instruction_sets(),
        options={name: os.environ[name] for name in sorted(os.environ) if name.startswith("FASTPS_")},
        litmus=litmus,
        measured=measured,
        machine=machine,
        warnings=[*isa_problem, *about_litmus(litmus), *about_machine(machine), *about_speed(measured)],
    )


def measure(machine: Machine, seconds: float) -> Measured:
    """Takes about 6 times `seconds`."""
    cores = machine.cores_usable or 1
    size = _copy_size(machine, cores)
    return Measured(
        copy_one_thread_gb_s=_measure.copy_bandwidth(1, size, seconds),
        copy_all_cores_gb_s=_measure.copy_bandwidth(cores, size, seconds),
        first_touch_us_per_page=_measure.first_touch(seconds / 2),
        wakeup_us=_measure.wakeup(seconds),
        tcp_round_trip_us=_measure.tcp_round_trip(seconds),
        tcp_gb_s=_measure.tcp_throughput(seconds),
    )


def _copy_size(machine: Machine, cores: int) -> int:
    """Bytes of each array: more than the caches hold, and at most an eighth of what memory there is."""
    known = (machine.memory_available, machine.cgroup_memory)
    there = min((size for size in known if size), default=GIB)
    return max(MIB, min(max(128 * MIB, cores * 16 * MIB), there // 8))


def as_json(report: Report) -> dict[str, Any]:
    """The object that ``--json`` prints: null where something is unknown."""
    return {"ok": not report.torn, "torn": report.torn, "version": _fastps.__version__, **asdict(report)}


def as_text(report: Report) -> Iterator[str]:
    """The lines that people read."""
    yield f"fastps {_fastps.__version__}"
    yield from _section("instruction set", {"in use": report.isa, "available": ", ".join(report.isas)})
    if report.options:
        yield from _section("options", report.options)
    yield from _section("tearing litmus", dict(_litmus_rows(report)))
    yield from _section("measured", _measured_rows(report.measured))
    yield from _section("machine", _machine_rows(report.machine))
    for warning in report.warnings:
        yield textwrap.fill(f"warning: {warning}", 100, subsequent_indent="  ", break_long_words=False)
    if not report.warnings:
        yield "nothing to complain of"
    elif report.torn:
        yield "FAILED: torn lanes"


def _litmus_rows(report: Report) -> Iterator[tuple[str, str]]:
    for isa in report.isas:
        for trial in (trial for trial in report.litmus if trial.isa == isa):
            place = (
                f"{isa}, {trial.shift_bytes} bytes past a line" if trial.shift_bytes else f"{isa}, aligned"
            )
            yield place, f"{trial.torn} torn lanes in {trial.loads:,} loads, {trial.mixed:,} of them mixed"


def _measured_rows(measured: Measured) -> dict[str, object]:
    def row(value: float | None, unit: str) -> str | None:
        return None if value is None else f"{value:.3g} {unit}"

    return {
        "copy, one thread": row(measured.copy_one_thread_gb_s, "GB/s"),
        "copy, all usable cores": row(measured.copy_all_cores_gb_s, "GB/s"),
        "first touch of memory": row(measured.first_touch_us_per_page, "us per page of 4 KiB"),
        "wake-up through a pipe": row(measured.wakeup_us, "us"),
        "TCP round trip of 4 KiB": row(measured.tcp_round_trip_us, "us"),
        "TCP throughput": row(measured.tcp_gb_s, "GB/s"),
    }


def _machine_rows(machine: Machine) -> dict[str, object]:
    quota, limit = machine.cgroup_cpus, machine.cgroup_memory
    return {
        "CPU": machine.cpu_model,
        "architecture": machine.architecture,
        "cores usable, present": f"{_known(machine.cores_usable)}, {_known(machine.cores_present)}",
        "cgroup CPU quota": "none" if quota is None else f"{quota:.3g} CPUs",
        "cgroup memory limit": "none" if limit is None else size_text(limit),
        "memory free, total": f"{size_text(machine.memory_available)}, {size_text(machine.memory_total)}",
        "swap used, total": f"{size_text(machine.swap_used)}, {size_text(machine.swap_total)}",
        "transparent huge pages": machine.transparent_huge_pages,
        "clock source": machine.clock_source,
        "load average": machine.load_average,
        "open files": machine.open_files,
    }


def _section(title: str, rows: dict[str, Any]) -> Iterator[str]:
    yield f"{title}:"
    for name, value in rows.items():
        yield f"  {name + ':':<34} {_known(value)}"


def _known(value: object) -> str:
    return "unknown" if value is None else str(value)
