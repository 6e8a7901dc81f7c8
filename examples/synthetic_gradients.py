"""Parts that do not wait for each other: a net in parts, each a process, with synthetic gradients.

Needs the extras torch and demo.

    python examples/synthetic_gradients.py [--how backprop|dni|cdni|frozen] [--layers 5] [--parts 3]
    python examples/synthetic_gradients.py --all [--slow PART MS] [--output FILE]

With backprop, every part waits for the gradient from the part above. With dni it continues with a gradient
that a small predictor gives, with cdni the predictor also knows the labels. With frozen, the lower parts keep
their initial values. --slow lets a part sleep in each step. --all runs the four ways in turn and
draws loss and test error against steps and time, and how good the predictors are.

The images are the four original MNIST .gz files in mnist/ of --dataset-dir, or else the small digits that
come with fastps. The servers and the parts run on this machine.
"""

import argparse
import json
import math
import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import fastps
from fastps.torch import parallel

WIDTH, BATCH = 128, 128
HOWS = {"backprop": "#2166ac", "cdni": "#1b7837", "dni": "#e08214", "frozen": "#b2182b"}


class Slow(nn.Module):
    """Sleeps in each training step."""

    def __init__(self, milliseconds):
        super().__init__()
        self.seconds = milliseconds / 1000

    def forward(self, value):
        if self.training:
            time.sleep(self.seconds)
        return value


def build(inputs, arguments, how):
    """The net: layers with BatchNorm and ReLU, a linear one at the end, cut into parts of equal size."""
    layers, size = arguments.layers, -(-arguments.layers // arguments.parts)
    graph = parallel.Graph(seed=arguments.seed)
    value, label = graph.input("image"), graph.input("label")

    def make(part):
        stack = []
        for k in range(part * size, min((part + 1) * size, layers)):
            before, after = inputs if k == 0 else WIDTH, WIDTH if k < layers - 1 else 10
            stack.append(nn.Linear(before, after))
            stack += [nn.BatchNorm1d(after), nn.ReLU()] if k < layers - 1 else []
        if arguments.slow and arguments.slow[0] == part:
            stack.append(Slow(arguments.slow[1]))
        return nn.Sequential(*stack)

    for part in range(arguments.parts):
        if part > 0 and how == "frozen":
            value = graph.decouple(value, torch.zeros_like)
        elif part > 0 and how == "cdni":
            value = graph.decouple(value, parallel.SyntheticGradient(WIDTH, labels=10), label)
        elif part > 0 and how == "dni":
            value = graph.decouple(value, parallel.SyntheticGradient(WIDTH))
        value = graph.node(f"part{part}", value, part=part, make=lambda part=part: make(part))
    graph.loss(nn.functional.cross_entropy, value, label)
    graph.output("logits", value)
    return graph


def run_part(rank, address, folder, arguments, how):
    """Body of each process; the last part writes losses and errors, the others the quality of predictors."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/{how}", rank=rank, world_size=arguments.parts
    )
    data = (
        fastps.data.mnist(f"{arguments.dataset_dir}/mnist") if arguments.dataset_dir else fastps.data.digits()
    )
    x, y, test_x = map(torch.from_numpy, (data.train_x, data.train_y, data.test_x))
    rng, lines, spent = np.random.default_rng(arguments.seed), [], 0.0
    with (
        fastps.connect(address) as ps,
        parallel.Replica(build(data.inputs, arguments, how)) as replica,
        replica.optimizer(ps, fastps.Adam(lr=1e-3)) as optimizer,
    ):
        begun = time.perf_counter()
        for step in range(1, arguments.steps + 1):
            rows = rng.integers(len(y), size=BATCH)
            optimizer.zero_grad()
            loss = replica.step(image=x[rows], label=y[rows])
            optimizer.step(loss=loss)
            edges = replica.stats()["edges"].values()
            cosines = [edge["cosine"] for edge in edges if edge.get("cosine") is not None]
            line = {
                "step": step,
                "time": time.perf_counter() - begun - spent,
                "loss": loss,
                "cosine": cosines,
            }
            if step % max(1, arguments.steps // 20) == 0:  # all parts at once; this time does not count
                began = time.perf_counter()
                found = replica.eval().predict(image=test_x)["logits"].argmax(1).numpy()
                line["error"] = 100 * float(np.mean(found != data.test_y))
                replica.train()
                spent += time.perf_counter() - began
                if rank == arguments.parts - 1:
                    print(
                        f"{how:8}  step {step:5}  loss {loss:.3f}  test error {line['error']:.2f} %",
                        flush=True,
                    )
            lines.append(line)
    Path(folder, f"{how}.{rank}.json").write_text(json.dumps(lines))
    dist.destroy_process_group()


def run(how, arguments):
    """Trains in processes; the lines of each part."""
    with tempfile.TemporaryDirectory() as folder, fastps.serve() as server:
        mp.start_processes(
            run_part,
            (server.addresses, folder, arguments, how),
            nprocs=arguments.parts,
            start_method="spawn",
        )
        return [json.loads(Path(folder, f"{how}.{k}.json").read_text()) for k in range(arguments.parts)]


def smooth(values, width):
    """Means of neighbours."""
    return np.convolve(values, np.ones(width) / width, "valid")


def draw(runs, title, path):
    """Loss and test error against steps and time, cosine against steps."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 7), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    axes = figure.subplots(2, 3)
    for how, parts in runs.items():
        top, width = parts[-1], max(1, len(parts[-1]) // 50)
        for column, key in enumerate(("step", "time")):
            losses = smooth([line["loss"] for line in top], width)
            axes[0, column].plot([line[key] for line in top][width - 1 :], losses, color=HOWS[how], label=how)
            tested = [line for line in top if "error" in line]
            axes[1, column].plot(
                [line[key] for line in tested], [line["error"] for line in tested], ".-", color=HOWS[how]
            )
        for part, lines in enumerate(parts[:-1]):
            points = [(line["step"], line["cosine"][0]) for line in lines if line["cosine"]]
            if points and how in ("dni", "cdni"):
                style = ("-", "--", ":")[part % 3]
                axes[0, 2].plot(
                    *zip(*points, strict=True), style, color=HOWS[how], label=f"{how}, part {part}"
                )
        axes[1, 2].bar(how, len(top) / top[-1]["time"], color=HOWS[how])
    for column, label in enumerate(("steps", "time without tests (s)")):
        axes[0, column].set(xlabel=label, ylabel="training loss", yscale="log")
        axes[1, column].set(xlabel=label, ylabel="test error (%)", yscale="log")
    axes[0, 0].legend()
    axes[0, 2].set(xlabel="steps", ylabel="cosine of prediction and target, last 100")
    axes[0, 2].legend()
    axes[1, 2].set(ylabel="steps per second")
    for each in axes.flat:
        each.grid(alpha=0.25)
    figure.savefig(path, dpi=100)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dataset-dir", default=os.environ.get("FASTPS_DATA_DIR"), help="folder with mnist/")
    parser.add_argument("--how", choices=HOWS, default="cdni")
    parser.add_argument("--all", action="store_true", help="run all four and draw a picture")
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--parts", type=int, default=3)
    parser.add_argument("--slow", type=int, nargs=2, metavar=("PART", "MS"), help="a part that sleeps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--output", type=Path, default=Path("synthetic-gradients.png"))
    arguments = parser.parse_args()
    if (
        not 2 <= arguments.parts <= arguments.layers
        or (arguments.parts - 1) * math.ceil(arguments.layers / arguments.parts) >= arguments.layers
    ):
        parser.error("expected at least 2 parts, each with a layer")
    if arguments.steps < 20:
        parser.error("expected at least 20 steps")
    if "FASTPS_RANK" in os.environ:
        sys.exit("this starts its own server and parts: use python FILE, without fastps run")
    runs = {how: run(how, arguments) for how in (HOWS if arguments.all else [arguments.how])}
    if arguments.all:
        slow = f", part {arguments.slow[0]} sleeps {arguments.slow[1]} ms a step" if arguments.slow else ""
        name = "MNIST" if arguments.dataset_dir else "digits"
        draw(runs, f"{name}: {arguments.layers} layers in {arguments.parts} parts{slow}", arguments.output)
        print(f"picture: {arguments.output}")
    for how, parts in runs.items():
        label = f"{how:8}  " if arguments.all else ""
        print(
            f"{label}test error {parts[-1][-1]['error'] if 'error' in parts[-1][-1] else last(parts):.2f} %"
        )


def last(parts):
    """The newest test error of a run."""
    return next(line["error"] for line in reversed(parts[-1]) if "error" in line)


if __name__ == "__main__":
    main()
