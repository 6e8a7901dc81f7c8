"""A training loop of Hugging Face Accelerate whose optimizer lives on servers: one line.

Needs the extras torch and engines.

    fastps run -n 2 examples/engines/accelerate_trainer.py

Without WORLD_SIZE, which fastps run does not set, each worker's Accelerator has only its own process.
"""

from __future__ import annotations

import sys

import torch
from accelerate import Accelerator

import fastps.torch


def main(steps: int = 100) -> None:
    accelerator, model = Accelerator(cpu=True), torch.nn.Linear(20, 1)
    with fastps.connect(wait=60) as ps:
        fastps.torch.seed(7, ps)
        optimizer = fastps.torch.ParameterServerOptimizer(model.named_parameters(), ps, fastps.Adam(lr=0.05))
        model, prepared = accelerator.prepare(model, optimizer)
        for _ in range(steps):
            x = torch.randn(32, 20)
            loss = (model(x) - x.sum(dim=1, keepdim=True)).square().mean()
            prepared.zero_grad()
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 10.0)
            prepared.step()
        optimizer.close()
    print(f"loss {loss.item():.1e}", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
