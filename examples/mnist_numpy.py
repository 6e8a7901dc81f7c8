"""MNIST with NumPy: any number of workers train one model, and together use each image once per epoch.

Needs no extra.

    fastps run -n 2 examples/mnist_numpy.py        # a server and two workers; or, on any machines:
    fastps serve                                   # terminal 1: a server at port 7070
    python examples/mnist_numpy.py 127.0.0.1:7070  # terminal 2, 3, ...: a worker each

The images are the four original .gz files in mnist/ of the folder FASTPS_DATA_DIR, or else the small digits
that come with fastps. --epochs is 5 unless given: the workers together go through the images as often.
"""

import argparse
import os

import numpy as np

import fastps

HIDDEN, CLASSES = 64, 10


def forward(params, x):
    """Hidden layer and the probabilities of the classes."""
    hidden = np.maximum(x @ params["w1"] + params["b1"], 0.0)
    logits = hidden @ params["w2"] + params["b2"]
    e = np.exp(logits - logits.max(axis=1, keepdims=True))
    return hidden, e / e.sum(axis=1, keepdims=True)


def gradients(params, x, y):
    """Of the mean cross-entropy."""
    hidden, p = forward(params, x)
    p[np.arange(len(y)), y] -= 1.0
    p /= len(y)
    back = (p @ params["w2"].T) * (hidden > 0)
    return {"w1": x.T @ back, "b1": back.sum(axis=0), "w2": hidden.T @ p, "b2": p.sum(axis=0)}


parser = argparse.ArgumentParser()
parser.add_argument("addresses", nargs="*")
parser.add_argument("--epochs", type=int, default=5)
args = parser.parse_args()

folder = os.environ.get("FASTPS_DATA_DIR")
data = fastps.data.mnist(f"{folder}/mnist") if folder else fastps.data.digits()
rng = np.random.default_rng(0)
params = {
    "w1": rng.standard_normal((data.inputs, HIDDEN), np.float32) * (2.0 / data.inputs) ** 0.5,
    "b1": np.zeros(HIDDEN, np.float32),
    "w2": rng.standard_normal((HIDDEN, CLASSES), np.float32) * (2.0 / HIDDEN) ** 0.5,
    "b2": np.zeros(CLASSES, np.float32),
}

with fastps.connect(*args.addresses) as ps:
    for name, values in params.items():
        ps.register(name, values, fastps.Adam(lr=3e-3))  # the first worker's values win
    with fastps.Worker(ps, params) as worker:
        portions = fastps.data.Portions(ps, n=len(data.train_x), size=64, name="mnist")
        while portions.epoch < args.epochs:
            for indices in portions:
                worker.step(gradients(worker.params, data.train_x[indices], data.train_y[indices]))
            worker.pull_model()  # with the last steps of the others
            accurate = forward(worker.params, data.test_x)[1].argmax(axis=1) == data.test_y
            print(f"epoch {portions.epoch}  accuracy {accurate.mean():.3f}", flush=True)
