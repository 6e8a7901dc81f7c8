"""The script of torch_plain.py on a parameter server, with any number of processes on any machines.

Needs the extra torch.

fastps run -n 2 examples/torch_server.py        # a server and two workers; or, on any machines:
fastps serve                                    # terminal 1: a server at port 7070
python examples/torch_server.py 127.0.0.1:7070  # terminal 2, 3, ...: a worker each
"""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fastps.torch

generator = torch.Generator().manual_seed(0)
x = torch.rand(4096, 2, generator=generator) * 2 - 1
y = (x.square().sum(1) < 0.5).long()  # inside the circle?

model = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))
data = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True)
ps = fastps.connect(*sys.argv[1:2])
optimizer = fastps.torch.ParameterServerOptimizer(model.named_parameters(), ps, fastps.Adam(lr=3e-3))
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=3 * len(data))

for epoch in range(3):
    for inputs, labels in data:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        scheduler.step()
    accuracy = (model(x).argmax(1) == y).float().mean().item()
    print(f"epoch {epoch}  loss {loss.item():.3f}  accuracy {accuracy:.3f}", flush=True)
optimizer.close()
