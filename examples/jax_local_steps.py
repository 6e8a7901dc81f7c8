"""JAX and optax with DiLoCo: each worker takes ten local steps, and the servers join what they have reached.

Needs the extra jax.

fastps run -n 2 examples/jax_local_steps.py        # a server and two workers; or, on any machines:
fastps serve                                       # terminal 1: a server at port 7070
python examples/jax_local_steps.py 127.0.0.1:7070  # terminal 2, 3, ...: a worker each
"""

import os
import sys

import jax
import jax.numpy as jnp
import optax

import fastps.jax

keys = jax.random.split(jax.random.key(0), 3)
x = jax.random.uniform(keys[0], (4096, 2), minval=-1.0)
y = jnp.sum(x**2, 1) < 0.5  # inside the circle?
params = {
    "w": [jax.random.normal(keys[1], (2, 32)), jax.random.normal(keys[2], (32,)) / 6],
    "b": jnp.zeros(32),
}


def logits(params: dict, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ params["w"][0] + params["b"]) @ params["w"][1]


@jax.jit
def step(params: dict, state: optax.OptState, key: jax.Array) -> tuple:
    batch = jax.random.randint(key, (64,), 0, len(x))
    grads = jax.grad(lambda p: optax.sigmoid_binary_cross_entropy(logits(p, x[batch]), y[batch]).mean())(
        params
    )
    updates, state = optimizer.update(grads, state)
    return optax.apply_updates(params, updates), state


optimizer = optax.adam(0.01)
state = optimizer.init(params)
with fastps.connect(*sys.argv[1:2]) as ps:
    fastps.jax.register(ps, params, fastps.SGD(lr=0.7, momentum=0.5, nesterov=True))
    key = jax.random.key(os.getpid())
    mode = fastps.DiLoCo(every=10)
    with fastps.jax.Worker(ps, params, mode) as worker:
        for turn in range(300):
            key, own = jax.random.split(key)
            local, state = step(worker.params, state, own)
            worker.step(values=local, samples=64)
            if turn % 100 == 99:
                accuracy = jnp.mean((logits(worker.params, x) > 0) == y)
                print(f"step {turn + 1}  accuracy {accuracy:.3f}", flush=True)
