"""`fastps checkpoint`: data directories without a server, and snapshots by running ones.

Faults are tested in rust/durable and rust/cli.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

import fastps
from fastps.commands.cli import main

INITIAL = np.arange(600_000, dtype=np.float32).reshape(3, -1)


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    """The data directory of a stopped server with two shards."""
    path = tmp_path / "data"
    with fastps.serve(shards=2, data_dir=path) as server, fastps.connect(server.addresses) as ps:
        ps.register("w", INITIAL, optimizer=fastps.Adam(lr=0.5))
        ps.register("bias", np.float32(2.0), optimizer=fastps.SGD(lr=1.0))
        for _ in range(3):
            ps.push({"w": np.ones_like(INITIAL), "bias": np.float32(-1.0)})
    return path


def test_list_and_verify(data_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "list", str(data_dir)]) == 0
    assert "shard 1 of 2" in capfd.readouterr().out
    assert main(["checkpoint", "list", str(data_dir), "--json"]) == 0
    shards = json.loads(capfd.readouterr().out)["shards"]
    newest = [shard["snapshots"][0] for shard in shards]
    assert [snapshot["problem"] for snapshot in newest] == [None, None]
    assert sum(snapshot["slices"] for snapshot in newest) == 4
    assert sum(snapshot["versions"] for snapshot in newest) == 4 * 4
    assert sum(snapshot["steps"] for snapshot in newest) == 4 * 3
    assert main(["checkpoint", "verify", str(data_dir), "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["ok"] is True
    [slices, *_] = sorted(data_dir.glob("shard-1/generation-*/slices"), reverse=True)
    slices.write_bytes(slices.read_bytes()[:-1])
    assert main(["checkpoint", "verify", str(data_dir)]) == 1
    printed = capfd.readouterr().out
    assert "shard 0: whole" in printed
    assert str(slices) in printed
    assert main(["checkpoint", "verify", str(data_dir / "shard-0")]) == 1
    assert "--data-dir" in capfd.readouterr().err
    assert main(["checkpoint", "restore", str(data_dir)]) == 2


def test_a_snapshot_of_a_running_cluster(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    kept = tmp_path / "data"
    with fastps.serve(shards=2, data_dir=kept, keep=3) as server, fastps.connect(server.addresses) as ps:
        ps.register("w", INITIAL, optimizer=fastps.SGD(lr=1.0))
        for _ in range(4):
            ps.push("w", np.ones_like(INITIAL))
            assert main(["checkpoint", "save", server.address_list[1], "--json"]) == 0
            shards = json.loads(capfd.readouterr().out)["shards"]
        assert [shard["address"] for shard in shards] == server.address_list
        assert sum(shard["slices"] for shard in shards) == 3
        for shard in shards:
            folder = Path(shard["path"])
            assert folder.parent == kept / f"shard-{shard['shard']}"
            assert shard["bytes"] == sum(f.stat().st_size for f in folder.iterdir() if f.name != "MANIFEST")
            assert len(list(folder.parent.glob("generation-*"))) == 3
        assert main(["checkpoint", "save", server.addresses]) == 0
        said = f"shard 1 ({server.address_list[1]}): snapshot {shards[1]['number'] + 1},"
        assert said in capfd.readouterr().out
    with pytest.raises(fastps.ConfigError, match="at least 1"):
        fastps.serve(data_dir=tmp_path / "other", keep=0)


def test_a_server_without_files_refuses_a_snapshot(
    server: fastps.Server, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["checkpoint", "save", server.addresses]) == 1
    assert "--data-dir" in capfd.readouterr().err


def test_another_number_of_shards(data_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(fastps.ConfigError, match=r"fastps checkpoint restore .* --shards 3"):
        fastps.serve(shards=3, data_dir=data_dir)
    with fastps.serve(shards=2, data_dir=data_dir) as server, fastps.connect(server.addresses) as ps:
        held, state, versions = ps.pull(["w", "bias"]), ps.state("w"), ps.versions("w")["w"]
    assert main(["checkpoint", "restore", str(data_dir), str(tmp_path / "three"), "--shards", "3"]) == 0
    three = tmp_path / "three"
    with fastps.serve(shards=3, data_dir=three) as server, fastps.connect(server.addresses) as ps:
        for name, values in ps.pull(["w", "bias"]).items():
            np.testing.assert_array_equal(values, held[name])
        for name, values in ps.state("w").items():
            np.testing.assert_array_equal(values, state[name])
        assert ps.push("w", np.ones_like(INITIAL)).version == versions + 1


def test_an_export_joins_the_shards_of_a_parameter(tmp_path: Path) -> None:
    """Shards of `fastps.torch.Hierarchical` after `fully_shard`, of a data directory and of servers."""
    rows = {"w@0/3": 2, "w@1/3": 2, "w@2/3": 0, "lost@1/2": 1, "u@0/2": 1, "u@1/2": 1, "u": 2, "odd@0/1": 1}
    tensors = {
        name: np.random.default_rng(k).normal(size=(n, 3)).astype(np.float32)
        for k, (name, n) in enumerate(rows.items())
    }
    tensors["torn@0/2"], tensors["torn@1/2"] = np.ones((1, 3), np.float32), np.ones((1, 2), np.float32)
    with (
        fastps.serve(data_dir=tmp_path / "data") as server,
        fastps.connect(server.addresses) as ps,
    ):
        for name, values in tensors.items():
            ps.register(name, values, fastps.Adagrad(lr=0.1))
            ps.push(name, np.ones_like(values))
        held, state = ps.pull(list(tensors)), {name: ps.state(name) for name in tensors}
        command = ["checkpoint", "export", "--state", server.addresses]
        assert main([*command, str(tmp_path / "running")]) == 0
    assert main(["checkpoint", "export", "--state", str(tmp_path / "data"), str(tmp_path / "stopped")]) == 0
    whole = ["lost@1/2", "u", "u@0/2", "u@1/2", "torn@0/2", "torn@1/2"]
    for file in (tmp_path / "running", tmp_path / "stopped"):
        loaded = safetensors.numpy.load_file(file)
        expected = {name: held[name] for name in whole} | {"odd": held["odd@0/1"]}
        expected |= {f"{name}.sum": state[name]["sum"] for name in whole}
        expected["odd.sum"] = state["odd@0/1"]["sum"]
        shards = ["w@0/3", "w@1/3", "w@2/3"]
        expected["w"] = np.concatenate([held[name] for name in shards])
        expected["w.sum"] = np.concatenate([state[name]["sum"] for name in shards])
        assert set(loaded) == set(expected)
        for name, values in expected.items():
            np.testing.assert_array_equal(loaded[name], values, strict=True, err_msg=name)
        assert set(fastps.checkpoint.arrays(file)) == set(expected)  # the digests are those of whole tensors


def test_an_export_opens_with_the_safetensors_package(data_dir: Path, tmp_path: Path) -> None:
    with fastps.serve(shards=2, data_dir=data_dir) as server, fastps.connect(server.addresses) as ps:
        held, state = ps.pull(["w", "bias"]), ps.state("w")
    file = tmp_path / "all.safetensors"
    assert main(["checkpoint", "export", str(data_dir), str(file)]) == 0
    loaded = safetensors.numpy.load_file(file)
    assert set(loaded) == {"w", "bias"}
    for name, values in loaded.items():
        np.testing.assert_array_equal(values, held[name], strict=True)
    assert main(["checkpoint", "export", str(data_dir), str(file)]) == 1  # it exists already
    file.unlink()
    assert main(["checkpoint", "export", str(data_dir), str(file), "--state"]) == 0
    loaded = safetensors.numpy.load_file(file)
    assert set(loaded) == {"w", "bias", "w.exp_avg", "w.exp_avg_sq"}
    np.testing.assert_array_equal(loaded["w.exp_avg"], state["exp_avg"], strict=True)
