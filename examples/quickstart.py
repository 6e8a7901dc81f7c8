"""A linear regression on two servers in this process.

Needs no extra.
"""

import numpy as np

import fastps

x = np.random.default_rng(0).standard_normal((256, 10), np.float32)
y = x @ np.arange(10, dtype=np.float32)
params = {"w": np.zeros(10, np.float32)}

with fastps.serve(shards=2) as server, fastps.connect(server.address_list) as ps:
    ps.register("w", params["w"], optimizer=fastps.Adagrad(lr=1.0))
    worker = fastps.Worker(ps, params, mode=fastps.Local(push_every=1, pull_every=1, lr=0.05))
    for _ in range(200):
        error = x @ worker.params["w"] - y
        worker.step({"w": x.T @ error / len(x)})
    worker.flush()
    print(ps.pull("w").round(2))  # the weights that made y: 0, 1, 2, ... 9
