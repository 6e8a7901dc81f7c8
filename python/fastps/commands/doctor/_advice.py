"""Findings of `fastps doctor` that may surprise, in plain words, each with what to do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict

from fastps.commands.doctor._machine import Machine
from fastps.commands.doctor._measure import GIB, MIB, Measured, Trial

#: Clock sources that are read without a system call; the last two are the TSC of a virtual machine.
CLOCKS = {"tsc", "arch_sys_counter", "kvm-clock", "hyperv_clocksource_tsc_page"}

TORN = (
    'a value of a tensor with apply="hogwild" can become a number that was never written. Use apply="exact", '
    "or set FASTPS_ISA to an instruction set whose lanes do not tear, and report which CPU this is"
)


def about_litmus(trials: Sequence[Trial]) -> Iterator[str]:
    """Problems of the lanes, or of the trial."""
    torn = {trial.isa: None for trial in trials if trial.torn}
    raced = {trial.isa for trial in trials if trial.mixed}
    calm = {trial.isa: None for trial in trials if trial.isa not in raced | set(torn)}
    if torn:
        yield f"torn lanes with {', '.join(torn)}: {TORN}"
    if calm:
        yield (
            f"the litmus test saw no two stores meet with {', '.join(calm)}, so it proves little there: "
            "give the process three cores, and run it again when the machine is idle"
        )


def about_machine(machine: Machine) -> Iterator[str]:
    """Properties of the machine that may surprise, each with what to do."""
    yield from _about_cores(machine)
    yield from _about_memory(machine)
    clock = machine.clock_source
    if clock and clock not in CLOCKS:
        yield (
            f"clock source {clock}: reading the clock takes a system call. Boot with tsc=reliable if "
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
            f"the cgroup allows {quota:.3g} CPUs of {usable} usable cores: more threads than that are "
            f"throttled. Start at most {max(1, int(quota))} shards and workers here, "
            "or raise the quota"
        )
    if usable and machine.load_average is not None and machine.load_average > usable:
        yield (
            f"load average {machine.load_average:.3g} on {usable} usable cores: the machine is busy, "
            "so the measured speeds are too low. Run fastps doctor again when it is idle"
        )


def _about_memory(machine: Machine) -> Iterator[str]:
    limit, total, free = machine.cgroup_memory, machine.memory_total, machine.memory_available
    if limit and (total is None or limit < total):
        share = size_text(limit * 8 // 10).replace(" ", "")
        yield (
            f"cgroup memory limit {size_text(limit)}: a process that takes more is killed. "
            f"--memory-limit {share} for all servers here together leaves room for the rest"
        )
    if free is not None and free < GIB:
        yield f"{size_text(free)} of memory free: end other programs, or set --memory-limit below that"
    if machine.swap_used and machine.swap_used > 64 * MIB:
        yield (
            f"{size_text(machine.swap_used)} are swapped out: a push to swapped parameters waits for "
            "the disk. Use less memory (--memory-limit), or turn swap off"
        )
    if machine.transparent_huge_pages == "never":
        yield (
            "transparent huge pages are off: large tensors cost more at first touch and in every pass. "
            "Write madvise to /sys/kernel/mm/transparent_hugepage/enabled"
        )


def about_speed(measured: Measured) -> Iterator[str]:
    """Measurements that are slower than on a healthy machine."""
    missing = [name for name, value in asdict(measured).items() if value is None]
    if missing:
        yield f"not measured: {', '.join(missing)}. Are processes, memory and loopback allowed here?"
    touch, wakeup, tcp = measured.first_touch_us_per_page, measured.wakeup_us, measured.tcp_round_trip_us
    if touch and touch > 2:
        yield (
            f"{touch:.2g} us for each fresh page of memory (more than 2 is slow): registering large "
            "tensors takes long. Allocate arrays once and reuse them (pull with out=)"
        )
    if wakeup and wakeup > 100:
        yield (
            f"{wakeup:.0f} us to wake a sleeping process (more than 100 is slow): small pushes take long. "
            "Is the machine busy, or does it save power? Push more tensors per call, or use push_async"
        )
    if tcp and tcp > 500:
        yield (
            f"{tcp:.0f} us for a round trip over loopback (more than 500 is slow): "
            "a firewall or a proxy may be in between, or the machine may be busy"
        )


def size_text(size: int | None) -> str:
    """Formats a size like ``--memory-limit``, with a space."""
    if size is None:
        return "unknown"
    for unit, factor in (("GiB", GIB), ("MiB", MIB)):
        if size >= factor:
            return f"{size / factor:.1f}".removesuffix(".0") + f" {unit}"
    return f"{size / 1024:.0f} KiB"
