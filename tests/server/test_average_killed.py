"""An average on servers that are killed, and in what they leave behind."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import safetensors.numpy
from served import Served

import fastps
from fastps.commands.cli import main

SLICE = 63 * 4096


def test_a_killed_server_continues_the_average_with_the_same_bits(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    values, grads = rng.standard_normal(2 * SLICE + 5, np.float32), rng.standard_normal((9, 7), np.float32)
    rule, average, data = fastps.AdamW(lr=0.1), fastps.EMA(0.9, every=2, start=1), tmp_path / "data"
    with fastps.Store() as store:
        store.register("w", values, rule, average=average)
        store.register("plain", values[:3], rule)
        for life in range(3):
            served = Served("--shards", "2", "--data-dir", str(data), web="127.0.0.1:0")
            try:
                with fastps.connect(served.addresses, ack="logged") as ps:
                    ps.register("w", values, rule, average=average)
                    ps.register("plain", values[:3], rule)
                    for g in grads[3 * life : 3 * life + 3]:
                        for one in (store, ps):
                            one.push("w", np.resize(g, values.shape))
                    if life == 0:  # the others are in the log alone
                        assert main(["checkpoint", "save", ",".join(served.addresses)]) == 0
                    expected = store.pull("w", view="average")
                    np.testing.assert_array_equal(ps.pull("w", view="average"), expected)
                    running = export(tmp_path / f"{life}.safetensors", ",".join(served.addresses))
            finally:
                served.process.kill()
                served.process.communicate()
            left = export(tmp_path / f"left-{life}.safetensors", str(data))
            for found in (running, left):
                np.testing.assert_array_equal(found["w"], expected)
                np.testing.assert_array_equal(found["plain"], values[:3])
    assert main(["checkpoint", "restore", str(data), str(tmp_path / "five"), "--shards", "5"]) == 0
    with fastps.serve(shards=5, data_dir=tmp_path / "five") as server, fastps.connect(server) as ps:
        np.testing.assert_array_equal(ps.pull("w", view="average"), expected)


def export(file: Path, source: str) -> dict[str, np.ndarray]:
    assert main(["checkpoint", "export", source, str(file), "--view", "average"]) == 0
    return safetensors.numpy.load_file(file)


def test_an_export_without_any_average_is_refused(tmp_path: Path, capfd) -> None:  # type: ignore[no-untyped-def]
    with fastps.serve(data_dir=tmp_path / "data") as server, fastps.connect(server) as ps:
        ps.register("plain", np.zeros(3, np.float32), fastps.SGD())
        for source in (server.addresses, str(tmp_path / "data")):
            if source != server.addresses:
                ps.close()
                server.stop()
            command = ["checkpoint", "export", source, str(tmp_path / "file"), "--view", "average"]
            assert main(command) == 1
            assert "keeps no average" in capfd.readouterr().err
            assert not (tmp_path / "file").exists()
