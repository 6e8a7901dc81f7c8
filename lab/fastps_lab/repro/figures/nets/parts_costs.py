"""Costs of models in parts: their computation and their messages; ``python -m`` of this module prints JSON.

The computation of a part is that of a replica that has only this part, alone on the machine and beside
another one. The cost of a message is the slope, by the number of layers, of a step of two processes that only
exchange values.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import time
from typing import Any

import torch

from fastps.commands.kit.children import ONE_THREAD, python_module
from fastps.torch import parallel
from fastps_lab.repro.costs.timing import quickest
from fastps_lab.repro.figures.nets.parts import NETS, PARTS
from fastps_lab.repro.figures.nets.parts_model import (
    exchange_inputs,
    exchange_of,
    graph_of,
    inputs,
    share_inputs,
    share_of,
)

MODULE = "fastps_lab.repro.figures.nets.parts_costs"
#: float32 elements of the small and the large value of an exchange, and its numbers of layers.
SMALL, LARGE, EXCHANGES = 1, 1 << 16, (1, 9)


def share(net: str, parts: int, seconds: float) -> float:
    """Seconds of the computation of one of several parts; two processes begin together."""
    batch = share_inputs(net, parts)
    with parallel.Replica.local(share_of(net, parts)) as replica:
        replica.step(**batch)
        if os.environ["WORLD_SIZE"] != "1":
            torch.distributed.init_process_group("gloo")
            torch.distributed.barrier()
        return quickest(lambda: replica.step(**batch), seconds)


def one_of_two(graph: Any, batch: dict[str, Any], steps: int) -> list[float]:
    """Seconds of the steps of this process's part."""
    found = []
    with parallel.Replica(graph, timeout=60) as replica:
        for _ in range(steps):
            begin = time.perf_counter()
            replica.step(**batch)
            found.append(time.perf_counter() - begin)
    return found


def exchange(size: int, layers: int, seconds: float) -> float:
    """Seconds of a step of two parts that compute next to nothing."""
    steps: list[float] = run(2, "exchange", str(size), str(layers), str(int(seconds / 0.01)))
    return min(steps)


def message(seconds: float) -> dict[str, float]:
    """Seconds of a message without content, its bytes per second, and seconds of the rest of a step."""
    few, many = (exchange(SMALL, layers, seconds) for layers in EXCHANGES)
    large = exchange(LARGE, EXCHANGES[1], seconds) - exchange(LARGE, EXCHANGES[0], seconds)
    messages = 2 * (EXCHANGES[1] - EXCHANGES[0])
    each = (many - few) / messages
    return {
        "seconds": each,
        "bandwidth": 4 * LARGE / (large / messages - each),
        # without the messages of its exchanges, and those to the part with the loss and back
        "end": max(0.0, few - 2 * (EXCHANGES[0] + 1) * each),
    }


def run(processes: int, *job: str) -> Any:
    """Runs a job in processes of their own; the result of the first one."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    running = []
    for rank in range(processes):
        own = {"RANK": rank, "WORLD_SIZE": processes, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environment = {**os.environ, **ONE_THREAD, **{name: str(value) for name, value in own.items()}}
        running.append(
            subprocess.Popen(python_module(MODULE, *job), env=environment, stdout=subprocess.PIPE, text=True)
        )
    try:
        found = [json.loads(process.communicate(timeout=300)[0]) for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()
    return found[0]


def work(job: str, *arguments: str) -> Any:
    """Measurement of one process: seconds of a part's computation, or of each of its steps."""
    if job == "share":
        net, parts, seconds = arguments
        return share(net, int(parts), float(seconds))
    if job == "exchange":
        size, layers, steps = map(int, arguments)
        return one_of_two(exchange_of(layers), exchange_inputs(size), steps)
    net, steps = arguments[0], int(arguments[1])
    return one_of_two(graph_of(net, 2), inputs(net, 2), steps)


def main(seconds: float) -> None:
    """Prints all costs of parts."""
    parts, two = {}, {}
    for net in NETS:
        parts[net] = {str(p): run(1, "share", net, str(p), str(2 * seconds)) for p in PARTS}
        steps = max(100, int(seconds / parts[net]["1"]))
        times: list[float] = run(2, "two", net, str(steps))
        beside = run(2, "share", net, "2", str(2 * seconds))
        two[net] = {"beside": beside, "quickest": min(times), "median": statistics.median(times)}
    print(json.dumps({"parts": parts, "message": message(seconds), "two_parts": two}))


if __name__ == "__main__":
    if len(sys.argv) > 2:
        print(json.dumps(work(*sys.argv[1:])))
    else:
        main(float(sys.argv[1]))
