"""The cost of the PyTorch optimizer: a step on a local store, and training over a server on this machine.

    python benchmarks/training.py [--quick] [--output benchmarks/README.md]

The first part times `step()` with given gradients and after each backward pass: torch's own optimizers
(foreach and fused) and fastps on a local store. The second times whole steps of a ResNet-20 on random images:
the plain script, and the same script with parameters on a server. For groups of workers see `together.py`,
which reads MNIST from FASTPS_DATA_DIR.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from harness import Runner, Step, Turns, machine, readable, runner, table, timed, write_between_markers
from processes import server_process
from together import backup, faults
from torch import Tensor, nn

import fastps
import fastps.torch

BATCH = 32


class Block(nn.Module):
    """Two convolutions beside a short cut."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        stride = outside // inside
        self.way = nn.Sequential(
            nn.Conv2d(inside, outside, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outside),
            nn.ReLU(),
            nn.Conv2d(outside, outside, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outside),
        )
        same = inside == outside
        self.short = nn.Identity() if same else nn.Conv2d(inside, outside, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """As in He et al. 2016."""
        return torch.relu(self.way(x) + self.short(x))


def resnet20() -> nn.Module:
    """He et al. 2016, for 32 x 32 images: 0.27 million parameters."""
    widths = [16, *[16] * 3, *[32] * 3, *[64] * 3]
    blocks = [Block(a, b) for a, b in itertools.pairwise(widths)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)]
    return nn.Sequential(nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), *blocks, *head)


def mlp() -> nn.Module:
    """Five layers, ten tensors."""
    sizes = [64, 256, 256, 256, 256, 10]
    layers = [nn.Linear(a, b) for a, b in itertools.pairwise(sizes)]
    return nn.Sequential(*[part for layer in layers for part in (layer, nn.ReLU())][:-1])


def with_gradients(model: nn.Module) -> nn.Module:
    """Gives every parameter a gradient."""
    for p in model.parameters():
        p.grad = torch.randn_like(p) * 1e-3
    return model


RULES: dict[str, tuple[Callable[..., Any], fastps.Optimizer]] = {
    "SGD": (
        lambda p, **how: torch.optim.SGD(p, lr=1e-4, momentum=0.9, **how),
        fastps.SGD(lr=1e-4, momentum=0.9),
    ),
    "Adam": (lambda p, **how: torch.optim.Adam(p, lr=1e-4, **how), fastps.Adam(lr=1e-4)),
}


#: Names of models, how they are made, and the shape of what they see.
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "MLP, 10 tensors": (mlp, (128, 64)),
    "ResNet-20": (resnet20, (4, 3, 32, 32)),
}


def after_backward(model: nn.Module, optimizer: Any, shape: tuple[int, ...]) -> Runner:
    """`step()` at its place in a training script."""
    x, y = torch.randn(shape), torch.randint(0, 10, shape[:1])

    def run(repetitions: int) -> list[int]:
        samples = []
        for _ in range(repetitions):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            samples.append(timed(optimizer.step))
        return samples

    return run


def steps(rounds: int) -> list[str]:
    """`step()` on a local store against torch's: again and again, and after each backward."""
    rows = []
    for (name, (make, shape)), (rule, (theirs, ours)) in itertools.product(MODELS.items(), RULES.items()):
        with ExitStack() as stack:
            optimizers: dict[str, tuple[nn.Module, Any]] = {}
            for how in ("foreach", "fused"):
                model = with_gradients(make())
                optimizers[how] = model, theirs(model.parameters(), **{how: True})
            store = stack.enter_context(fastps.Store(check_finite=False))
            model = with_gradients(make())
            optimizer = fastps.torch.ParameterServerOptimizer(model.named_parameters(), store, ours)
            optimizers["ours"] = model, stack.enter_context(optimizer)
            again = Turns({way: runner(both[1].step) for way, both in optimizers.items()}, rounds, 0.1)
            training = {way: after_backward(*both, shape) for way, both in optimizers.items()}
            after = Turns(training, rounds, 0.01)
        cells = [name, rule]
        for turns in (again, after):
            best = min(("foreach", "fused"), key=turns.time)
            ratio = turns.ratio("ours", best)
            cells += [*(readable(turns.time(way)) for way in optimizers), f"{ratio:.2f}"]
            if turns is again:
                cells += ["<= 1.0", "yes" if ratio <= 1 else "**no**"]
        rows.append(cells)
    ways = ["torch, foreach", "torch, fused", "fastps, local store", "ours / the faster"]
    columns = ["`step()`", "rule", *ways, "asked", "reached", *(f"after backward: {way}" for way in ways)]
    return table(columns, rows)


def script(model: nn.Module, optimizer: Any) -> Step:
    """A whole step of an ordinary training script."""
    x, y = torch.randn(BATCH, 3, 32, 32), torch.randint(0, 10, (BATCH,))

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


def remote(rounds: int) -> list[str]:
    """The script with a server, against the plain one."""
    ways: dict[str, tuple[fastps.Async, bool]] = {
        "`Async()`": (fastps.Async(), False),
        "`Async()`, `push_in_backward=True`": (fastps.Async(), True),
        "`Async(overlap=True)`": (fastps.Async(overlap=True), False),
    }
    with ExitStack() as stack:
        plain = resnet20()
        scripts = {"plain": script(plain, torch.optim.SGD(plain.parameters(), lr=1e-4, momentum=0.9))}
        ps = stack.enter_context(fastps.connect(stack.enter_context(server_process())))
        for k, (name, (mode, early)) in enumerate(ways.items()):
            model = resnet20()
            optimizer = fastps.torch.ParameterServerOptimizer(
                model.named_parameters(),
                ps,
                fastps.SGD(lr=1e-4, momentum=0.9),
                mode,
                prefix=f"{k}/",
                push_in_backward=early,
            )
            scripts[name] = script(model, stack.enter_context(optimizer))
        turns = Turns({name: runner(step) for name, step in scripts.items()}, rounds, 0.5)
    rows = [["plain script, `torch.optim.SGD`", readable(turns.time("plain")), "", "", ""]]
    for name in ways:
        ratio = turns.ratio(name, "plain")
        cells = [readable(turns.time(name)), f"{ratio:.2f}", "<= 1.15", "yes" if ratio <= 1.15 else "**no**"]
        rows.append([name, *cells])
    return table(
        [f"a step of ResNet-20, batch {BATCH}", "time", "of the plain one", "asked", "reached"], rows
    )


def main() -> None:
    """Measures, prints, writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--output", type=Path, help="write the tables there, between their markers")
    arguments = parser.parse_args()
    rounds = 3 if arguments.quick else 15
    facts = f"- torch {torch.__version__}, {torch.get_num_threads()} threads"
    lines = [
        *machine(),
        facts,
        "",
        *steps(rounds),
        "",
        *remote(rounds),
        "",
        *backup(2.0 if arguments.quick else 10.0),
    ]
    folder = os.environ.get("FASTPS_DATA_DIR")
    if folder and not arguments.quick:
        lines += ["", *faults(os.path.join(folder, "mnist"))]
    print("\n".join(lines))
    if arguments.output:
        command = " ".join(["python", "benchmarks/training.py", *sys.argv[1:]])
        write_between_markers(arguments.output, "training", [f"`{command}`", "", *lines])


if __name__ == "__main__":
    main()
