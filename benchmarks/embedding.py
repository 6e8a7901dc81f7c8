"""An embedding table on a server: two clients pull and push rows by Zipf's law over TCP.

    python benchmarks/embedding.py [--quick] [--output benchmarks/README.md]

In each step a client pulls the rows of a batch and pushes a gradient for them; the server applies Adagrad.
A row's frequency is independent of its position. The references run in the same rounds: two pairs of
`reference/raw_socket.c` that move as many bytes in one piece, and one NumPy thread that does the arithmetic
on its own table. A further part measures a push of 1,000 rows in a small and in a large table. Tables of 10
million rows take 5 GB, values and state; at most two exist at a time.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from harness import Turns, machine, readable, runner, table, write_between_markers
from processes import Child, Reference, server_process

import fastps

WIDTH, BATCH, CLIENTS = 64, 4096, 2
NAME = "table"
TARGET = 1.5
OPTIMIZER = fastps.Adagrad(lr=0.05)
# Rows of a slice of a float32 tensor of this width.
ROWS_PER_SLICE = 63 * 4096 // WIDTH


class Size(NamedTuple):
    """Extent of the measurements."""

    rows: int
    rounds: int
    seconds: float


FULL = Size(rows=10_000_000, rounds=6, seconds=2.0)
QUICK = Size(rows=1_000_000, rounds=2, seconds=1.0)


def zipf(rng: np.random.Generator, rows: int, count: int) -> Any:
    """Row numbers by Zipf's law with exponent 1, scattered over the table."""
    rank = np.exp(rng.random(count) * np.log(rows + 1)).astype(np.int64) - 1
    return rank.clip(0, rows - 1) * 2_654_435_761 % rows


def batches(rows: int, seed: int, count: int = 64) -> list[Any]:
    """The rows of a number of steps."""
    rng = np.random.default_rng(seed)
    return [zipf(rng, rows, BATCH) for _ in range(count)]


def for_a_while(step: Callable[[Any], object], of: list[Any], seconds: float) -> float:
    """Steps a second."""
    steps, began = 0, time.monotonic()
    while time.monotonic() < began + seconds:
        step(of[steps % len(of)])
        steps += 1
    return steps / (time.monotonic() - began)


def client(pipe: Connection, address: str, rows: int, seed: int) -> None:
    """A client in its own process."""
    of, out = batches(rows, seed), np.zeros((BATCH, WIDTH), np.float32)
    gradient = np.random.default_rng(seed).normal(scale=0.1, size=(BATCH, WIDTH)).astype(np.float32)
    with fastps.connect(address, transport="tcp") as ps:

        def step(indices: Any) -> None:
            ps.pull(NAME, indices=indices, out=out)
            ps.push(NAME, fastps.Sparse(indices, gradient))

        step(of[0])
        pipe.send("ready")
        while question := pipe.recv():
            pipe.send(for_a_while(step, of, *question))


def numpy_step(rows: int) -> Callable[[Any], None]:
    """The same arithmetic on this process's own memory."""
    values, sums = (np.full((rows, WIDTH), 0, np.float32) for _ in range(2))
    gradient = np.random.default_rng(0).normal(scale=0.1, size=(BATCH, WIDTH)).astype(np.float32)
    out = np.empty_like(gradient)

    def step(indices: Any) -> None:
        np.take(values, indices, axis=0, out=out)
        once, places = np.unique(indices, return_inverse=True)
        summed = np.zeros((len(once), WIDTH), np.float32)
        np.add.at(summed, places, gradient)
        total = sums[once] + summed * summed
        sums[once] = total
        values[once] -= np.float32(0.05) * summed / (np.sqrt(total) + np.float32(1e-10))

    return step


@contextmanager
def raw_sockets() -> Iterator[Callable[[float], float]]:
    """As many pairs as there are clients, a batch's values there and back; steps a second of all."""
    size = 4 * BATCH * WIDTH
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        pairs = [Reference.sockets(folder, size) for _ in range(CLIENTS)]
        for pair in pairs:
            stack.callback(pair.close)
        pool = stack.enter_context(ThreadPoolExecutor(CLIENTS))
        count = max(1, int(1e8 / statistics.median(pairs[0].step(size, 20))))

        def steps_of(pair: Reference, seconds: float) -> float:
            return for_a_while(lambda count: pair.step(size, count), [count], seconds) * count

        yield lambda seconds: sum(pool.map(lambda pair: steps_of(pair, seconds), pairs))


def speeds(size: Size, shards: int) -> dict[str, list[float]]:
    """Million rows a second, each of them pulled and pushed, round by round."""
    samples: dict[str, list[float]] = {"raw sockets": [], "NumPy": [], "fastps": []}
    with ExitStack() as stack:
        address = stack.enter_context(server_process(shards=shards))
        with fastps.connect(address) as ps:
            ps.register(NAME, np.zeros((size.rows, WIDTH), np.float32), OPTIMIZER, timeout=120)
        clients = [Child(client, address, size.rows, seed) for seed in range(CLIENTS)]
        for child in clients:
            stack.callback(child.close)
            child.pipe.recv()
        raw = stack.enter_context(raw_sockets())
        local, of = numpy_step(size.rows), batches(size.rows, CLIENTS)

        def ours(seconds: float) -> float:
            for child in clients:
                child.pipe.send((seconds,))
            return sum(child.pipe.recv() for child in clients)

        ways = {
            "raw sockets": raw,
            "NumPy": lambda seconds: for_a_while(local, of, seconds),
            "fastps": ours,
        }
        for turn in range(1 + size.rounds):
            for name, way in ways.items():
                rate = way(size.seconds) * BATCH / 1e6
                # The first round warms up.
                samples[name] += [rate] * (turn > 0)
    return samples


def speed(size: Size) -> list[str]:
    """Speed of pulling and pushing rows, with one shard and with one for each client."""
    rows = []
    for shards in (1, CLIENTS):
        samples = speeds(size, shards)
        of = {name: statistics.median(values) for name, values in samples.items()}
        pairs = [zip(samples["fastps"], samples[name], strict=True) for name in ("raw sockets", "NumPy")]
        ratios = [statistics.median(ours / theirs for ours, theirs in pair) for pair in pairs]
        reached = "yes" if of["fastps"] >= TARGET else "**no**"
        figures = [f"{figure:.2f}" for figure in (*of.values(), *ratios)]
        rows.append([str(shards), *figures, f">= {TARGET:g}", reached])
    head = ["shards", "raw sockets", "NumPy", "fastps", "/ raw sockets", "/ NumPy", "target", "reached"]
    each = batches(size.rows, CLIENTS)
    once = [len(np.unique(indices)) for indices in each]
    slices = [len(np.unique(indices // ROWS_PER_SLICE)) for indices in each]
    return [
        *table(head, rows),
        "",
        f"A batch of {BATCH:,} names {round(statistics.mean(once)):,} different rows in "
        f"{round(statistics.mean(slices)):,} of {-(-size.rows // ROWS_PER_SLICE):,} slices.",
    ]


def same_slices(rows: int) -> list[Any]:
    """Lists of 1,000 rows, 40 in each of 25 slices, spread over the whole tensor."""
    rng, slices = np.random.default_rng(1), 25
    apart = rows // ROWS_PER_SLICE // slices
    # The last slice of the small tensor is not a whole one.
    within = [np.sort(rng.choice(2_500, 40, replace=False)) for _ in range(20 * slices)]
    parts = [part + (k % slices) * max(1, apart) * ROWS_PER_SLICE for k, part in enumerate(within)]
    return [np.concatenate(parts[k : k + slices]) for k in range(0, len(parts), slices)]


def pushes(ps: fastps.ParameterServer, name: str, rows: int) -> Callable[[], object]:
    """Returns a step that pushes 1,000 rows."""
    ps.register(name, np.zeros((rows, WIDTH), np.float32), OPTIMIZER, timeout=120)
    gradient = np.ones((1000, WIDTH), np.float32)
    every = [fastps.Sparse(indices, gradient) for indices in same_slices(rows)]
    turn = iter(range(sys.maxsize))
    return lambda: ps.push(name, every[next(turn) % len(every)])


def tensors(size: Size) -> list[str]:
    """The time of a push of 1,000 rows, for tensors of different sizes."""
    small, large = 100_000, size.rows
    rows = []
    for where in ("in process", "TCP"):
        with ExitStack() as stack:
            ps: fastps.ParameterServer
            if where == "TCP":
                address = stack.enter_context(server_process())
                ps = stack.enter_context(fastps.connect(address, transport="tcp"))
            else:
                ps = stack.enter_context(fastps.Store())
            turns = Turns(
                {name: runner(pushes(ps, name, n)) for name, n in [("small", small), ("large", large)]},
                2 + 3 * size.rounds,
                0.1,
            )
        ratio = turns.ratio("large", "small")
        verdict = ["<= 1.2", "yes" if ratio <= 1.2 else "**no**"]
        rows.append(
            [where, readable(turns.time("small")), readable(turns.time("large")), f"{ratio:.2f}", *verdict]
        )
    columns = ["a push of 1,000 rows in 25 slices", f"of {small:,} rows", f"of {large:,}", "ratio"]
    return table([*columns, "target", "reached"], rows)


def main() -> None:
    """Measures, prints, writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a smaller table, fewer rounds")
    parser.add_argument("--output", type=Path, help="write the tables there, between their markers")
    arguments = parser.parse_args()
    size = QUICK if arguments.quick else FULL
    lines = [*machine(), "", *speed(size), "", *tensors(size)]
    print("\n".join(lines))
    if arguments.output:
        command = " ".join(["python", "benchmarks/embedding.py", *sys.argv[1:]])
        write_between_markers(arguments.output, "embedding", [f"`{command}`", "", *lines])


if __name__ == "__main__":
    main()
