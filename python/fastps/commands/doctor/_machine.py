"""Description of the machine from `/proc`, `/sys` and cgroups; None: not given by the operating system."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

#: cgroup v1 writes "no limit" as a number near 2**63.
UNLIMITED = 2**60


@dataclass(frozen=True)
class Machine:
    """Sizes are in bytes."""

    cpu_model: str | None
    architecture: str
    cores_present: int | None
    cores_usable: int | None
    #: CPUs that the quota is worth; None: no quota.
    cgroup_cpus: float | None
    #: None: no limit.
    cgroup_memory: int | None
    memory_total: int | None
    memory_available: int | None
    swap_total: int | None
    swap_used: int | None
    transparent_huge_pages: str | None
    clock_source: str | None
    #: Mean of the last minute.
    load_average: float | None
    #: The soft limit of file descriptors (`ulimit -n`); None also where there is no limit.
    open_files: int | None


def examine(root: Path = Path("/")) -> Machine:
    """Reads the machine's description below `root`, which tests replace."""
    memory = _meminfo(root)
    swap_total, swap_free = memory.get("SwapTotal"), memory.get("SwapFree")
    load = _read(root / "proc/loadavg").split()
    return Machine(
        cpu_model=_cpu_model(root),
        architecture=platform.machine(),
        cores_present=_cores_present(root),
        cores_usable=_cores_usable(),
        cgroup_cpus=min(_cgroup_cpus(root), default=None),
        cgroup_memory=min(_cgroup_memory(root), default=None),
        memory_total=memory.get("MemTotal"),
        memory_available=memory.get("MemAvailable"),
        swap_total=swap_total,
        swap_used=None if swap_total is None or swap_free is None else swap_total - swap_free,
        transparent_huge_pages=_bracketed(_read(root / "sys/kernel/mm/transparent_hugepage/enabled")),
        clock_source=_read(root / "sys/devices/system/clocksource/clocksource0/current_clocksource") or None,
        load_average=_number(load[0]) if load else None,
        open_files=_open_files(),
    )


def _read(path: Path) -> str:
    """A file's text without the line end; empty if there is none or it cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _cpu_model(root: Path) -> str | None:
    for line in _read(root / "proc/cpuinfo").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return None  # AArch64 has no such line


def _cores_present(root: Path) -> int | None:
    """Counts a list such as ``0-3,8-11``."""
    cores = 0
    for part in _read(root / "sys/devices/system/cpu/online").split(","):
        first, _, last = part.partition("-")
        low, high = _number(first), _number(last or first)
        if low is None or high is None:
            return os.cpu_count()
        cores += int(high) - int(low) + 1
    return cores


def _cores_usable() -> int | None:
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else None


def _meminfo(root: Path) -> dict[str, int]:
    sizes = {}
    for line in _read(root / "proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        words = value.split()
        if words and words[0].isdigit():
            sizes[name] = int(words[0]) * 1024
    return sizes


def _cgroup_folders(root: Path, controller: str) -> Iterator[Path]:
    """Yields the folders that may limit this process: its groups of v1 or v2 and all groups around them."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        fields = line.split(":", 2)
        if len(fields) != 3:
            continue
        if not fields[1]:
            mounts = ["", "unified"]  # v2, alone or beside v1
        elif controller in fields[1].split(","):
            mounts = [controller, fields[1]]
        else:
            continue
        # In a container the path may be the host's and lead nowhere; the mount itself, the last one, is ours.
        group = Path("/", fields[2])
        for mount in mounts:
            for outer in (group, *group.parents):
                yield root / "sys/fs/cgroup" / mount / outer.relative_to("/")


def _cgroup_cpus(root: Path) -> Iterator[float]:
    for folder in _cgroup_folders(root, "cpu"):
        words = _read(folder / "cpu.max").split() or [
            _read(folder / "cpu.cfs_quota_us"),
            _read(folder / "cpu.cfs_period_us"),
        ]
        quota, period = (_number(word) for word in (*words, "", "")[:2])
        if quota and period and quota > 0:
            yield quota / period


def _cgroup_memory(root: Path) -> Iterator[int]:
    for folder in _cgroup_folders(root, "memory"):
        limit = _number(_read(folder / "memory.max") or _read(folder / "memory.limit_in_bytes"))
        if limit is not None and limit < UNLIMITED:
            yield int(limit)


def _bracketed(text: str) -> str | None:
    """The chosen one of ``always [madvise] never``."""
    return text.partition("[")[2].partition("]")[0] or None


def _open_files() -> int | None:
    if sys.platform == "win32":
        return None
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft
