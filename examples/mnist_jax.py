"""MNIST with JAX: any number of workers train one model, and together use each image once per epoch.

Needs the extra jax.

    fastps run -n 2 examples/mnist_jax.py        # a server and two workers; or, on any machines:
    fastps serve                                 # terminal 1: a server at port 7070
    python examples/mnist_jax.py 127.0.0.1:7070  # terminal 2, 3, ...: a worker each

The images are the four original .gz files in mnist/ of the folder FASTPS_DATA_DIR, or else the small digits
that come with fastps. --epochs is 5 unless given: the workers together go through the images as often.
"""

import argparse
import os

import jax
import jax.numpy as jnp

import fastps.jax

parser = argparse.ArgumentParser()
parser.add_argument("addresses", nargs="*")
parser.add_argument("--epochs", type=int, default=5)
args = parser.parse_args()

folder = os.environ.get("FASTPS_DATA_DIR")
data = fastps.data.mnist(f"{folder}/mnist") if folder else fastps.data.digits()
initial, keys = jax.nn.initializers.he_normal(), jax.random.split(jax.random.key(0))
params = [
    {"w": initial(keys[0], (data.inputs, 64)), "b": jnp.zeros(64)},
    {"w": initial(keys[1], (64, 10)), "b": jnp.zeros(10)},
]


def scores(params: list, x: jax.Array) -> jax.Array:
    hidden = jax.nn.relu(x @ params[0]["w"] + params[0]["b"])
    return hidden @ params[1]["w"] + params[1]["b"]


@jax.jit
@jax.grad
def gradients(params: list, x: jax.Array, y: jax.Array) -> jax.Array:
    logs = jax.nn.log_softmax(scores(params, x))
    return -jnp.take_along_axis(logs, y[:, None], 1).mean()


with fastps.connect(*args.addresses) as ps:
    fastps.jax.register(ps, params, fastps.Adam(lr=3e-3))  # the first worker's values win
    with fastps.jax.Worker(ps, params) as worker:
        portions = fastps.data.Portions(ps, n=len(data.train_x), size=64, name="mnist")
        while portions.epoch < args.epochs:
            for indices in portions:
                worker.step(gradients(worker.params, data.train_x[indices], data.train_y[indices]))
            worker.pull_model()  # with the last steps of the others
            accuracy = jnp.mean(scores(worker.params, data.test_x).argmax(1) == data.test_y)
            print(f"epoch {portions.epoch}  accuracy {accuracy:.3f}", flush=True)
