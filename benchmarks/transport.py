"""Push and pull over loopback, a Unix socket, shared memory and TLS, against raw sockets and raw memory.

    python benchmarks/transport.py [--quick] [--sizes 4K,64K,1M,4M,64M] [--output benchmarks/README.md]

One step pushes N bytes of float32 gradient, has the server apply SGD, and brings the N bytes of values back.
The server is one shard in a process of its own; the references are `reference/raw_socket.c` and
`reference/shared_memory.c`, built here. All variants take turns within each round, so that whatever else
happens on the machine happens to all of them; medians of all repetitions. What TLS may cost follows from how
fast one core encrypts (`openssl speed`). The table goes to standard output and, between its two markers, into
`--output`.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import numpy as np
from harness import Step, compile_c, machine, readable, table, timed, write_between_markers
from numpy.typing import NDArray

import fastps

UNITS = {"K": 1 << 10, "M": 1 << 20}
LR = 0.01
TLS = "push_pull, TLS"
AES_SHARE = 0.8
"""How much of one core's AES-GCM rate TLS is to reach."""
SOCKETS = "raw sockets"
MEMORY = "raw memory"
REFERENCES = (SOCKETS, MEMORY)

Arrays = dict[str, NDArray[np.float32]]
Samples = dict[str, list[int]]


class Effort(NamedTuple):
    """How much is measured."""

    rounds: int
    seconds_per_size: float
    most_per_round: int


FULL = Effort(rounds=12, seconds_per_size=12.0, most_per_round=100)
QUICK = Effort(rounds=3, seconds_per_size=1.5, most_per_round=20)


class Reference:
    """Two processes of a C program; the client among them repeats steps on demand."""

    def __init__(self, client: list[str | Path], server: subprocess.Popen[str] | None = None) -> None:
        pipe = subprocess.PIPE
        self._server = server
        self._client = subprocess.Popen(client, stdin=pipe, stdout=pipe, text=True)

    @classmethod
    def sockets(cls, folder: Path, largest: int) -> Reference:
        """Over TCP loopback."""
        program = compile_c(folder / "raw_socket", ["raw_socket.c"])
        server = subprocess.Popen([program, "server", str(largest)], stdout=subprocess.PIPE, text=True)
        assert server.stdout is not None
        return cls([program, "client", server.stdout.readline().strip(), str(largest)], server)

    @classmethod
    def memory(cls, folder: Path, largest: int) -> Reference:
        """Through shared memory; its client makes the server."""
        return cls([compile_c(folder / "shared_memory", ["shared_memory.c"]), str(largest)])

    def step(self, size: int, repetitions: int) -> list[int]:
        """Nanoseconds of each repetition."""
        assert self._client.stdin is not None
        assert self._client.stdout is not None
        print(size, repetitions, file=self._client.stdin, flush=True)
        return [int(word) for word in self._client.stdout.readline().split()]

    def close(self) -> None:
        """Ends both processes."""
        self._client.communicate()
        if self._server:
            self._server.wait(10)


def certificate(folder: Path) -> tuple[dict[str, str], dict[str, str]]:
    """A certificate for this machine, as arguments of `fastps.serve` and of `fastps.connect`."""
    ca, key, cert = (str(folder / f"{name}.pem") for name in ("ca", "key", "cert"))
    ec = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-noenc"]
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1")
    for command in (
        ["req", "-x509", *ec, "-subj", "/CN=CA", "-keyout", folder / "ca-key.pem", "-out", ca],
        ["req", *ec, "-subj", "/CN=server", "-keyout", key, "-out", folder / "request"],
        [
            *("x509", "-req", "-in", folder / "request", "-CA", ca, "-CAkey", folder / "ca-key.pem"),
            *("-CAcreateserial", "-extfile", folder / "names", "-out", cert),
        ],
    ):
        subprocess.run(["openssl", *command], check=True, capture_output=True)
    return {"tls_cert": cert, "tls_key": key}, {"tls_ca": ca}


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


def _serve(pipe: Connection, files: dict[str, str]) -> None:
    with fastps.serve(shards=1, **files) as server:
        pipe.send(server.addresses)
        pipe.recv()


@contextmanager
def server_process(**files: str) -> Iterator[str]:
    """One shard in a process of its own, with these TLS files; its address."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, files), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours.recv()
        ours.send("stop")
        process.join(10)
    finally:
        process.kill()


def variants(
    unchecked: fastps.ParameterServer,
    checked: fastps.ParameterServer,
    unix: fastps.ParameterServer,
    shared: fastps.ParameterServer,
    tls: fastps.ParameterServer,
    size: int,
) -> dict[str, Step]:
    """One step of each kind, on a tensor of its own with `size` bytes."""
    n = size // 4
    gradient = np.random.default_rng(size).normal(scale=1e-3, size=n).astype(np.float32)

    def tensor(variant: str, ps: fastps.ParameterServer = unchecked) -> tuple[Arrays, Arrays]:
        """A gradient, and the memory that values are brought to."""
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
    samples: Samples = {name: [] for name in [*references, *steps]}
    for _ in range(effort.rounds):
        for name, reference in references.items():
            samples[name] += reference.step(size, repetitions)
        for name, step in steps.items():
            samples[name] += [timed(step) for _ in range(repetitions)]
    return samples


def size_name(size: int) -> str:
    """`65536` -> `64 KB`."""
    return f"{size >> 20} MB" if size >= 1 << 20 else f"{size >> 10} KB"


def rows(results: dict[int, Samples]) -> list[str]:
    """Medians, and in brackets the ratio to raw memory (shared memory) or to raw sockets (all others)."""
    names = [name for name in next(iter(results.values())) if name not in REFERENCES]

    def row(size: int, samples: Samples) -> list[str]:
        raw = {name: statistics.median(samples[name]) for name in REFERENCES}

        def cell(name: str) -> str:
            median = statistics.median(samples[name])
            return f"{readable(median)} ({median / raw[MEMORY if 'shared memory' in name else SOCKETS]:.2f})"

        medians = [readable(median) for median in raw.values()]
        return [size_name(size), *medians, *map(cell, names), str(len(samples[SOCKETS]))]

    columns = ["N", *REFERENCES, *names, "repetitions"]
    return table(columns, (row(size, samples) for size, samples in results.items()))


def verdict(results: dict[int, Samples]) -> list[str]:
    """In words: where float32 `push_pull` wins and loses."""
    won: list[str] = []
    lost: list[str] = []
    for size, samples in results.items():
        ratio = statistics.median(samples["push_pull"]) / statistics.median(samples[SOCKETS])
        (won if ratio <= 1 else lost).append(f"{size_name(size)} ({ratio:.2f})")
    return [
        f"`push_pull` against raw sockets: at least as fast at {', '.join(won) or 'no size'}; "
        f"slower at {', '.join(lost) or 'no size'}."
    ]


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


def parse_sizes(text: str) -> list[int]:
    """`4K,1M` -> bytes."""
    sizes = [int(word[:-1]) * UNITS[word[-1]] for word in text.upper().split(",")]
    if any(size <= 0 for size in sizes):
        raise ValueError(text)
    return sizes


def main() -> None:
    """Measures, prints, writes."""
    parser = argparse.ArgumentParser(description="Push and pull over TCP loopback against raw sockets.")
    parser.add_argument("--quick", action="store_true", help="seconds, not minutes: for a first look")
    parser.add_argument("--sizes", type=parse_sizes, default="4K,64K,1M,4M,64M", help="bytes (%(default)s)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the table between FILE's markers")
    arguments = parser.parse_args()
    effort = QUICK if arguments.quick else FULL
    command = " ".join(["python", "benchmarks/transport.py", *sys.argv[1:]])
    header = [f"`{command}`", "", *machine(), ""]
    results: dict[int, Samples] = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        largest = max(arguments.sizes)
        references = {
            SOCKETS: Reference.sockets(folder, largest),
            MEMORY: Reference.memory(folder, largest),
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
        for size in arguments.sizes:
            steps = variants(unchecked, checked, unix, shared, tls, size)
            results[size] = measure(references, steps, size, effort)
            print(rows({size: results[size]})[-1], file=sys.stderr, flush=True)
    lines = [*header, *rows(results), "", *verdict(results), "", *encrypted(results, rate)]
    print("\n".join(lines))
    if arguments.output:
        write_between_markers(arguments.output, "transport", lines)


if __name__ == "__main__":
    main()
