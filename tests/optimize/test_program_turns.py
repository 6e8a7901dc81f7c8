"""A server's thread does other work between the slices of a program."""

from __future__ import annotations

import threading

import numpy as np

import fastps
from fastps.optimize import Vectors

SLICE = 63 * 4096
SLICES = 24


def test_a_push_waits_for_one_slice_of_a_program_and_not_for_all() -> None:
    """While one program runs on all slices, another client's pushes are answered one by one."""
    names = [f"v{k}" for k in range(16)]
    with (
        fastps.serve(shards=1) as server,
        fastps.connect(server.addresses) as ps,
        fastps.connect(server.addresses) as other,
    ):
        ps.register("big", np.ones(SLICES * SLICE, np.float32), fastps.SGD(lr=1.0))
        other.register("small", np.zeros(10, np.float32), fastps.SGD(lr=1.0))
        gradient = np.ones(10, np.float32)
        with Vectors(ps, ["big"], names, space="turns") as v:
            v.run(*(v.copy(name, "w") for name in names))
            done = threading.Event()

            def program() -> None:
                v.run(v.block(names, names))  # 256 inner products on each slice
                done.set()

            thread = threading.Thread(target=program)
            thread.start()
            during = 0
            while not done.is_set():
                other.push("small", gradient)
                during += 1
            thread.join(timeout=60)
        assert during >= SLICES // 2
