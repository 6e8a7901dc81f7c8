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

from fastps import _fastps, _machine, _measure
from fastps._machine import Machine
from fastps._measure import MIB, Trial
from fastps._process import EXIT_FAILED, EXIT_OK
from fastps.errors import ConfigError

GIB = 2**30
CLOCKS = {"tsc", "arch_sys_counter", "kvm-clock", "hyperv_clocksource_tsc_page"}
"""Clock sources that are read without a system call; the last two are the TSC of a virtual machine."""

TORN = (
    'a value of a tensor with apply="hogwild" can become a number that nobody wrote. Use apply="exact", '
    "or set FASTPS_ISA to an instruction set whose lanes do not tear, and report which CPU this is"
)


@dataclass(frozen=True)
class Measured:
    """None: it could not be measured."""

    copy_one_thread_gb_s: float | None
    copy_all_cores_gb_s: float | None
    first_touch_us_per_page: float | None
    wakeup_us: float | None
    tcp_round_trip_us: float | None
    tcp_gb_s: float | None


@dataclass(frozen=True)
class Report:
    """All that ``fastps doctor`` found."""

    isa: str | None
    """In use; None: `FASTPS_ISA` asks for one that is not there."""
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
    parser.add_argument("--quick", action="store_true", help="take 3 seconds instead of 10, less exactly")
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


def about_litmus(trials: list[Trial]) -> Iterator[str]:
    """What is wrong with the lanes, or with the trial."""
    torn = {trial.isa: None for trial in trials if trial.torn}
    raced = {trial.isa for trial in trials if trial.mixed}
    calm = {trial.isa: None for trial in trials if trial.isa not in raced | set(torn)}
    if torn:
        yield f"torn lanes with {', '.join(torn)}: {TORN}"
    if calm:
        yield (
            f"the litmus saw no two stores meet with {', '.join(calm)}, so it proves little there: "
            "give the process three cores, and run it again when the machine is idle"
        )


def about_machine(machine: Machine) -> Iterator[str]:
    """What would surprise, each with what to do."""
    yield from _about_cores(machine)
    yield from _about_memory(machine)
    clock = machine.clock_source
    if clock and clock not in CLOCKS:
        yield (
            f"clock source {clock}: each look at the clock is a system call. Boot with tsc=reliable if "
            "the CPU's counter can be trusted, or choose another kind of virtual machine"
        )
    if machine.open_files is not None and machine.open_files < 1024:
        yield (
            f"{machine.open_files} open files allowed: a server needs one per connection. "
            "Raise it: ulimit -n 65536, or LimitNOFILE= of the service, or --ulimit nofile= of the container"
        )


def _about_cores(machine: Machine) -> Iterator[str]:
    present, usable, quota = machine.cores_present, machine.cores_usable, machine.cgroup_cpus
    if usable and present and usable < present:
        yield (
            f"{usable} of {present} cores usable (taskset, cpuset or container): "
            f"start at most {usable} shards and workers here, or allow more cores"
        )
    if usable and quota and quota < usable:
        yield (
            f"the cgroup allows {quota:.3g} CPUs of {usable} usable cores: threads beyond that are stopped for "
            f"parts of each period. Start at most {max(1, int(quota))} shards and workers here, "
            "or raise the quota"
        )
    if usable and machine.load_average is not None and machine.load_average > usable:
        yield (
            f"load average {machine.load_average:.3g} on {usable} usable cores: others use this machine, "
            "and what was measured is too low. Run fastps doctor again when it is idle"
        )


def _about_memory(machine: Machine) -> Iterator[str]:
    limit, total, free = machine.cgroup_memory, machine.memory_total, machine.memory_available
    if limit and (total is None or limit < total):
        share = _size(limit * 8 // 10).replace(" ", "")
        yield (
            f"cgroup memory limit {_size(limit)}: a process that takes more is killed. "
            f"Set --memory-limit: {share} for all servers here together leaves room for the rest"
        )
    if free is not None and free < GIB:
        yield f"{_size(free)} of memory free: end other programs, or set --memory-limit below that"
    if machine.swap_used and machine.swap_used > 64 * MIB:
        yield (
            f"{_size(machine.swap_used)} are swapped out: a push to swapped parameters waits for the disk. "
            "Use less memory (--memory-limit), or turn swap off"
        )
    if machine.transparent_huge_pages == "never":
        yield (
            "transparent huge pages are off: large tensors cost more at first touch and in every pass. "
            "Write madvise to /sys/kernel/mm/transparent_hugepage/enabled"
        )


def about_speed(measured: Measured) -> Iterator[str]:
    """What is slower than it is on any sound machine."""
    missing = [name for name, value in asdict(measured).items() if value is None]
    if missing:
        yield f"not measured: {', '.join(missing)}. Are processes, memory and loopback allowed here?"
    touch, wakeup, tcp = measured.first_touch_us_per_page, measured.wakeup_us, measured.tcp_round_trip_us
    if touch and touch > 2:
        yield (
            f"{touch:.2g} us for each fresh page of memory, where 0.1 to 1 is usual: registering large tensors "
            "is slow. Make arrays once and reuse them (pull with out=)"
        )
    if wakeup and wakeup > 100:
        yield (
            f"{wakeup:.0f} us to wake a sleeping process, where 5 to 50 is usual: small pushes are slow. "
            "Is the machine busy, or does it save power? Push more tensors per call, or use push_async"
        )
    if tcp and tcp > 500:
        yield (
            f"{tcp:.0f} us for a round trip over loopback, where 20 to 100 is usual: "
            "is there a firewall or a proxy in its way, or is the machine busy?"
        )


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
        "cgroup memory limit": "none" if limit is None else _size(limit),
        "memory free, total": f"{_size(machine.memory_available)}, {_size(machine.memory_total)}",
        "swap used, total": f"{_size(machine.swap_used)}, {_size(machine.swap_total)}",
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


def _size(size: int | None) -> str:
    """As ``--memory-limit`` takes it, but for the space."""
    if size is None:
        return "unknown"
    for unit, factor in (("GiB", GIB), ("MiB", MIB)):
        if size >= factor:
            return f"{size / factor:.1f}".removesuffix(".0") + f" {unit}"
    return f"{size / 1024:.0f} KiB"
