"""Push and pull over loopback, a Unix socket, shared memory and TLS, against raw sockets and raw memory.

One step pushes N bytes of float32 gradient, has the server apply SGD, and returns N bytes of values. The
server is one shard in its own process; the references `reference/raw_socket.c` and
`reference/shared_memory.c` are built here. All variants alternate within each round, so that other load on
the machine affects all of them, and the medians of all repetitions count. The bound for TLS follows from how
fast one core encrypts (`openssl speed`).
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import numpy as np
from harness import Step, readable, runner, settled, size_name, table, timed
from numpy.typing import NDArray
from processes import Reference, certificate, server_process

import fastps

SIZES = [4 << 10, 64 << 10, 1 << 20, 4 << 20, 64 << 20]
LR = 0.01
TLS = "push_pull, TLS"
AES_SHARE = 0.8
"""How much of one core's AES-GCM rate TLS is to reach."""
SOCKETS = "raw sockets"
UNIX = "raw Unix sockets"
MEMORY = "raw memory"
REFERENCES = (SOCKETS, UNIX, MEMORY)

Arrays = dict[str, NDArray[np.float32]]
Samples = dict[str, list[int]]


class Effort(NamedTuple):
    """Extent of the measurements."""

    rounds: int
    seconds_per_size: float
    most_per_round: int


FULL = Effort(rounds=12, seconds_per_size=12.0, most_per_round=100)
QUICK = Effort(rounds=3, seconds_per_size=1.5, most_per_round=20)


def aes_rate() -> float:
    """Bytes of TLS records that one core encrypts by AES-128-GCM in a nanosecond."""
    command = [
        "openssl",
        "speed",
        "-mr",
        "-elapsed",
        "-seconds",
        "1",
        "-bytes",
        "16384",
        "-evp",
        "aes-128-gcm",
    ]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return float(printed.rsplit(":", 1)[1]) / 1e9


def variants(
    unchecked: fastps.ParameterServer,
    checked: fastps.ParameterServer,
    unix: fastps.ParameterServer,
    shared: fastps.ParameterServer,
    tls: fastps.ParameterServer,
    size: int,
) -> dict[str, Step]:
    """One step of each kind, on a separate tensor of `size` bytes."""
    n = size // 4
    gradient = np.random.default_rng(size).normal(scale=1e-3, size=n).astype(np.float32)

    def tensor(variant: str, ps: fastps.ParameterServer = unchecked) -> tuple[Arrays, Arrays]:
        """A gradient, and the memory that values are pulled into."""
        name = f"{variant} {size}"
        ps.register(name, np.zeros(n, np.float32), optimizer=fastps.SGD(lr=LR))
        return {name: gradient}, {name: np.zeros(n, np.float32)}

    def push_pull(ps: fastps.ParameterServer, variant: str, codec: fastps.Codec | None = None) -> Step:
        grads, out = tensor(variant, ps)
        return lambda: ps.push_pull(grads, out=out, codec=codec)

    def push_then_pull(variant: str) -> Step:
        grads, out = tensor(variant)

        def step() -> None:
            unchecked.push(grads)
            unchecked.pull(list(out), out=out)

        return step

    def bound_push_pull(variant: str, codec: fastps.Codec) -> Step:
        grads, out = tensor(variant)
        bound = unchecked.bind(grads, codec=codec)
        return lambda: unchecked.push_pull(bound, out=out)

    return {
        "push_pull": push_pull(unchecked, "fused"),
        "push_pull, checked": push_pull(checked, "checked"),
        "push_pull, Unix": push_pull(unix, "unix"),
        TLS: push_pull(tls, "tls"),
        "push, then pull": push_then_pull("two calls"),
        "int8": push_pull(unchecked, "int8", fastps.Int8()),
        "onebit": bound_push_pull("onebit", fastps.OneBit()),
        "push_pull, shared memory": push_pull(shared, "shared"),
    }


def measure(references: dict[str, Reference], steps: dict[str, Step], size: int, effort: Effort) -> Samples:
    """All variants, turn by turn. A first step of each warms up; a second one says how many fit the time."""
    for step in steps.values():
        step()
    for reference in references.values():
        reference.step(size, 1)
    one_of_each = sum(timed(step) for step in steps.values())
    one_of_each += sum(sum(reference.step(size, 1)) for reference in references.values())
    fit = int(effort.seconds_per_size * 1e9 / effort.rounds / one_of_each)
    repetitions = max(1, min(effort.most_per_round, fit))
    runners = {name: reference.runner(size) for name, reference in references.items()}
    runners |= {name: runner(step) for name, step in steps.items()}
    # The first steps of a turn find both processes on one core.
    runners = {name: settled(run, min(20, repetitions)) for name, run in runners.items()}
    samples: Samples = {name: [] for name in runners}
    for _ in range(effort.rounds):
        for name, run in runners.items():
            samples[name] += run(repetitions)
    return samples


def rows(results: dict[int, Samples]) -> list[str]:
    """Medians, and in brackets the ratio to the reference of the same kind."""
    names = [name for name in next(iter(results.values())) if name not in REFERENCES]

    def row(size: int, samples: Samples) -> list[str]:
        raw = {name: statistics.median(samples[name]) for name in REFERENCES}

        def cell(name: str) -> str:
            median = statistics.median(samples[name])
            kind = MEMORY if "shared memory" in name else UNIX if "Unix" in name else SOCKETS
            return f"{readable(median)} ({median / raw[kind]:.2f})"

        medians = [readable(median) for median in raw.values()]
        return [size_name(size), *medians, *map(cell, names), str(len(samples[SOCKETS]))]

    columns = ["N", *REFERENCES, *names, "repetitions"]
    return table(columns, (row(size, samples) for size, samples in results.items()))


def verdict(results: dict[int, Samples]) -> list[str]:
    """In words: where float32 `push_pull` wins and loses."""
    lines: list[str] = []
    for ours, theirs in [
        ("push_pull", SOCKETS),
        ("push_pull, Unix", UNIX),
        ("push_pull, shared memory", MEMORY),
    ]:
        won: list[str] = []
        lost: list[str] = []
        for size, samples in results.items():
            ratio = statistics.median(samples[ours]) / statistics.median(samples[theirs])
            (won if ratio <= 1 else lost).append(f"{size_name(size)} ({ratio:.2f})")
        lines += [
            f"`{ours}` against {theirs}: at least as fast at {', '.join(won) or 'no size'}; "
            f"slower at {', '.join(lost) or 'no size'}.",
            "",
        ]
    return lines[:-1]


def encrypted(results: dict[int, Samples], rate: float) -> list[str]:
    """In words: what TLS adds, against what encrypting every byte of both directions once would take."""
    words: list[str] = []
    for size, samples in results.items():
        plain, tls = (statistics.median(samples[name]) for name in ("push_pull", TLS))
        allowed = plain + 2 * size / (AES_SHARE * rate)
        words.append(f"{size_name(size)} {tls / plain:.2f} x ({allowed / plain:.2f})")
    return [
        f"TLS: one core encrypts {rate:.1f} GB/s (`openssl speed -evp aes-128-gcm`, records of 16 KiB). "
        f"Time against plain `push_pull`, and in brackets what {AES_SHARE} of that rate would add for "
        f"the bytes of both directions: {', '.join(words)}."
    ]


def steps(quick: bool) -> list[str]:
    """The table, and its summary in words."""
    effort = QUICK if quick else FULL
    results: dict[int, Samples] = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        references = {
            SOCKETS: Reference.sockets(folder, max(SIZES)),
            UNIX: Reference.sockets(folder, max(SIZES), "unix"),
            MEMORY: Reference.memory(folder, max(SIZES)),
        }
        for reference in references.values():
            stack.callback(reference.close)
        address = stack.enter_context(server_process())
        server_files, client_files = certificate(folder)
        encrypting = stack.enter_context(server_process(**server_files))
        rate = aes_rate()
        unchecked = stack.enter_context(fastps.connect(address, check_finite=False, transport="tcp"))
        checked = stack.enter_context(fastps.connect(address, check_finite=True, transport="tcp"))
        unix = stack.enter_context(fastps.connect(address, check_finite=False, transport="unix"))
        shared = stack.enter_context(fastps.connect(address, check_finite=False, transport="shm"))
        tls = stack.enter_context(
            fastps.connect(encrypting, check_finite=False, transport="tcp", **client_files)
        )
        for size in SIZES:
            of_size = variants(unchecked, checked, unix, shared, tls, size)
            results[size] = measure(references, of_size, size, effort)
            print(rows({size: results[size]})[-1], file=sys.stderr, flush=True)
    return [*rows(results), "", *verdict(results), "", *encrypted(results, rate)]
