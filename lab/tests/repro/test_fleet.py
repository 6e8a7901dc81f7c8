"""The claim `fleet`: its trace, its judge by figures, and its arms of other libraries; `test_repro_judges.py`
plays it.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fastps.commands.kit.children import Child, end
from fastps_lab.repro.claims.fleet import judge, why_absent
from fastps_lab.repro.claims.one_kill import KILL, lost
from fastps_lab.repro.claims.one_kill import judge as judge_kill
from fastps_lab.repro.fleet.arms import ARMS, PACKAGES, Arm, Look
from fastps_lab.repro.fleet.trace import Life, machine_seconds, read_trace
from fastps_lab.repro.fleet.worker import Job
from fastps_lab.repro.local_steps import problem


def test_the_trace_names_the_processes_of_each_machine() -> None:
    lives = read_trace(30.0)
    assert lives == [
        Life(0, ((0.0, 0.04),), 0.0, 30.0),
        Life(1, ((0.0, 0.04),), 0.0, 9.0),
        Life(1, ((15.0, 0.04),), 15.0, 30.0),
        Life(2, ((0.0, 0.08),), 0.0, 30.0),
        Life(3, ((0.0, 0.12),), 0.0, 22.0),
    ]
    assert [machine_seconds(lives, now) for now in (0, 9, 15, 30)] == [0, 36, 54, 106]
    paces = ((0.0, 0.08), (34.0, 0.04), (78.0, 0.12))  # one process, which changes its pace
    assert Life(2, paces, 0.0, 120.0) in read_trace(120.0)


@pytest.mark.parametrize(
    ("rounds", "holds"),
    [
        ([(0, 5.0), (50, 3.0), (100, 2.5)], True),
        ([(0, 5.0), (50, 3.2), (80, 3.0), (100, 2.5)], False),  # late
        ([(0, 5.0), (50, 3.0), (100, 2.97)], False),  # no lower
        ([(0, 5.0), (50, 4.0), (100, 3.9)], False),  # never
    ],
)
def test_rounds_must_be_lower_and_sooner(rounds: list[tuple[float, float]], holds: bool) -> None:
    steps = [(0, 5.0), (50, 4.0), (100, 3.0)]
    figures = {"curves": {"DiLoCo": rounds, "Sync": steps}, "absent": {"torchft": "without torchft"}}
    assert judge(figures).holds is holds
    assert "torchft not played: without torchft" in judge(figures).measured


def test_what_a_kill_costs_is_what_its_versions_come_later() -> None:
    kill = 2 * math.ceil(KILL / 2)  # a version every other second, until then
    before = [(float(at), 1 + at // 2) for at in range(kill)]
    for pause, costs in ((0.0, 0.0), (6.0, 6.0)):
        after = [(at + pause, 1 + at // 2) for at in range(kill, kill + 14)]
        assert lost([*before, *after]) == (2.0, pytest.approx(costs))
    slow, quick = (
        [*before, *((at + 6.0, 1 + at // 2) for at in range(kill, kill + 14))],
        [*before, (kill + 0.5, 1 + kill // 2)],
    )
    for seen in ({"DiLoCo": quick}, {"DiLoCo": quick, "torchft": slow}):
        assert judge_kill({"present": 4, "versions": seen}).holds is True
    assert judge_kill({"present": 4, "versions": {"DiLoCo": slow, "torchft": quick}}).holds is False
    few = judge_kill({"present": 3, "versions": {"DiLoCo": quick, "torchft": slow}})
    assert few.holds is True
    assert "3 of 4 took part with torchft" in few.measured


def wait_for(arm: Arm, reached: Callable[[Look], bool]) -> Look:
    """Waits until a fleet has reached something."""
    deadline, look = time.monotonic() + 180, None
    while time.monotonic() < deadline:
        if (look := arm.look()) is not None and reached(look):
            return look
        time.sleep(0.05)
    raise AssertionError(f"it has not come to it: {look}")


def processes_of(session: int) -> list[int]:
    """The processes that have a machine's session, and have not ended."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _parent, _group, of = stat.read_text().rpartition(")")[2].split()[:4]
        except OSError:  # it has ended since
            continue
        if int(of) == session and state not in "ZX":
            found.append(int(stat.parent.name))
    return found


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["elastic all-reduce", "hivemind"])
def test_a_fleet_of_another_library_loses_its_first_machine_and_takes_it_back(
    name: str, tmp_path: Path
) -> None:
    """And nothing is left of a machine that was killed, whatever it has started."""
    for package in PACKAGES[name]:
        pytest.importorskip(package, reason=f"without {package}, which this project does not install")
    (tmp_path / "clock").write_text(str(time.monotonic()))
    task = problem("text", True)
    with ARMS[name](task, tmp_path) as arm:

        def start(machine: int, seed: int) -> Child:
            job = Job("", ("", {}), machine, ((0.0, 0.01),), str(tmp_path / "clock"), True, seed)
            return arm.start(job, tmp_path / f"worker-{seed}.log")

        running = [start(machine, machine) for machine in range(3)]
        try:
            all_there = wait_for(arm, lambda look: look.present == 3)
            first = running.pop(0)
            assert os.getpgid(first.process.pid) == first.process.pid
            first.kill()
            first.close()
            assert processes_of(first.process.pid) == []
            without = wait_for(arm, lambda look: look.present == 2)
            running.append(start(0, 3))
            again = wait_for(arm, lambda look: look.present == 3 and look.version > without.version)
        finally:
            end(running, 0.0)
        assert again.loss < all_there.loss < task.loss(task.start(0))
        assert [processes_of(child.process.pid) for child in running] == [[], [], []]


def test_an_arm_without_its_packages_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, packages in PACKAGES.items():
        monkeypatch.setitem(PACKAGES, name, ("numpy", f"no-{packages[-1]}"))
        for quick in (True, False):
            assert why_absent(name, quick) == f"without no-{packages[-1]}"
        monkeypatch.setitem(PACKAGES, name, ("numpy",))
        assert why_absent(name, False) == ""
        assert why_absent(name, True) == "not in the quick form"
