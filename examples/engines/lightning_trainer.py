"""A LightningModule whose optimizer lives on servers: one line, in configure_optimizers.

Needs the extras torch and engines.

    fastps run -n 2 examples/engines/lightning_trainer.py

The trainer of each worker runs on its own (devices=1, no strategy): the servers bring the workers together.
"""

from __future__ import annotations

import sys

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset

import fastps.torch


class Regression(lightning.LightningModule):
    def __init__(self, ps: fastps.ParameterServer) -> None:
        super().__init__()
        self.ps, self.model = ps, torch.nn.Linear(20, 1)

    def training_step(self, batch, number):  # noqa: ARG002
        x, y = batch
        self.loss = (self.model(x) - y).square().mean()
        return self.loss

    def configure_optimizers(self):
        return fastps.torch.ParameterServerOptimizer(self.named_parameters(), self.ps, fastps.Adam(lr=0.05))


def main(epochs: int = 10) -> None:
    with fastps.connect(wait=60) as ps:
        fastps.torch.seed(7, ps)
        x = torch.randn(512, 20)
        data = DataLoader(TensorDataset(x, x.sum(dim=1, keepdim=True)), batch_size=32, shuffle=True)
        module = Regression(ps)
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        trainer = lightning.Trainer(
            max_epochs=epochs, accelerator="cpu", devices=1, enable_checkpointing=False, **quiet
        )
        trainer.fit(module, data)
        trainer.optimizers[0].close()
    print(f"loss {module.loss.item():.1e}", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
