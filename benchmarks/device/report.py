"""The JSON and the Markdown table of a run of the GPU check."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Outcome = dict[str, Any]
#: Verdicts of rows that are fine, or could not be tried.
FINE = ("passed", "skipped")


def write(folder: Path, result: dict[str, Any]) -> None:
    """Writes `gpu.json` and `gpu.md`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "gpu.json").write_text(json.dumps(result, indent=1) + "\n")
    (folder / "gpu.md").write_text("\n".join(lines(result)) + "\n")


def failed(result: dict[str, Any]) -> list[str]:
    """The names of all rows that are neither passed nor skipped."""
    checks = [outcome for file in result["checks"].values() for outcome in file]
    names = [outcome["test"] for outcome in checks if outcome["verdict"] not in FINE]
    return names + [name for name, row in result["rows"].items() if row["verdict"] not in FINE]


def lines(result: dict[str, Any]) -> list[str]:
    """The page."""
    page = [f"`{result['command']}`", "", *about(result["facts"], result["rehearsal"]), ""]
    page += [*verdicts(result["checks"]), ""]
    for name, row in result["rows"].items():
        page += [f"**{name[0].upper()}{name[1:]}**", ""]
        page += row["table"] if row["verdict"] == "passed" else [sentence(row)]
        page.append("")
    return page[:-1]


def about(facts: dict[str, Any], rehearsal: bool) -> list[str]:
    """The machine and the versions."""
    card = facts.get("card")
    gpu = "no GPU"
    if card:
        gpu = f"{card['name']}, {card['memory_gib']} GiB, driver {card['driver']}, CUDA {facts['cuda']}"
    packages = ", ".join(f"{name} {version}" for name, version in facts.get("packages", {}).items())
    page = [
        f"- {gpu}",
        f"- {facts.get('cores')} cores of {facts.get('processor')} ({facts.get('family')}), "
        f"{facts.get('memory_gib')} GiB, {facts.get('system')}",
        f"- fastps {facts.get('fastps')}, Python {facts.get('python')}, {packages}",
        f"- {facts.get('date')}",
    ]
    if rehearsal:
        page.append("- **a rehearsal: the GPU is pretended, sizes are small, and times mean nothing**")
    return page


def verdicts(checks: dict[str, list[Outcome]]) -> list[str]:
    """One line for each test, whose parameters are counted; those that failed follow by name."""
    page = ["| check | passed | skipped | failed |", "| --- | --- | --- | --- |"]
    reasons: list[str] = []
    for file, outcomes in sorted(checks.items()):
        by_test: dict[str, list[Outcome]] = {}
        for outcome in outcomes:
            by_test.setdefault(readable(outcome["test"]), []).append(outcome)
            if outcome["verdict"] != "passed":
                reasons.append(f"- {outcome['test']}: {sentence(outcome)}")
        for test, those in by_test.items():
            counts = [sum(o["verdict"] == verdict for o in those) for verdict in FINE]
            cells = [f"{file.removeprefix('test_gpu_')}: {test}", *counts, len(those) - sum(counts)]
            page.append("| " + " | ".join(map(str, cells)) + " |")
    return [*page, "", *reasons] if reasons else page


def readable(test: str) -> str:
    """`test_gpu_values.py::test_a_large_model[tcp]` -> `a large model`."""
    return test.rpartition("::")[2].partition("[")[0].removeprefix("test_").replace("_", " ")


def sentence(outcome: Outcome) -> str:
    """The verdict and its reason, in one line."""
    reason = " ".join(str(outcome.get("reason", "")).split())[:300]
    return f"{outcome['verdict']}: {reason}" if reason else outcome["verdict"]
