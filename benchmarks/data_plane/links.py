"""A slow network: two namespaces joined by virtual interfaces with limited bandwidth (`tc tbf`).

A part of `transport.py`. It runs this file again in a new network namespace, which starts the server in
another one, so nothing outside is changed and nothing remains. It needs root, `unshare`, `nsenter`, `ip` and
`tc`; without them the table says so.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from harness import Step, readable, table

import fastps

PARAMETERS = 25_600_000
"""Of ResNet-50."""
RATES = {"1 Gbit/s": 1000, "100 Mbit/s": 100}
HERE, THERE = "10.77.0.1", "10.77.0.2"
CARDS = ("fastps0", "fastps1")
BENCHMARKS = Path(__file__).resolve().parent.parent
TOOLS = ("unshare", "nsenter", "ip", "tc")


def _run(*command: str, inside: int | None = None) -> None:
    enter = ("nsenter", "-t", str(inside), "-n") if inside else ()
    subprocess.run([*enter, *command], check=True)


@contextmanager
def _namespace() -> Iterator[int]:
    """Makes another network namespace, joined to this one; yields a process in it."""
    with subprocess.Popen(["unshare", "--net", "sleep", "infinity"]) as holder:
        try:
            own = os.readlink("/proc/self/ns/net")
            while os.readlink(f"/proc/{holder.pid}/ns/net") == own:
                time.sleep(0.01)
            _run("ip", "link", "add", CARDS[0], "type", "veth", "peer", "name", CARDS[1])
            _run("ip", "link", "set", CARDS[1], "netns", str(holder.pid))
            for card, address, inside in [(CARDS[0], HERE, None), (CARDS[1], THERE, holder.pid)]:
                _run("ip", "addr", "add", f"{address}/24", "dev", card, inside=inside)
                _run("ip", "link", "set", card, "up", inside=inside)
                _run("ip", "link", "set", "lo", "up", inside=inside)
            yield holder.pid
        finally:
            holder.kill()


@contextmanager
def _server(inside: int) -> Iterator[str]:
    """Starts a server there; yields its address."""
    command = ["nsenter", "-t", str(inside), "-n", sys.executable, "-m", "fastps", "serve", "--insecure"]
    command += ["--listen", f"{THERE}:0"]
    env = {**os.environ, "FASTPS_LOG": "error"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
        try:
            assert process.stdout
            yield process.stdout.readline().split()[-1]
        finally:
            process.terminate()


def _limit(inside: int, megabits: int) -> None:
    """Limits the bandwidth of each direction, in bursts of 2 ms."""
    for card, where in zip(CARDS, (None, inside), strict=True):
        queue = ["tbf", "rate", f"{megabits}mbit", "burst", f"{max(32, megabits // 4)}kb", "latency", "50ms"]
        _run("tc", "qdisc", "replace", "dev", card, "root", *queue, inside=where)


def _card_bytes() -> tuple[int, int]:
    """Bytes sent and received by the card here."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    counters = next(line for line in lines if line.strip().startswith(f"{CARDS[0]}:")).split()[1:]
    return int(counters[8]), int(counters[0])


def _timed(step: Step, seconds: float) -> float:
    """Median nanoseconds of a step, over as many as fit, at least two."""
    times: list[int] = []
    until = time.monotonic() + seconds
    while len(times) < 2 or time.monotonic() < until:
        begin = time.perf_counter_ns()
        step()
        times.append(time.perf_counter_ns() - begin)
    return statistics.median(times)


def _measure(quick: bool) -> dict[str, dict[str, float]]:
    """Runs in a separate namespace; returns nanoseconds and shares by rate."""
    parameters = PARAMETERS // (16 if quick else 1)
    gradient = np.random.default_rng(1).normal(scale=1e-3, size=parameters).astype(np.float32)
    grads, out = {"w": gradient}, {"w": np.zeros_like(gradient)}
    results: dict[str, dict[str, float]] = {}
    with _namespace() as inside, _server(inside) as address, fastps.connect(address, timeout=120) as ps:
        ps.register("w", np.zeros_like(gradient), optimizer=fastps.SGD(lr=0.01))
        bound = ps.bind(grads, codec=fastps.OneBit())
        pushes: dict[str, Step] = {
            "float32": lambda: ps.push(grads),
            "int8": lambda: ps.push(grads, codec=fastps.Int8()),
            "onebit": lambda: ps.push(bound),
        }
        for name, megabits in RATES.items():
            _limit(inside, megabits)
            # The congestion control finds the new rate.
            pushes["int8"]()
            bits_in_a_ns = megabits / 1000
            before, begin = _card_bytes(), time.perf_counter_ns()
            both = _timed(lambda: ps.push_pull(grads, out=out), 0)
            after, passed = _card_bytes(), time.perf_counter_ns() - begin
            shares = [8 * (new - old) / passed / bits_in_a_ns for new, old in zip(after, before, strict=True)]
            results[name] = {"both": both, "out": shares[0], "in": shares[1]}
            results[name]["payload"] = 8 * gradient.nbytes / both / bits_in_a_ns
            results[name] |= {codec: _timed(push, 2) for codec, push in pushes.items()}
    return results


def links(quick: bool) -> list[str]:
    """The table."""
    missing = [tool for tool in TOOLS if not shutil.which(tool)]
    if missing or os.geteuid() != 0:
        return [f"Not measured here: it takes root and {', '.join(TOOLS)}."]
    command = ["unshare", "--net", sys.executable, "-m", "data_plane.links", "--quick" if quick else "--full"]
    made = subprocess.run(command, cwd=BENCHMARKS, stdout=subprocess.PIPE, text=True, check=False)
    if made.returncode:
        return ["Not measured here: namespaces, veth or tbf are not to be had."]

    def row(name: str, result: dict[str, float]) -> list[str]:
        cells = [
            name,
            readable(result["both"]),
            *(f"{100 * result[key]:.1f} %" for key in ("out", "in", "payload")),
        ]
        cells.append(readable(result["float32"]))
        codecs = ("int8", "onebit")
        return cells + [f"{readable(result[c])} ({result['float32'] / result[c]:.1f} x)" for c in codecs]

    columns = [
        "link",
        "push_pull",
        "of the link out",
        "and in",
        "of it payload, each way",
        "push float32",
        "push int8",
        "push onebit",
    ]
    results: dict[str, dict[str, float]] = json.loads(made.stdout)
    control = Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
    lines = table(columns, (row(*item) for item in results.items()))
    return [*lines, "", f"TCP's congestion control is `{control}`."]


if __name__ == "__main__":
    print(json.dumps(_measure(sys.argv[1] == "--quick")))
