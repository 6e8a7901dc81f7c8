"""The claim `fleet`: its trace, and its judge by figures; `test_repro_judges.py` plays it."""

from __future__ import annotations

import pytest

from fastps_lab.repro.claims.fleet import judge
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
    assert judge({"curves": {"DiLoCo": rounds, "Sync": steps}}).holds is holds
