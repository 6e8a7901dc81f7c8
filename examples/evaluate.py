"""Evaluates the model of mnist_torch.py while workers train it, and keeps the best one in best.safetensors.

Needs the extras torch and checkpoint.

    fastps run -n 3 examples/evaluate.py           # a server, this, two workers; or, on any machines:
    fastps serve                                   # terminal 1: a server at port 7070
    python examples/mnist_torch.py 127.0.0.1:7070  # terminal 2, 3, ...: a worker each
    python examples/evaluate.py 127.0.0.1:7070     # one more: the evaluator

It ends when nothing has changed for 10 seconds. FASTPS_DATA_DIR is as for mnist_torch.py.
"""

import os
import runpy
import sys
from pathlib import Path

import torch
from torch import nn

import fastps.torch

if fastps.engines.detect().rank > 0:  # of fastps run: a worker
    runpy.run_path(str(Path(__file__).with_name("mnist_torch.py")))
    sys.exit()
folder = os.environ.get("FASTPS_DATA_DIR")
data = fastps.data.mnist(f"{folder}/mnist") if folder else fastps.data.digits()
x, y = torch.from_numpy(data.test_x), torch.from_numpy(data.test_y)


def judge(model: nn.Module) -> dict[str, float]:
    return {"accuracy": float((model(x).argmax(1) == y).float().mean())}


model = nn.Sequential(nn.Linear(data.inputs, 64), nn.ReLU(), nn.Linear(64, 10))
with fastps.connect(*sys.argv[1:2]) as ps:
    ps.wait_for([name for name, _ in model.named_parameters()], timeout=300)
    evaluator = fastps.torch.evaluator(
        model, ps, judge, every=20, by="accuracy", keep="best.safetensors", idle=10.0
    )
    for evaluation in evaluator:
        print(f"version {evaluation.version}  accuracy {evaluation.metrics['accuracy']:.3f}", flush=True)
    if evaluator.best is not None:
        print(f"best: version {evaluator.best.version}  {evaluator.best.metrics['accuracy']:.3f}")
