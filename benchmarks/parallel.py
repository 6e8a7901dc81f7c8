"""Model parallelism: two parts against one, a throttled link, and messages against bare gloo.

    python benchmarks/parallel.py [--quick] [--output benchmarks/README.md]

Nets are a convolutional one (32 x 32 images, two layers of 16 channels), cut by rows and by layers, a fully
connected one (4 layers of 1,024), and a small fully connected one (3 layers of 64). A step is forward and
backward of a batch, without an optimizer. Each part has one thread. The throttled link is a pair of network
namespaces with a token bucket, if the system permits them.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import queue
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import torch
import torch.distributed as dist
from harness import machine, readable, size_name, table, write_between_markers
from torch import nn

from fastps.torch import parallel
from fastps.torch.parallel.links.gloo import Gloo
from fastps.torch.parallel.links.messages import Kind, Message

ROOT = Path(__file__).resolve().parent.parent
SIDE = 32
SIZES = (4096, 1 << 20)
#: Megabits a second of the throttled link.
RATES = (1000, 300, 100, 30)
NETS = {
    "convolutional, by rows": ("rows", 32, 1),
    "convolutional, by layers": ("layers", 32, 4),
    "fully connected, by layers": ("dense", 128, 4),
    "small, fully connected": ("small", 32, 1),
}


# -- a part --------------------------------------------------------------------------------------------------


def built(kind: str, parts: int) -> parallel.Graph:
    """The graph of a net in parts."""
    graph = parallel.Graph()
    value = graph.input("image")
    if kind in ("rows", "layers"):
        spec = importlib.util.spec_from_file_location("example", ROOT / "examples/model_parallel.py")
        example = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(example)
        value = (example.by_rows if kind == "rows" else example.by_layers)(graph, value, SIDE, parts)
    else:
        width, layers = {"dense": (1024, 4), "deep": (1024, 8), "small": (64, 3)}[kind]
        value = graph.node("flat", lambda x: x.flatten(1)[:, :width], value, part=0)
        for k in range(layers):
            make = lambda: nn.Sequential(nn.Linear(width, width), nn.ReLU())  # noqa: E731
            value = graph.node(f"layer{k}", value, part=k * parts // layers, make=make)
    graph.loss(nn.functional.cross_entropy, value, graph.input("label"))
    return graph


def steps(kind: str, batch: int, micro_batches: int, seconds: float) -> float:
    """Seconds of a step: the median over some seconds."""
    size = dist.get_world_size()
    graph = built(kind, size)
    image, label = torch.randn(batch, 1, SIDE, SIDE), torch.randint(0, 10, (batch,))
    replica = parallel.Replica(graph, timeout=60) if size > 1 else parallel.Replica.local(graph)

    def step() -> float:
        begun = time.perf_counter()
        replica.step(image=image, label=label, micro_batches=micro_batches)
        return time.perf_counter() - begun

    with replica:
        warm = torch.tensor([max(step() for _ in range(3))])
        dist.all_reduce(warm, dist.ReduceOp.MAX)  # the same number of steps on both parts
        return statistics.median(step() for _ in range(max(5, min(300, int(seconds / float(warm))))))


def messages(size: int, rounds: int) -> tuple[float, float]:
    """Seconds of one message by bare gloo and by ours: medians of alternating there-and-back."""
    group, rank = dist.group.WORLD, dist.get_rank()
    tensor, buffer = torch.zeros(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    links, turns = Gloo(group, 60.0), 100 if size <= 4096 else 20

    def bare() -> None:
        if rank == 0:
            group.send([tensor], 1, 1).wait()
        group.recv([buffer], 1 - rank, 1).wait()
        if rank == 1:
            group.send([tensor], 0, 1).wait()

    def ours() -> None:
        message = Message(Kind.VALUE, 1, tensor=tensor)
        if rank == 0:
            links.send(1, message)
        links.inbox.get(timeout=60)
        if rank == 1:
            links.send(0, message)

    times: dict[object, list[float]] = {bare: [], ours: []}
    for _ in range(rounds):
        for way, found in times.items():
            begun = time.perf_counter()
            for _ in range(turns):
                way()
            found.append((time.perf_counter() - begun) / turns / 2)
            dist.barrier()
            links.settle()
    links.send(1 - rank, Message(Kind.CLOSE))
    with contextlib.suppress(queue.Empty):
        links.inbox.get(timeout=5)
    links.close(broken=False)
    return statistics.median(times[bare]), statistics.median(times[ours])


def work(threads: int) -> None:
    """A process: takes jobs as lines of JSON."""
    torch.set_num_threads(threads)
    dist.init_process_group("gloo")
    for line in sys.stdin:
        job = json.loads(line)
        result = (steps if job[0] == "steps" else messages)(*job[1:])
        print(json.dumps(result), flush=True)


# -- all processes -------------------------------------------------------------------------------------------


class Processes:
    """Processes that are the parts of a replica."""

    def __init__(
        self, count: int, threads: int = 1, namespaces: tuple[str, ...] = (), host: str = "127.0.0.1"
    ) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        self._processes = []
        for rank in range(count):
            command = [sys.executable, __file__, "--work", str(threads)]
            if namespaces:
                command = ["ip", "netns", "exec", namespaces[rank], *command]
            own = {"RANK": rank, "WORLD_SIZE": count, "MASTER_ADDR": host, "MASTER_PORT": port}
            if namespaces:
                own["GLOO_SOCKET_IFNAME"] = f"veth{rank}"
            environment = {**os.environ, **{name: str(value) for name, value in own.items()}}
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            self._processes.append(subprocess.Popen(command, env=environment, **pipes))

    def do(self, *job: object) -> object:
        """Sends a job to all processes; returns the result of the first."""
        for process in self._processes:
            process.stdin.write(json.dumps(job) + "\n")
            process.stdin.flush()
        found = [json.loads(process.stdout.readline()) for process in self._processes]
        return found[0]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            for process in self._processes:
                process.stdin.close()
            for process in self._processes:
                process.wait(60)
        finally:
            for process in self._processes:
                process.kill()
                process.wait()


@contextlib.contextmanager
def throttled() -> Iterator[tuple[str, str] | None]:
    """Two network namespaces with a link between them; None if the system does not permit them."""
    names = ("fastps-bench-0", "fastps-bench-1")

    def ip(*arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True, capture_output=True)

    try:
        for name in names:
            ip("netns", "add", name)
        ip(
            "link",
            "add",
            "veth0",
            "netns",
            names[0],
            "type",
            "veth",
            "peer",
            "name",
            "veth1",
            "netns",
            names[1],
        )
        for k, name in enumerate(names):
            ip("-n", name, "addr", "add", f"10.77.0.{k + 1}/24", "dev", f"veth{k}")
            ip("-n", name, "link", "set", f"veth{k}", "up")
            ip("-n", name, "link", "set", "lo", "up")
        limit(names, RATES[0])
        yield names
    except (OSError, subprocess.CalledProcessError):
        yield None
    finally:
        for name in names:
            with contextlib.suppress(OSError):
                subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def limit(names: tuple[str, str], rate: int) -> None:
    """Sets the link's speed in both directions."""
    for k, name in enumerate(names):
        shape = ["root", "tbf", "rate", f"{rate}mbit", "burst", "128kb", "latency", "200ms"]
        command = ["ip", "netns", "exec", name, "tc", "qdisc", "replace", "dev", f"veth{k}", *shape]
        subprocess.run(command, check=True, capture_output=True)


def ratios(found: dict[str, list[float]], name: str, reference: str) -> float:
    """How many times as fast as the reference: the median of the rounds' ratios."""
    pairs = zip(found[reference], found[name], strict=True)
    return statistics.median(theirs / ours for theirs, ours in pairs)


def measured(rounds: int, seconds: float) -> tuple[dict, dict, list]:
    """Seconds of steps by net and way; speed-up by net and rate; message times."""
    with (
        throttled() as names,
        Processes(1) as one,
        Processes(1, 2) as two_threads,
        Processes(2) as two,
        Processes(2, 1, names, "10.77.0.1") if names else contextlib.nullcontext() as apart,
    ):
        ways = {"one thread": one, "two threads": two_threads, "two parts": two}
        times = {net: {way: [] for way in ways} for net in NETS}
        slowed: dict[str, dict[int, list[float]]] = {net: {rate: [] for rate in RATES} for net in NETS}
        for turn in range(rounds):
            for net, job in NETS.items():
                print(f"round {turn + 1} of {rounds}: {net}", file=sys.stderr, flush=True)
                for way, processes in ways.items():
                    times[net][way].append(processes.do("steps", *job, seconds))
                for rate in RATES if apart else ():
                    limit(names, rate)
                    slowed[net][rate].append(times[net]["one thread"][-1] / apart.do("steps", *job, seconds))
        sent = [two.do("messages", size, 40) for size in SIZES]
    speeds = {
        net: {rate: statistics.median(times) for rate, times in found.items() if times}
        for net, found in slowed.items()
    }
    return times, speeds, sent


def draw(times: dict, speeds: dict, path: Path) -> None:
    """Speed-up against parts, and against the link's speed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    FigureCanvasAgg(figure)
    by_parts, by_rate = figure.subplots(1, 2)
    for k, net in enumerate(NETS):
        colour = f"C{k}"
        by_parts.plot(
            [1, 2], [1, ratios(times[net], "two parts", "one thread")], "o-", color=colour, label=net
        )
        if speeds[net]:
            by_rate.plot(list(speeds[net]), list(speeds[net].values()), "o-", color=colour, label=net)
    by_parts.set(
        xlabel="parts, one thread each", ylabel="speed-up over one part", xticks=[1, 2], ylim=(0, 2.2)
    )
    by_rate.set(
        xlabel="link between 2 parts (Mbit/s)", xscale="log", ylabel="speed-up over one part", ylim=(0, 2.2)
    )
    for axes in (by_parts, by_rate):
        axes.axhline(1, color="#555555", lw=1, ls="--")
        axes.grid(alpha=0.25)
    by_parts.legend(fontsize=8)
    figure.savefig(path, dpi=110)


def report(times: dict, speeds: dict, sent: list) -> list[str]:
    """The tables."""
    rows = []
    for net, found in times.items():
        one, two, threads = (
            statistics.median(found[w]) * 1e9 for w in ("one thread", "two parts", "two threads")
        )
        best = [f"{ratios(found, 'two parts', way):.2f}" for way in ("one thread", "two threads")]
        rows.append([net, readable(one), readable(threads), readable(two), *best])
    columns = [
        "a step of",
        "1 part, 1 thread",
        "1 part, 2 threads",
        "2 parts",
        "speed-up over 1 thread",
        "over 2 threads",
    ]
    lines = [*table(columns, rows), ""]
    if any(speeds.values()):
        rates = [f"{rate} Mbit/s" for rate in RATES]
        cells = [[net, *(f"{value:.2f}" for value in found.values())] for net, found in speeds.items()]
        lines += [*table(["speed-up of 2 parts over a throttled link", *rates], cells), ""]
    else:
        lines += ["The throttled link was not measured: the system permits no network namespaces.", ""]
    rows = []
    for size, (bare, ours), most in zip(SIZES, sent, (3.0, 1.2), strict=True):
        ratio = ours / bare
        cells = [size_name(size), readable(bare * 1e9), readable(ours * 1e9), f"{ratio:.2f}", f"<= {most}"]
        rows.append([*cells, "yes" if ratio <= most else "**no**"])
    return [*lines, *table(["a message of", "bare gloo", "ours", "ratio", "asked", "reached"], rows)]


def main() -> None:
    """Measures, prints, writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--output", type=Path, help="write the tables there, and the picture beside it")
    parser.add_argument("--work", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        work(arguments.work)
        return
    facts = machine()
    found = measured(*((1, 0.5) if arguments.quick else (3, 1.0)))
    lines = [*facts, "", *report(*found)]
    print("\n".join(lines))
    if arguments.output:
        draw(*found[:2], arguments.output.parent / "parallel.png")
        command = " ".join(["python", "benchmarks/parallel.py", *sys.argv[1:]])
        write_between_markers(arguments.output, "parallel", [f"`{command}`", "", *lines])


if __name__ == "__main__":
    main()
