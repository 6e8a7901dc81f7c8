"""`fastps doctor`: a real run, its findings and warnings on a made-up machine, and its exit code."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import fastps
from fastps.commands import cli
from fastps.commands.doctor import _advice, _machine, _measure, doctor
from instruction_sets import ISAS

NUMBER_OR_UNKNOWN = (int, float, type(None))
TEXT_OR_UNKNOWN = (str, type(None))

SOUND = _machine.Machine(
    cpu_model="A CPU",
    architecture="x86_64",
    cores_present=8,
    cores_usable=8,
    cgroup_cpus=None,
    cgroup_memory=None,
    memory_total=64 * 2**30,
    memory_available=32 * 2**30,
    swap_total=0,
    swap_used=0,
    transparent_huge_pages="madvise",
    clock_source="tsc",
    load_average=0.5,
    open_files=20_000,
)
FAST = _measure.Measured(10.0, 40.0, 0.3, 10.0, 30.0, 3.0)


def command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "fastps", "doctor", "--quick", *arguments],
        env={name: value for name, value in os.environ.items() if name != "FASTPS_ISA"} | environment,
        capture_output=True,
        text=True,
        timeout=100,
    )


def reported(**environment: str) -> dict[str, Any]:
    done = command("--json", **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    return root


def warnings(**changes: Any) -> list[str]:
    return list(_advice.about_machine(dataclasses.replace(SOUND, **changes)))


def test_this_machine() -> None:
    report = reported()
    assert set(report) == {"ok", "torn", "version", *(f.name for f in dataclasses.fields(doctor.Report))}
    assert report["ok"] is True
    assert report["torn"] == 0
    assert report["version"] == fastps.__version__
    assert report["isa"] in report["isas"]
    assert set(report["isas"]) <= set(ISAS)
    assert "scalar" in report["isas"]
    assert all(isinstance(warning, str) for warning in report["warnings"])
    # A loaded machine is slow, but not by that much.
    for name, value in report["measured"].items():
        assert 0 < value < 1e6, name
    machine = report["machine"]
    texts = {"cpu_model", "architecture", "transparent_huge_pages", "clock_source"}
    for name, value in machine.items():
        assert isinstance(value, TEXT_OR_UNKNOWN if name in texts else NUMBER_OR_UNKNOWN), name
    if sys.platform == "linux":
        assert machine["cores_usable"] == len(os.sched_getaffinity(0))
        assert machine["memory_total"] >= machine["memory_available"] > 0


def test_the_litmus_tries_every_instruction_set_at_every_place() -> None:
    report = reported()
    places = {(trial["isa"], trial["shift_bytes"]) for trial in report["litmus"]}
    assert places == {(isa, shift) for isa in report["isas"] for shift in (0, 32, 4)}
    for trial in report["litmus"]:
        assert trial["torn"] == 0
        assert 0 <= trial["mixed"] <= trial["loads"]
        assert trial["loads"] >= _measure.LITMUS_LOADS


def test_text() -> None:
    done = command()
    assert done.returncode == 0, done.stdout + done.stderr
    for line in (
        f"fastps {fastps.__version__}\n",
        "instruction set:\n  in use: ",
        "tearing litmus:\n  scalar, aligned: ",
        "  scalar, 4 bytes past a line: ",
        "measured:\n  copy, one thread: ",
        "machine:\n  CPU: ",
    ):
        assert line in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 120


def test_options_that_are_set() -> None:
    report = reported(FASTPS_ISA="scalar", FASTPS_SHARDS="3")
    assert report["isa"] == "scalar"
    assert report["options"]["FASTPS_ISA"] == "scalar"
    assert report["options"]["FASTPS_SHARDS"] == "3"
    assert report["isas"] == reported()["isas"], "the litmus tries all, whichever is in use"


def test_an_instruction_set_that_is_not_there() -> None:
    report = reported(FASTPS_ISA="sse9")
    assert report["isa"] is None
    assert any("FASTPS_ISA names no instruction set" in warning for warning in report["warnings"])


@pytest.mark.parametrize("arguments", [[], ["--json"]], ids=["text", "json"])
def test_torn_lanes_fail(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trials = [_measure.Trial("scalar", 0, 10, 5, 0), _measure.Trial("avx2", 4, 10, 5, 3)]
    monkeypatch.setattr(_measure, "litmus", lambda seconds: trials)
    monkeypatch.setattr(doctor, "measure", lambda machine, seconds: FAST)
    assert cli.main(["doctor", "--quick", *arguments]) == 1
    printed = capsys.readouterr().out
    if arguments:
        report = json.loads(printed.splitlines()[-1])
        assert (report["ok"], report["torn"]) == (False, 3)
    else:
        assert printed.endswith("FAILED: torn lanes\n")
    assert "torn lanes with avx2: " in printed
    assert "hogwild" in printed


def test_a_litmus_without_a_race_proves_little() -> None:
    trials = [_measure.Trial("scalar", 0, 10, 5), _measure.Trial("avx2", 4, 10, 0)]
    [warning] = _advice.about_litmus(trials)
    assert "no two stores meet with avx2," in warning


def test_a_made_up_machine(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "proc/cpuinfo": "processor\t: 0\nmodel name\t: Made Up 9000\nflags\t: fpu",
            "proc/meminfo": "MemTotal: 1000000 kB\nMemAvailable: 500000 kB\n"
            "SwapTotal: 300000 kB\nSwapFree: 1000 kB",
            "proc/loadavg": "4095.5 1.0 0.5 1/100 1234",
            "proc/self/cgroup": "0::/user.slice/job",
            "sys/fs/cgroup/user.slice/cpu.max": "max 100000",
            "sys/fs/cgroup/user.slice/job/cpu.max": "50000 100000",
            "sys/fs/cgroup/user.slice/memory.max": str(512 * 2**20),
            "sys/fs/cgroup/user.slice/job/memory.max": "max",
            "sys/devices/system/cpu/online": "0-4000,4002-4095",
            "sys/devices/system/clocksource/clocksource0/current_clocksource": "hpet",
            "sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]",
        },
    )
    machine = _machine.examine(root)
    assert machine.cpu_model == "Made Up 9000"
    assert machine.cores_present == 4095
    assert machine.cgroup_cpus == 0.5
    assert machine.cgroup_memory == 512 * 2**20
    assert machine.memory_available == 500_000 * 1024
    assert machine.swap_used == 299_000 * 1024
    assert machine.transparent_huge_pages == "never"
    assert machine.clock_source == "hpet"
    assert machine.load_average == 4095.5
    found = "\n".join(_advice.about_machine(machine))
    for what, to_do in (
        ("of 4095 cores usable", "start at most"),
        ("the cgroup allows 0.5 CPUs", "Start at most 1 shards and workers"),
        ("load average", "when it is idle"),
        ("cgroup memory limit 512 MiB", "--memory-limit 409.6MiB"),
        ("488.3 MiB of memory free", "--memory-limit"),
        ("292 MiB are swapped out", "turn swap off"),
        ("transparent huge pages are off", "Write madvise"),
        ("clock source hpet", "tsc=reliable"),
    ):
        assert what in found
        assert to_do in found


def test_limits_of_cgroup_v1(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n1:name=systemd:/\n0::/",
            # The path above is the host's; a container sees its own group at the mount.
            "sys/fs/cgroup/memory/memory.limit_in_bytes": str(2**30),
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "150000",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
        },
    )
    machine = _machine.examine(root)
    assert machine.cgroup_memory == 2**30
    assert machine.cgroup_cpus == 1.5
    write(
        root,
        {
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1",
        },
    )
    machine = _machine.examine(root)
    assert (machine.cgroup_memory, machine.cgroup_cpus) == (None, None)


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"proc/meminfo": "MemTotal: much\n:\nx", "proc/loadavg": "busy", "proc/self/cgroup": "?\n0::/../.."},
        {"sys/devices/system/cpu/online": "0-", "sys/fs/cgroup/cpu.max": "max", "proc/self/cgroup": "0::/"},
        {"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "1 0", "sys/fs/cgroup/memory.max": "many"},
    ],
)
def test_what_is_not_there_is_unknown(
    files: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_measure, "litmus", lambda seconds: [_measure.Trial("scalar", 0, 10, 5)])
    monkeypatch.setattr(doctor, "measure", lambda machine, seconds: _measure.Measured(*6 * [None]))
    report = doctor.examine(root=write(tmp_path, files))
    unknown = ("cpu_model", "memory_total", "memory_available", "swap_used", "clock_source", "load_average")
    assert [getattr(report.machine, name) for name in unknown] == 6 * [None]
    assert (report.machine.cgroup_cpus, report.machine.cgroup_memory) == (None, None)
    text = "\n".join(doctor.as_text(report))
    assert "unknown, unknown" in text
    assert "warning: not measured: copy_one_thread_gb_s, " in text
    json.dumps(doctor.as_json(report))


def test_a_sound_machine_has_no_warnings() -> None:
    assert warnings() == []
    assert list(_advice.about_speed(FAST)) == []
    assert warnings(clock_source=None, cores_present=None, memory_available=None, open_files=None) == []


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"cores_usable": 2}, "2 of 8 cores usable (taskset, cpuset or container): start at most 2 shards"),
        ({"cgroup_cpus": 2.5}, "the cgroup allows 2.5 CPUs of 8 usable cores"),
        ({"cgroup_memory": 5 * 2**29}, "cgroup memory limit 2.5 GiB: "),
        ({"open_files": 256}, "256 open files allowed"),
        ({"load_average": 9.0}, "load average 9 on 8 usable cores"),
    ],
)
def test_one_warning_each(changes: dict[str, Any], expected: str) -> None:
    [warning] = warnings(**changes)
    assert expected in warning


def test_slow_parts_are_reported() -> None:
    slow = dataclasses.replace(FAST, first_touch_us_per_page=3.0, wakeup_us=200.0, tcp_round_trip_us=900.0)
    touch, wakeup, tcp = _advice.about_speed(slow)
    assert touch.startswith("3 us for each fresh page")
    assert wakeup.startswith("200 us to wake")
    assert tcp.startswith("900 us for a round trip")


def test_a_process_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    silent = tmp_path / "silent"
    silent.write_text("#!/bin/sh\nexec sleep 60\n")
    silent.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(silent))
    monkeypatch.setattr(_measure, "PATIENCE", 0.2)
    began = time.monotonic()
    assert _measure.wakeup(0.1) is None
    assert _measure.tcp_round_trip(0.1) is None
    assert _measure.tcp_throughput(0.1) is None
    assert time.monotonic() - began < 20
    monkeypatch.setattr(sys, "executable", str(tmp_path / "absent"))
    assert _measure.wakeup(0.1) is None
