"""The cost of a push and a pull, in fastps and in other libraries: several parts, each with its own table.

    python benchmarks/transport.py [--quick] [--only steps,small,...] [--output benchmarks/README.md]

Each part takes one or two minutes, all of them about twelve; with `--quick` a few seconds. The tables go to
standard output and, between the markers of their part, into `--output`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

from data_plane.idle_cpu import idle_cpu
from data_plane.links import links
from data_plane.many import many
from data_plane.mixed import mixed
from data_plane.others import grpc_clients, others
from data_plane.overlap import overlap
from data_plane.pipelined import pipelined
from data_plane.small import small
from data_plane.steps import steps
from harness import machine, write_between_markers

PARTS: dict[str, Callable[[bool], list[str]]] = {
    "steps": steps,
    "small": small,
    "pipelined": pipelined,
    "others": others,
    "grpc": grpc_clients,
    "mixed": mixed,
    "overlap": overlap,
    "links": links,
    "many": many,
    "idle": idle_cpu,
}


def parse_parts(text: str) -> list[str]:
    """`steps,links` -> names of parts."""
    names = text.split(",")
    if not set(names) <= set(PARTS):
        raise ValueError(text)
    return names


def main() -> None:
    """Measures, prints, writes."""
    parser = argparse.ArgumentParser(description="Push and pull, against raw sockets, raw memory and others.")
    parser.add_argument("--quick", action="store_true", help="seconds, not minutes: for a first look")
    parser.add_argument(
        "--only", type=parse_parts, default=list(PARTS), metavar="PARTS", help=f"some of {','.join(PARTS)}"
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the tables between FILE's markers")
    arguments = parser.parse_args()
    facts = machine()  # before the first part, whose own load the next one would take for other work
    for part in arguments.only:
        began = time.monotonic()
        command = f"python benchmarks/transport.py --only {part}" + (" --quick" if arguments.quick else "")
        lines = [f"`{command}`", "", *facts, "", *PARTS[part](arguments.quick)]
        print("\n".join([*lines, ""]), flush=True)
        print(f"{part}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
        if arguments.output:
            write_between_markers(arguments.output, f"transport {part}", lines)


if __name__ == "__main__":
    main()
