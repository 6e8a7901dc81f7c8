"""Measures steps of the Go client against a Go server that returns the same messages.

A step pushes a gradient and gets the values. In turns, the median of five rounds; both servers are separate
processes. Needs go.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from fastps.commands.kit.servers import LocalCluster

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=1.0, help="of each round")
    seconds = parser.parse_args().seconds
    go = shutil.which("go") or "/usr/local/go/bin/go"
    caches = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "go"
    settings = {"GOMODCACHE": str(caches / "mod"), "GOCACHE": str(caches / "cache"), "GOFLAGS": "-modcacherw"}
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "speed")
        build = [go, "build", "-o", str(program), "./internal/speed"]
        subprocess.run(build, cwd=ROOT / "clients/go", env=settings | os.environ, check=True)
        cluster = LocalCluster(1, Path(folder))
        try:
            command = [str(program), "-server", cluster.addresses, "-seconds", str(seconds)]
            output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
        finally:
            cluster.close()
    print("| message | fastps, steps/s | echo, steps/s | ratio |\n|---|---|---|---|")
    for line in output.splitlines():
        found = json.loads(line)
        ratio = found["fastps"] / found["echo"]
        print(f"| {found['bytes']:,.0f} B | {found['fastps']:,.0f} | {found['echo']:,.0f} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
