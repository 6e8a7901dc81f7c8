"""Prints how many tests passed and what a run left out, and why.

Arguments: what runs the rest, the output of the Rust tests, and pytest's JUnit files.
"""

import platform
import re
import sys
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path


def python_skips(report: Path) -> list[str]:
    reasons: Counter[str] = Counter()
    for case in ET.parse(report).getroot().iter("testcase"):
        for skipped in case.iter("skipped"):
            module = case.get("classname", "").rpartition(".")[2]
            reasons[f"{module}: {skipped.get('message') or 'no reason given'}"] += 1
    return [f"{count} x {reason}" for reason, count in sorted(reasons.items())]


def passed(reports: list[Path], output: Path) -> int:
    python = [case for report in reports for case in ET.parse(report).getroot().iter("testcase")]
    # The lines of `cargo test`, and that of `cargo nextest`.
    rust = re.findall(r"^(?:test result: ok\.| +Summary .*:) (\d+) passed", output.read_text(), re.MULTILINE)
    passed = sum(not len(case) or case.find("properties") is not None for case in python)
    return passed + sum(map(int, rust))


def absent_instruction_sets() -> list[str]:
    """Kernels of an instruction set that this CPU lacks were built, where they can be, but not run."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return ["avx2 and avx512 kernels: this is not an x86-64 CPU"]
    absent = ["neon kernels: this is not an AArch64 CPU"]
    cpu = Path("/proc/cpuinfo")
    flags = cpu.read_text().split() if cpu.exists() else []
    for name, flag in (("avx2", "avx2"), ("avx512", "avx512vl")):
        if flags and flag not in flags:
            absent.append(f"{name} kernels: this CPU lacks {name}")
    return absent


elsewhere, output, *reports = sys.argv[1], *map(Path, sys.argv[2:])
lines = [line for report in reports for line in python_skips(report)]
lines += absent_instruction_sets()
lines.append("Rust unit tests of fastps-python: only Python can link an extension module; tests/ covers it")
lines.append("make acceptance, make mutants, make bench: they take longer and are run by hand")
print("\nNot run, and why:")
print("\n".join(f"  - {line}" for line in lines))
print(f"\n{passed(reports, output)} passed; not run: {elsewhere}")
