"""The time of `step()` in which the GPU idles, the bytes over PCIe, and the speed of these copies.

Rows differ in the size of the model and in the connection; each has all codecs and the modes that hide the
exchange. With a codec the GPU encodes; `BY_CPU` is the way in which float32 values cross and a core encodes
them. The server is a process with four shards.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
from device.row import Figures, Row, Setting
from device.trace import STEP, Copies, Steps, traced
from harness import readable, table
from processes import server_process
from torch import nn
from torch.profiler import record_function

import fastps
import fastps.torch
from fastps.torch import encode
from fastps.torch._params import Gpus
from pretended_gpu import PretendedGpu, pretended

SHARDS = 4
BATCH = 1024
RULE = fastps.SGD(lr=1e-4)


class Size(NamedTuple):
    """A model of square layers."""

    width: int
    layers: int
    #: Steps of a run, and runs that are timed.
    steps: int
    runs: int
    #: Seconds for the whole row.
    limit: float


SIZES = {"10 M": Size(1024, 10, 10, 3, 60.0), "100 M": Size(4096, 6, 3, 2, 110.0)}
SMALL = Size(128, 4, 2, 1, 60.0)
#: The way without fastps.
PLAIN = "torch.optim.SGD"
#: The way in which a CPU core encodes.
BY_CPU = "Int8 by the CPU"
WAYS: dict[str, dict[str, Any]] = {
    "float32": {},
    "BFloat16": {"codec": fastps.BFloat16()},
    BY_CPU: {"codec": fastps.Int8()},
    "Int8": {"codec": fastps.Int8()},
    "Int8, overlap": {"codec": fastps.Int8(), "mode": fastps.Async(overlap=True)},
    "OneBit": {"codec": fastps.OneBit()},
    "float32, push_in_backward": {"push_in_backward": True},
    "float32, overlap": {"mode": fastps.Async(overlap=True)},
}


def measure(size: str, transport: str, setting: Setting) -> Figures:
    """All ways over one connection, and torch's own optimizer."""
    with contextlib.ExitStack() as stack:
        gpu = stack.enter_context(pretended()) if setting.small else None
        shape = SMALL if setting.small else SIZES[size]
        address = stack.enter_context(server_process(shards=SHARDS))
        ps = stack.enter_context(fastps.connect(address, timeout=120.0, transport=transport))
        net = model(shape, gpu)
        scripts = {PLAIN: Script(net, torch.optim.SGD(net.parameters(), lr=1e-4), gpu)}
        for way, options in WAYS.items():
            net = model(shape, gpu)
            named, prefix = net.named_parameters(), f"{way}/"
            whole = mock.patch.object(Gpus, "bodies", return_value=None)
            with whole if way == BY_CPU else contextlib.nullcontext():
                made = fastps.torch.ParameterServerOptimizer(named, ps, RULE, prefix=prefix, **options)
            scripts[way] = Script(net, stack.enter_context(made), gpu)
        periods = {way: script.period(shape) for way, script in scripts.items()}
        runs = {way: functools.partial(script.run, shape.steps) for way, script in scripts.items()}
        found = traced(runs, None if gpu is None else functools.partial(add_copies, gpu))
        if gpu is None:
            check(found, shape)
    return {
        "bandwidth": bandwidth(setting.small),
        "ways": {way: {"unprofiled": periods[way], **as_json(steps)} for way, steps in found.items()},
    }


def as_json(steps: Steps) -> Figures:
    """The figures by name."""
    return {**steps._asdict(), "to_gpu": steps.to_gpu._asdict(), "to_cpu": steps.to_cpu._asdict()}


def check(found: dict[str, Steps], shape: Size) -> None:
    """Raises if the profiler has lost events: each step copies all gradients there and all values back."""
    elements = shape.width**2
    for way, steps in found.items():
        codec = None if way == BY_CPU else WAYS.get(way, {}).get("codec")
        body = 4 * elements if codec is None else encode.body_len(codec, elements) + 1
        wanted = shape.layers * body, shape.layers * 4 * elements
        copied = steps.to_cpu.bytes, steps.to_gpu.bytes
        if steps.idle >= steps.period or (way != PLAIN and copied != wanted):
            raise RuntimeError(
                f"the trace of {way} is not complete: {copied} bytes copied in a step instead of {wanted}, "
                f"no kernel in {steps.idle:.4f} of {steps.period:.4f} s"
            )


def model(shape: Size, gpu: PretendedGpu | None) -> nn.Module:
    """Layers without biases, so that each tensor is large."""
    layers = [nn.Linear(shape.width, shape.width, bias=False) for _ in range(shape.layers)]
    return nn.Sequential(*layers).to("cuda" if gpu is None else "cpu")


class Script:
    """The loop of a training script."""

    def __init__(self, net: nn.Module, optimizer: Any, gpu: PretendedGpu | None) -> None:
        self._net, self._optimizer, self._real = net, optimizer, gpu is None
        weight = next(net.parameters())
        self._x = torch.randn(BATCH if self._real else 8, weight.shape[1], device=weight.device)

    def run(self, steps: int) -> None:
        """Takes steps, and waits for the GPU."""
        for _ in range(steps):
            self._optimizer.zero_grad()
            self._net(self._x).square().mean().backward()
            with record_function(STEP):
                self._optimizer.step()
        if self._real:
            torch.cuda.synchronize()

    def period(self, shape: Size) -> float:
        """Seconds from one step to the next, without a profiler; the median of some runs."""
        self.run(2)
        times = []
        for _ in range(shape.runs):
            begun = time.perf_counter()
            self.run(shape.steps)
            times.append((time.perf_counter() - begun) / shape.steps)
        return statistics.median(times)


def bandwidth(small: bool) -> Figures:
    """Bytes a second of one large copy from and to pinned memory: the best of five."""
    size = 1 << (22 if small else 28)
    here = torch.ones(size, dtype=torch.uint8, pin_memory=not small)
    there = torch.ones(size, dtype=torch.uint8, device="cpu" if small else "cuda")

    def speed(into: torch.Tensor, source: torch.Tensor) -> float:
        times = []
        for _ in range(5):
            begun = time.perf_counter()
            into.copy_(source, non_blocking=True)
            if not small:
                torch.cuda.synchronize()
            times.append(time.perf_counter() - begun)
        return size / min(times)

    return {"to_gpu": speed(there, here), "to_cpu": speed(here, there)}


def add_copies(gpu: PretendedGpu, trace: dict[str, Any]) -> None:
    """Adds a pretended GPU's copies to a trace, as CUDA's profiler writes them."""
    base = trace.get("baseTimeNanoseconds", 0) / 1e3
    for copy in gpu.copies:
        trace["traceEvents"].append(
            {
                "ph": "X",
                "cat": "gpu_memcpy",
                "name": f"Memcpy {'HtoD (Pinned -> Device)' if copy.to_gpu else 'DtoH (Device -> Pinned)'}",
                "ts": copy.begin - base,
                "dur": copy.end - copy.begin,
                "args": {"bytes": copy.bytes},
            }
        )


def show(figures: Figures) -> list[str]:
    """One line for each way."""
    best, ways = figures["bandwidth"], figures["ways"]
    rows = [
        [
            way,
            readable(1e9 * found["unprofiled"]),
            f"{found['unprofiled'] / ways[PLAIN]['unprofiled']:.2f}",
            f"{found['idle'] / found['period']:.2f}",
            readable(1e9 * found["step"]),
            f"{found['stall'] / found['step']:.2f}",
            moved(Copies(**found["to_cpu"]), best["to_cpu"]),
            moved(Copies(**found["to_gpu"]), best["to_gpu"]),
        ]
        for way, found in ways.items()
    ]
    best_of = f"{best['to_cpu'] / 1e9:.1f} GB/s from the GPU, {best['to_gpu'] / 1e9:.1f} to it"
    columns = ["", "training step", "to torch's", "idle share of it", "`step()`", "idle share of `step()`"]
    columns += ["gradients to the CPU", "values to the GPU"]
    idle = [ways[way]["stall"] / ways[BY_CPU]["stall"] for way in ("Int8", "Int8, overlap")]
    about = f"In `step()` the GPU idles {idle[0]:.2f} times as long with Int8 as with {BY_CPU}"
    about += f", and {idle[1]:.2f} times with overlap."
    return [f"One large copy of pinned memory: {best_of}.", about, "", *table(columns, rows)]


def moved(copies: Copies, best: float) -> str:
    """Bytes of a step, and their speed against the device's."""
    if not copies.seconds:
        return ""
    speed = copies.bytes / copies.seconds
    return f"{copies.bytes / 1e6:.1f} MB, {speed / 1e9:.1f} GB/s ({speed / best:.2f})"


def row(size: str, transport: str) -> Row:
    """A row of the check."""
    names = {"shm": "shared memory", "tcp": "TCP"}
    run: Callable[[Setting], Figures] = functools.partial(measure, size, transport)
    return Row(f"a step of {size} parameters over {names[transport]}", run, show, SIZES[size].limit)


def rows() -> Iterator[Row]:
    """Each size over each connection."""
    for size in SIZES:
        for transport in ("shm", "tcp"):
            yield row(size, transport)


ROWS = list(rows())
