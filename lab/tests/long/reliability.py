"""Runs `fastps-lab torture` on several seeds; writes the counts to docs/internals/reliability.md."""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from fastps_lab.repro.costs.costs import processor

PAGE = Path(__file__).resolve().parents[3] / "docs/internals/reliability.md"
BEGIN, END = "<!-- counts: written by make torture -->", "<!-- end of counts -->"


def run(seed: int, seconds: float) -> dict[str, Any]:
    """One run; what it counted."""
    command = [sys.executable, "-m", "fastps_lab", "torture", "--json"]
    command += ["--seed", str(seed), "--seconds", f"{seconds:g}"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if not done.stdout:
        sys.exit(f"seed {seed}: the run ended with code {done.returncode} and counted nothing")
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(
        f"seed {seed}, {report['ack']}: {report['pushes']} pushes, {report['violations'] or 'clean'}",
        flush=True,
    )
    return report


COLUMNS = {
    "seed": "seed",
    "receipts": "ack",
    "seconds": "seconds",
    "pushes": "pushes",
    "slices applied": "slices",
    "calls": "calls",
    "refused": "refused",
    "in doubt": "doubts",
    "losses reported": "losses_reported",
    "clients": "clients",
    "restarts": "restarts",
    "checks": "checks",
    "violations": "violations",
}


def counts(runs: list[dict[str, Any]], seconds: float, jobs: int) -> str:
    """The tables."""

    def cell(report: dict[str, Any], name: str) -> str:
        value = report[name]
        return f"{sum(value.values())}" if isinstance(value, dict) else f"{value}"

    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    lines += ["| " + " | ".join(cell(report, name) for name in COLUMNS.values()) + " |" for report in runs]
    faults: Counter[str] = Counter()
    for report in runs:
        faults.update(report["faults"])
    lines += ["", "| fault | times |", "|---|---|"]
    lines += [f"| {kind.replace('_', ' ')} | {count} |" for kind, count in sorted(faults.items())]
    seeds = " ".join(str(report["seed"]) for report in runs)
    software = f"Python {platform.python_version()}, fastps {runs[0]['version']}"
    machine = f"{processor()}; {runs[0]['machine']}; {software}"
    command = f'make torture SEEDS="{seeds}" SECONDS={seconds:g} JOBS={jobs}'
    return "\n".join([*lines, "", f"Machine: {machine}.", "", f"Command: `{command}`.", ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(1, 11)), help="which (1 to 10)")
    parser.add_argument("--seconds", type=float, default=300.0, help="of each run (300)")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time (1)")
    options = parser.parse_args()
    with ThreadPoolExecutor(options.jobs) as pool:
        runs = list(pool.map(lambda seed: run(seed, options.seconds), options.seeds))
    page = PAGE.read_text()
    before, _, rest = page.partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}\n\n{counts(runs, options.seconds, options.jobs)}\n{END}{after}")
    return 1 if any(report["violations"] for report in runs) else 0


if __name__ == "__main__":
    sys.exit(main())
