"""bfloat16 tensors on servers that are killed, and in what they leave behind."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import safetensors
from served import Served

import fastps
from fastps.commands.cli import main

SLICE = 63 * 4096


def test_a_killed_server_continues_with_the_same_bits(tmp_path: Path, rng: np.random.Generator) -> None:
    values, grads = rng.standard_normal(2 * SLICE + 5, np.float32), rng.standard_normal((9, 7), np.float32)
    rule, average, data = fastps.AdamW(lr=0.1), fastps.EMA(0.9), tmp_path / "data"
    with fastps.Store() as store:
        store.register("w", values, rule, dtype="bfloat16", average=average)
        for life in range(3):
            served = Served("--shards", "2", "--data-dir", str(data), web="127.0.0.1:0")
            try:
                with fastps.connect(served.addresses, ack="logged") as ps:
                    ps.register("w", values, rule, dtype="bfloat16", average=average)
                    for g in grads[3 * life : 3 * life + 3]:
                        for one in (store, ps):
                            one.push("w", np.resize(g, values.shape))
                    if life == 0:  # the others are in the log alone
                        assert main(["checkpoint", "save", ",".join(served.addresses)]) == 0
                    expected = store.pull("w")
                    np.testing.assert_array_equal(ps.pull("w"), expected)
                    running = export(tmp_path / f"{life}.safetensors", ",".join(served.addresses))
            finally:
                served.process.kill()
                served.process.communicate()
            left = export(tmp_path / f"left-{life}.safetensors", str(data))
            for found in (running, left):
                assert {name: kind for name, (kind, _) in found.items()} == {
                    "w": "BF16",
                    "w.exp_avg": "F32",
                    "w.exp_avg_sq": "F32",
                    "w.average": "F32",
                }
                bits = np.frombuffer(found["w"][1], np.uint16)
                np.testing.assert_array_equal(bits.view(ml_dtypes.bfloat16).astype(np.float32), expected)
                got = np.frombuffer(found["w.average"][1], np.float32)
                np.testing.assert_array_equal(got, store.pull("w", view="average"))
        for shards in (1, 5):
            there = tmp_path / str(shards)
            assert main(["checkpoint", "restore", str(data), str(there), "--shards", str(shards)]) == 0
            with fastps.serve(shards=shards, data_dir=there) as server, fastps.connect(server) as ps:
                np.testing.assert_array_equal(ps.pull("w"), expected)
                assert ps.spec("w") == store.spec("w")
                if shards == 5:
                    for one in (store, ps):
                        one.push("w", values)
                    np.testing.assert_array_equal(ps.pull("w"), store.pull("w"))


def export(file: Path, source: str) -> dict[str, tuple[str, bytes]]:
    """Type and bytes of each tensor."""
    assert main(["checkpoint", "export", source, str(file), "--state"]) == 0
    return {
        name: (each["dtype"], bytes(each["data"]))
        for name, each in safetensors.deserialize(file.read_bytes())
    }


def test_servers_step_as_a_store_whatever_their_number(rng: np.random.Generator) -> None:
    values, g = (rng.standard_normal(3 * SLICE + 3, np.float32) for _ in range(2))
    with fastps.Store() as store:
        store.register("w", values, fastps.Adam(lr=0.1), dtype="bfloat16")
        for _ in range(3):
            store.push("w", g)
        for shards in (1, 2, 3):
            with fastps.serve(shards=shards) as server, fastps.connect(server.addresses) as ps:
                ps.register("w", values, fastps.Adam(lr=0.1), dtype="bfloat16")
                for _ in range(3):
                    ps.push("w", g)
                np.testing.assert_array_equal(ps.pull("w"), store.pull("w"))
                half = np.empty(values.shape, ml_dtypes.bfloat16)
                ps.pull("w", out=half)
                np.testing.assert_array_equal(half.astype(np.float32), store.pull("w"))
