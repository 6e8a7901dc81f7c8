"""The cost of operating a cluster: tokens, many principals, a greedy neighbour, scrapes of the metrics.

    python benchmarks/operations.py [--quick] [--output benchmarks/README.md]

Servers are separate processes. Steps take turns; the scraped shards are otherwise idle, so that all of
their CPU time beyond that of a quiet interval belongs to the scrapes. The tables go to standard output and,
between their markers, into `--output`.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path

from connections import Server, served, step
from harness import Turns, machine, readable, runner, table, write_between_markers

import fastps

FLOATS = 1 << 10
"""Floats of a step: 4 KB."""
PRINCIPALS = 10_000
SHARDS, CLIENTS = 4, 1000
BUDGET = "frames/s=200"
GREEDY = """
import sys, numpy as np, fastps
with fastps.connect(sys.argv[1], token_file=sys.argv[2]) as ps:
    gradient = {"w": np.ones(1024, np.float32)}
    print("ready", flush=True)
    while True:
        try:
            ps.push(gradient)
        except fastps.CapacityError:
            pass
"""
"""A client that pushes as fast as it can, whatever it is answered."""


def run(*arguments: object) -> None:
    """Runs a command of fastps."""
    subprocess.run([sys.executable, "-m", "fastps", *map(str, arguments)], check=True, capture_output=True)


def token_file(folder: Path, principals: int) -> tuple[Path, Path]:
    """A token file with this many principals, and the token of the last one."""
    file, token = folder / f"tokens-{principals}", folder / f"token-{principals}"
    file.touch(mode=0o600)
    token.unlink(missing_ok=True)
    others = (hashlib.sha256(str(k).encode()).hexdigest() for k in range(principals - 1))
    file.write_text("".join(f"p{k} worker * {digest}\n" for k, digest in enumerate(others)))
    run("token", "new", file, "last", "--role", "worker", "--out", token)
    return file, token


def credentials(folder: Path, quick: bool) -> list[str]:
    """Steps over TLS without tokens, with a token, and with the token of one among many principals."""
    certs = folder / "certs"
    run("certs", "init", certs)
    run("certs", "issue", certs, "--server", "127.0.0.1")
    tls = ["--tls-cert", str(certs / "127.0.0.1.pem"), "--tls-key", str(certs / "127.0.0.1-key.pem")]
    with ExitStack() as stack:
        runners = {}
        variants = {"TLS": 0, "TLS, 1 token": 1, f"TLS, {PRINCIPALS:,} tokens": PRINCIPALS}
        for name, principals in variants.items():
            file, token = token_file(folder, principals) if principals else (None, None)
            server = stack.enter_context(served(*tls, *(["--tokens", str(file)] if file else [])))
            client = fastps.connect(server.address, tls_ca=certs / "ca.pem", token_file=token)
            runners[name] = runner(step(stack.enter_context(client), "w", FLOATS))
        turns = Turns(runners, rounds=3 if quick else 40, seconds_per_turn=0.1 if quick else 0.25)
    rows = ([name, readable(turns.time(name)), f"{turns.ratio(name, 'TLS'):.3f}"] for name in runners)
    return table(["push_pull of 4 KB", "p50", "to TLS alone"], rows)


def web_address(server: Server) -> str:
    """The address that the server prints after those of its shards."""
    assert server.process.stdout is not None
    for line in server.process.stdout:
        if "http://" in line:
            return line.split("http://")[1].strip()
    raise RuntimeError("the server shows no metrics")


def neighbour(folder: Path, quick: bool) -> list[str]:
    """Steps of a client alone, and beside one that sends more than its budget admits."""
    file, token = token_file(folder, 1)
    greedy = folder / "greedy"
    run("token", "new", file, "greedy", "--role", "worker", "--out", greedy)
    file.write_text(file.read_text().rstrip() + f" {BUDGET}\n")
    alone, beside = [], []
    with served("--tokens", str(file)) as server, fastps.connect(server.address, token_file=token) as ps:
        own = runner(step(ps, "w", FLOATS))

        def rate() -> float:
            """Steps per second."""
            until, count = time.perf_counter() + (0.3 if quick else 3), 0
            begin = time.perf_counter()
            while time.perf_counter() < until:
                count += len(own(100))
            return count / (time.perf_counter() - begin)

        for _ in range(3 if quick else 9):
            alone.append(rate())
            command = [sys.executable, "-c", GREEDY, server.address, str(greedy)]
            with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
                assert process.stdout is not None
                process.stdout.readline()
                beside.append(rate())
                process.kill()
    ratio = statistics.median(ours / theirs for ours, theirs in zip(beside, alone, strict=True))
    columns = ["steps of 4 KB per second, alone", f"beside a client over `{BUDGET}`", "ratio"]
    cells = [f"{statistics.median(alone):,.0f}", f"{statistics.median(beside):,.0f}", f"{ratio:.2f}"]
    return table(columns, [cells])


def scrapes(quick: bool) -> list[str]:
    """CPU time of a server process that is scraped once a second."""
    seconds = 5 if quick else 60

    def busy(server: Server, address: str | None) -> tuple[float, int]:
        """Share of a core, and bytes of a scrape."""
        size, before, begin = 0, server.cpu(), time.monotonic()
        for k in range(1, seconds + 1):
            if address:
                with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
                    size = len(answer.read())
            time.sleep(max(0.0, begin + k - time.monotonic()))
        return (server.cpu() - before) / 1e9 / (time.monotonic() - begin), size

    with served("--shards", str(SHARDS), "--web", "127.0.0.1:0") as server, ExitStack() as clients:
        address = web_address(server)
        for _ in range(CLIENTS):
            clients.enter_context(fastps.connect(server.address, transport="tcp"))
        quiet, _ = busy(server, None)
        scraped, size = busy(server, address)
    cells = [f"{quiet:.2%}", f"{scraped:.2%}", f"{max(0.0, scraped - quiet):.2%}", f"{size / 1024:.0f} KiB"]
    columns = ["share of a core, unscraped", "scraped once a second", "of the scrapes", "a scrape"]
    subject = f"{SHARDS} shards of one process, {CLIENTS:,} clients with a session on each:"
    return [subject, "", *table(columns, [cells])]


def main() -> None:
    """Measures, prints, writes."""
    parser = argparse.ArgumentParser(description="What tokens and scrapes cost.")
    parser.add_argument("--quick", action="store_true", help="for a first look")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the tables between FILE's markers")
    arguments = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    command = " ".join(["python", "benchmarks/operations.py", *sys.argv[1:]])
    began = time.monotonic()
    lines = [f"`{command}`", "", *machine(), ""]
    with tempfile.TemporaryDirectory() as folder:
        for part in (credentials, neighbour):
            lines += [*part(Path(folder), arguments.quick), ""]
    lines += scrapes(arguments.quick)
    print("\n".join(lines))
    print(f"{time.monotonic() - began:.0f} s on {os.cpu_count()} cores", file=sys.stderr)
    if arguments.output:
        write_between_markers(arguments.output, "operations", lines)


if __name__ == "__main__":
    main()
