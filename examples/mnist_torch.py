"""MNIST with PyTorch: any number of workers train one model, and together use each image once per epoch.

Needs the extra torch.

    fastps run -n 2 examples/mnist_torch.py        # a server and two workers; or, on any machines:
    fastps serve                                   # terminal 1: a server at port 7070
    python examples/mnist_torch.py 127.0.0.1:7070  # terminal 2, 3, ...: a worker each

The images are the four original .gz files in mnist/ of the folder FASTPS_DATA_DIR, or else the small digits
that come with fastps. --epochs is 5 unless given: the workers together go through the images as often.
"""

import argparse
import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fastps.torch

parser = argparse.ArgumentParser()
parser.add_argument("addresses", nargs="*")
parser.add_argument("--epochs", type=int, default=5)
args = parser.parse_args()

folder = os.environ.get("FASTPS_DATA_DIR")
data = fastps.data.mnist(f"{folder}/mnist") if folder else fastps.data.digits()
train = TensorDataset(torch.from_numpy(data.train_x), torch.from_numpy(data.train_y))
test_x, test_y = torch.from_numpy(data.test_x), torch.from_numpy(data.test_y)

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(data.inputs, 64), nn.ReLU(), nn.Linear(64, 10))
with fastps.connect(*args.addresses) as ps:
    optimizer = fastps.torch.ParameterServerOptimizer(model.named_parameters(), ps, fastps.Adam(lr=3e-3))
    portions = fastps.data.Portions(ps, n=len(train), size=64, name="mnist")
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(
        optimizer, T_max=len(portions) * args.epochs, eta_min=1e-4
    )
    schedule = fastps.torch.GlobalSchedule(cosine)  # of the steps of all workers together
    loader = DataLoader(train, batch_sampler=portions)  # each portion is a batch
    while portions.epoch < args.epochs:
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
            schedule.step()
        optimizer.pull_model()  # with the last steps of the others
        accuracy = (model(test_x).argmax(1) == test_y).float().mean()
        print(f"epoch {portions.epoch}  accuracy {accuracy:.3f}", flush=True)
    optimizer.close()
