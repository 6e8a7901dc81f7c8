"""MNIST with NumPy: any number of workers train one model, and together use each image once per epoch.

    fastps serve                                       # terminal 1: a server at port 7070
    python examples/mnist_numpy.py 127.0.0.1:7070      # terminal 2, 3, ...: a worker each

The images are the four original .gz files in mnist/ of the folder FASTPS_DATA_DIR, or else the small digits
that come with fastps. An optional second argument is the number of epochs (default 5).
"""

import os
import sys

import numpy as np

import fastps
from fastps.demo.data import load
from fastps.demo.model import evaluate, init_params, loss_and_grads

if len(sys.argv) < 2:
    sys.exit(__doc__)
epochs = int(sys.argv[2]) if len(sys.argv) > 2 else 5
folder = os.environ.get("FASTPS_DATA_DIR")
data = load("mnist", f"{folder}/mnist") if folder else load("digits")
params = init_params(data.inputs, 64, 10, np.random.default_rng(0))

with fastps.connect(sys.argv[1]) as ps:
    for name, values in params.items():
        ps.register(name, values, fastps.Adam(lr=3e-3))  # the first worker's values win
    with fastps.Worker(ps, params, mode=fastps.Async()) as worker:
        portions = fastps.data.Portions(ps, n=len(data.train_x), size=64, name="mnist")
        while portions.epoch < epochs:
            for indices in portions:
                _, grads = loss_and_grads(worker.params, data.train_x[indices], data.train_y[indices])
                worker.step(grads)
            worker.pull_model()  # with the last steps of the others
            _, accuracy = evaluate(worker.params, data.test_x, data.test_y)
            print(f"epoch {portions.epoch}  accuracy {accuracy:.3f}", flush=True)
