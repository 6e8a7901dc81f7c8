"""Prints how long the stages of the last run took, the programs and folders of tests, and the slowest tests.

.ci/timed notes the stages, cargo and pytest report their tests. Python tests run side by side, so the times
of a folder add up to more than the stage takes.
"""

import re
import xml.etree.ElementTree as ET
from collections import defaultdict
from pathlib import Path

TARGET = Path("target")
SLOWEST = 50


def stages() -> dict[str, float]:
    """Seconds of each stage, the last time that it ran."""
    lines = (TARGET / "times.tsv").read_text().splitlines()
    return {stage: float(seconds) for stage, seconds in (line.split("\t") for line in lines)}


def rust_programs() -> dict[str, tuple[int, float]]:
    """Tests that passed and their seconds, of each program that has tests."""
    output = (TARGET / "rust-tests.txt").read_text()
    program = (
        r"^ +Running .*/deps/(\w+)-\w+\)\n(?s:.*?)^test result: ok\. (\d+) passed.* finished in ([\d.]+)s$"
    )
    nextest = r"^ +PASS \[ *([\d.]+)s\] (?:\([ \d/]+\) )?(\S+) "
    programs = {
        name: (int(n), float(s)) for name, n, s in re.findall(program, output, re.MULTILINE) if int(n)
    }
    for seconds, name in re.findall(nextest, output, re.MULTILINE):
        passed, before = programs.get(name, (0, 0.0))
        programs[name] = (passed + 1, before + float(seconds))
    return programs


def python_tests() -> list[tuple[float, str]]:
    """Seconds and name of each test, slowest first."""
    reports = (ET.parse(path) for path in sorted(TARGET.glob("pytest-*.xml")))
    tests = [
        (float(case.get("time", 0)), f"{case.get('classname')}.{case.get('name')}")
        for report in reports
        for case in report.iter("testcase")
    ]
    return sorted(tests, reverse=True)


def folders(tests: list[tuple[float, str]]) -> dict[str, list[float]]:
    """Seconds of the tests of each folder of tests/."""
    found: dict[str, list[float]] = defaultdict(list)
    for seconds, name in tests:
        found[name.removeprefix("tests.").split(".")[0]].append(seconds)
    return found


def table(*columns: str, rows: list[tuple[str | int | float, ...]]) -> None:
    print("\n| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|")
    for row in rows:
        print(
            "| " + " | ".join(f"{cell:.1f}" if isinstance(cell, float) else str(cell) for cell in row) + " |"
        )


tests = python_tests()
table("stage", "s", rows=list(stages().items()))
table("Rust tests", "tests", "s", rows=[(name, *row) for name, row in rust_programs().items()])
table(
    "Python tests", "tests", "s", rows=[(name, len(s), sum(s)) for name, s in sorted(folders(tests).items())]
)
table("slowest Python tests", "s", rows=[(f"`{name}`", seconds) for seconds, name in tests[:SLOWEST]])
