"""`fastps checkpoint export` of servers: one moment of a cluster that keeps training."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

import fastps
import fastps.checkpoint
from fastps.commands.cli import main

LONG = 3 * 63 * 4096 + 5


def values_after(steps: int) -> list[tuple[float, float]]:
    """Value and momentum buffer after each number of steps of gradient 1, rate 1 and momentum 1/2."""
    pairs, value, buffer = [(0.0, 0.0)], np.float32(0), np.float32(0)
    for step in range(steps):
        buffer = np.float32(1) if step == 0 else np.float32(0.5) * buffer + np.float32(1)
        value -= buffer
        pairs.append((float(value), float(buffer)))
    return pairs


@pytest.mark.parametrize("durable", [False, True], ids=["in memory", "with a data directory"])
def test_all_tensors_are_of_one_moment_and_training_continues(tmp_path: Path, durable: bool) -> None:
    """Each push of `second` follows the receipt of one of `first`."""
    ended, failed, pushed = threading.Event(), [], 0
    data = tmp_path / "data" if durable else None
    gradient, one = np.ones(LONG, np.float32), np.ones((), np.float64)

    def train() -> None:
        nonlocal pushed
        try:
            while not ended.is_set():
                ps.push("first", gradient)
                ps.push("second", one)
                pushed += 1
        except BaseException as error:
            failed.append(error)

    with (
        fastps.serve(shards=2, data_dir=data) as server,
        fastps.connect(server, namespace="exp1") as ps,
        fastps.connect(server) as other,
    ):
        other.register("other", np.zeros(3, np.float32), fastps.SGD(lr=1.0))
        ps.register("first", np.zeros(LONG, np.float32), fastps.SGD(lr=1.0, momentum=0.5))
        ps.register("second", np.zeros((), np.float64), fastps.SGD(lr=1.0))
        thread = threading.Thread(target=train)
        thread.start()
        try:
            for k in range(3):
                file, before = tmp_path / f"{k}.safetensors", pushed
                command = ["checkpoint", "export", server.addresses, str(file), "--state"]
                assert main([*command, "--namespace", "exp1"]) == 0
                found = safetensors.numpy.load_file(file)
                assert sorted(found) == ["first", "first.momentum_buffer", "second"]
                assert found["second"].dtype == np.float64
                assert found["second"].shape == ()
                count = -int(found["second"])
                assert before <= count
                steps = values_after(count + 1)
                pairs = np.unique(np.stack([found["first"], found["first.momentum_buffer"]], 1), axis=0)
                assert {tuple(map(float, pair)) for pair in pairs} <= {steps[count], steps[count + 1]}
                while pushed < before + 2 and thread.is_alive():
                    thread.join(0.01)
        finally:
            ended.set()
            thread.join()
        assert not failed
        assert -int(ps.pull("second")) == pushed
        whole = tmp_path / "all.safetensors"
        assert main(["checkpoint", "export", server.addresses, str(whole)]) == 0
        assert sorted(safetensors.numpy.load_file(whole)) == ["other", "run:exp1/first", "run:exp1/second"]
        with fastps.Store() as store:
            fastps.checkpoint.load(store, whole, fastps.SGD(lr=1.0))
            assert (store.pull("run:exp1/first") == ps.pull("first")).all()


def test_the_error_beside_a_running_server_names_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    data, file = tmp_path / "data", tmp_path / "model.safetensors"
    with fastps.serve(data_dir=data) as server, fastps.connect(server) as ps:
        ps.register("w", np.zeros(3, np.float32), fastps.SGD(lr=1.0))
        assert main(["checkpoint", "export", str(data), str(file)]) == 1
        refused = capfd.readouterr().err
        assert "fastps checkpoint export ADDRESSES FILE" in refused
        assert main(["checkpoint", "export", server.addresses, str(file)]) == 0
        assert "1 tensors" in capfd.readouterr().out
        for arguments, code, message in [
            ([server.addresses, str(file)], 1, "already exists"),
            ([server.addresses, "new", "--namespace", "typo"], 1, "no tensor to export"),
            ([server.addresses, "new", "--namespace", "a/b"], 1, "invalid namespace"),
            (["127.0.0.1:1", "new", "--timeout", "0.1"], 1, "cannot connect to 127.0.0.1:1"),
            ([server.addresses, str(data), "new"], 2, "unexpected argument"),
            ([server.addresses, "new", "--consistent"], 1, "are for files"),
            ([str(data), "new", "--namespace", "a"], 1, "are for servers"),
            ([str(data), "new", "--tls-ca", "ca.pem"], 1, "are for servers"),
            (["new"], 2, "required"),
        ]:
            assert main(["checkpoint", "export", *arguments]) == code, arguments
            assert message in capfd.readouterr().err, arguments
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "model.safetensors"]
