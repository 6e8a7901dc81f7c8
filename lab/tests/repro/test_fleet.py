"""The claim `fleet`: its trace, and its judge by figures; `test_repro_judges.py` plays it."""

from __future__ import annotations

import math

import pytest

from fastps_lab.repro.claims.fleet import judge
from fastps_lab.repro.claims.one_kill import KILL, lost
from fastps_lab.repro.claims.one_kill import judge as judge_kill
from fastps_lab.repro.fleet.trace import Life, machine_seconds, read_trace


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
