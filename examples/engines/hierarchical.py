"""All-reduce between the processes of a machine, the server between machines, under torchrun.

Needs the extra torch.

    FASTPS_ADDRESSES=HOST:7070 torchrun --nproc-per-node 2 examples/engines/hierarchical.py

Each machine has its own torchrun: machines may join, leave and fail on their own. On one machine:

    fastps run --servers-only -- torchrun --nproc-per-node 2 examples/engines/hierarchical.py
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

import fastps.torch


def main(steps: int = 100) -> None:
    dist.init_process_group("gloo")
    model = torch.nn.Linear(20, 1)
    with fastps.connect(wait=60) as ps:
        fastps.torch.seed(7)
        with fastps.torch.Hierarchical(model, ps, fastps.Adam(lr=0.05)) as optimizer:
            for _ in range(steps):
                x = torch.randn(32, 20)
                loss = (model(x) - x.sum(dim=1, keepdim=True)).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step(loss=loss)
            steps_taken = optimizer.global_step
    print(f"rank {dist.get_rank()}: loss {loss.item():.1e} after {steps_taken} steps", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
