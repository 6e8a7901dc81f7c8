"""Checks fastps on a real GPU, and measures its speed.

    python3 benchmarks/gpu.py --wheel FILE --out DIR [--minutes 6] [--images FILE] [--cores]
    python3 benchmarks/gpu.py --wheel FILE --out DIR --rehearse
    python3 benchmarks/gpu.py --wheel FILE --collect DIR [--images FILE]
    python3 benchmarks/gpu.py --publish DIR

It unpacks the wheel into a temporary folder. The machine needs Python, NumPy, torch with CUDA and pytest, and
JAX, SciPy and scikit-learn for some rows. `make gpu-check` builds the wheel, collects all files in a folder
for that machine (`--collect`) and prints the command. Each row
runs in a separate process, so one that fails ends no other. DIR gets `gpu.json` and `gpu.md`, also if the
time is over before all rows have run. `--publish` writes the table of such a folder into
`benchmarks/README.md`. `--cores` adds rows that need many cores and no GPU.
"""

from __future__ import annotations

import argparse
import collections
import os
import shutil
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Any

from device import report, runs

HERE = Path(__file__).resolve().parent
#: Factor of the limits in a rehearsal, whose machine may be busy and has no GPU.
PATIENCE = 4.0
#: All that a run needs beside the wheel, from the root of the repository.
FILES = (
    "benchmarks/*.py",
    "benchmarks/device/*.py",
    "benchmarks/cores/*.py",
    "examples/model_parallel.py",
    "tests/gpu/*.py",
    "tests/pretended_gpu.py",
    "tests/torch_bodies.py",
    "tests/vectors/codecs.json",
)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--wheel", type=Path, metavar="FILE", help="the wheel under test")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of gpu.json and gpu.md")
    parser.add_argument("--minutes", type=float, default=6.0, help="time for everything (default: 6)")
    parser.add_argument("--images", type=Path, metavar="FILE", help="images of CIFAR-10, from make gpu-check")
    parser.add_argument("--cores", action="store_true", help="also measure scaling on many cores")
    parser.add_argument("--rehearse", action="store_true", help="all rows, small, on a pretended GPU")
    parser.add_argument("--collect", type=Path, metavar="DIR", help="copy what a run needs there, and stop")
    parser.add_argument("--publish", type=Path, metavar="DIR", help="put DIR/gpu.md into README.md")
    arguments = parser.parse_args()
    if arguments.publish is None and not (arguments.wheel and (arguments.out or arguments.collect)):
        parser.error("--wheel and --out are needed, or --wheel and --collect, or --publish")
    for file in (arguments.wheel, arguments.images):
        if file is not None and not file.is_file():
            parser.error(f"there is no file {file}")
    return arguments


def environment(site: str, rehearse: bool) -> dict[str, str]:
    """Environment of all child processes: the unpacked wheel, and no other installation of fastps."""
    paths = [site, str(HERE), str(HERE.parent / "tests")]
    more = {"PYTHONPATH": os.pathsep.join(paths), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    more |= {"JAX_PLATFORMS": "", "GLOO_SOCKET_IFNAME": "lo", "TEARDOWN_CUPTI": "0"}
    if rehearse:
        more |= {"FASTPS_REHEARSE_GPU": "1", "CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu"}
    return {**os.environ, **more, "OMP_WAIT_POLICY": "passive", "PYTHONDONTWRITEBYTECODE": "1"}


def pretended_images(folder: str) -> Path:
    """Noise in place of the images."""
    import numpy as np

    rng, path = np.random.default_rng(0), Path(folder) / "images.npz"
    arrays: dict[str, Any] = {}
    for part in ("train", "test"):
        arrays[f"{part}_x"] = rng.integers(0, 256, (256, 3, 32, 32), np.uint8)
        arrays[f"{part}_y"] = rng.integers(0, 10, 256)
    np.savez(path, **arrays)
    return path


def check(arguments: argparse.Namespace, site: str) -> dict[str, Any]:
    """Runs everything with the package in `site`; writes the results so far after each row."""
    begun, rehearsal = time.monotonic(), arguments.rehearse
    patience = PATIENCE if rehearsal else 1.0
    budget, variables = runs.Budget(arguments.minutes, patience), environment(site, rehearsal)
    images = pretended_images(site) if rehearsal and arguments.images is None else arguments.images
    setting = (rehearsal, None if images is None else str(images.resolve()))
    first = runs.row("facts", setting, variables, budget.left(240))
    if first["verdict"] != "passed":
        raise SystemExit(f"{first['reason']}\n{first.get('output', '')}")
    card, limits = first["facts"]["card"], first["limits"]
    gpu = rehearsal or card is not None
    if not (gpu or arguments.cores):
        raise SystemExit("no CUDA GPU was found: only --rehearse and --cores do without one")
    result = {"command": command(arguments), "rehearsal": rehearsal, "facts": first["facts"]}
    result |= {"checks": {}, "rows": {}}

    def ended(kind: str, name: str, outcome: Any, text: str) -> None:
        result[kind][name] = outcome
        result["seconds"] = round(time.monotonic() - begun, 1)
        report.write(arguments.out, result)
        print(f"{result['seconds']:6.1f} s  {name}: {text}", flush=True)

    if gpu:
        # Some time is left for the rows, whatever the checks do.
        time_of_checks = runs.Budget(arguments.minutes / 2, patience)
        for file, outcomes in runs.checks(variables, time_of_checks, 2 if rehearsal else 6):
            ended("checks", file, outcomes, counted(outcomes))
    wanted = (limits["gpu"] if gpu else {}) | (limits["cores"] if arguments.cores else {})
    for name, outcome in runs.rows(wanted, setting, variables, budget, 2 if rehearsal else 1):
        ended("rows", name, outcome, report.sentence(outcome))
    return result


def command(arguments: argparse.Namespace) -> str:
    """The command as a table shows it: files without their folders."""
    words = ["python3 benchmarks/gpu.py --wheel", arguments.wheel.name, "--out", arguments.out.name]
    words += ["--minutes", f"{arguments.minutes:g}"]
    words += ["--images", arguments.images.name] if arguments.images else []
    return " ".join(words + [f"--{flag}" for flag in ("cores", "rehearse") if getattr(arguments, flag)])


def counted(outcomes: list[dict[str, Any]]) -> str:
    """`3 passed, 1 failed`."""
    counts = collections.Counter(outcome["verdict"] for outcome in outcomes)
    return ", ".join(f"{count} {verdict}" for verdict, count in counts.items())


def collect(arguments: argparse.Namespace) -> None:
    """Copies all files of a run to an empty folder, and prints the command."""
    root, folder = HERE.parent, arguments.collect
    shutil.rmtree(folder, ignore_errors=True)
    for file in (file for pattern in FILES for file in sorted(root.glob(pattern))):
        target = folder / file.relative_to(root)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, target)
    words = ["python3 benchmarks/gpu.py --out out --cores --minutes 9.5"]
    for option in ("wheel", "images"):
        file = getattr(arguments, option)
        if file is not None:
            shutil.copy(file, folder / file.name)
            words.append(f"--{option} {file.name}")
    print(f"Copy {folder} to a machine with a GPU, and run in it:\n  {' '.join(words)}")


def publish(folder: Path) -> None:
    """Writes the table of a run into the README beside this file."""
    from harness import write_between_markers

    write_between_markers(HERE / "README.md", "gpu", (folder / "gpu.md").read_text().splitlines())


def main() -> int:
    """Returns 1 if a row failed."""
    arguments = parse()
    if arguments.publish is not None:
        publish(arguments.publish)
        return 0
    if arguments.collect is not None:
        collect(arguments)
        return 0
    with tempfile.TemporaryDirectory() as site:
        zipfile.ZipFile(arguments.wheel).extractall(site)
        failed = report.failed(check(arguments, site))
    print(f"{len(failed)} failed; see {arguments.out / 'gpu.md'}", *failed, sep="\n  ")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
