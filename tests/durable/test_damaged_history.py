"""`history` says of a damaged folder what `rewind` says."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

import fastps
from fastps.commands.cli import main


def run(folder: Path) -> None:
    """Two shards with several segments each."""
    with (
        fastps.serve(2, data_dir=folder, keep_history=1 << 30) as server,
        fastps.connect(server, name="gpu-7", ack="logged") as ps,
    ):
        for name in ("a", "b", "c", "d"):
            ps.register(name, np.zeros(70_000, np.float32), optimizer=fastps.SGD(lr=0.1))
        for _ in range(3):
            for _ in range(2):
                ps.push({name: np.ones(70_000, np.float32) for name in ("a", "b", "c", "d")})
            assert main(["checkpoint", "save", *server.address_list]) == 0


def test_missing_and_misplaced_files_are_refused_by_name(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    whole = tmp_path / "whole"
    run(whole)
    logs = sorted(path.name for path in (whole / "shard-1").glob("log-*"))
    snapshots = sorted(path.name for path in (whole / "shard-1").iterdir() if path.is_dir())
    assert len(logs) >= 3

    def shard(folder: Path) -> None:
        shutil.rmtree(folder / "shard-1")

    def middle(folder: Path) -> None:
        (folder / "shard-1" / logs[1]).unlink()

    def first(folder: Path) -> None:
        (folder / "shard-1" / logs[0]).unlink()
        for name in snapshots:
            shutil.rmtree(folder / "shard-1" / name)

    def swapped(folder: Path) -> None:
        shutil.copy(folder / "shard-0" / logs[1], folder / "shard-1" / logs[1])

    def exchanged(folder: Path) -> None:
        (folder / "shard-0").rename(folder / "other")
        (folder / "shard-1").rename(folder / "shard-0")
        (folder / "other").rename(folder / "shard-1")

    for damage, said in (
        (shard, ("shard-1 is missing",)),
        (middle, (f"shard-1/{logs[1]} is missing",)),
        (first, (f"shard-1/{logs[0]} is missing", f"{logs[1]} follows it")),
        (swapped, (f"shard-1/{logs[1]} is misplaced", "segment 2 of shard 0")),
        (exchanged, ("shard-0 belongs to another shard", "shard 1 of 2")),
    ):
        folder, out = tmp_path / damage.__name__, tmp_path / "out"
        shutil.copytree(whole, folder)
        damage(folder)
        # A rewind needs the log from the snapshot before its moment on.
        early = () if damage in (middle, swapped) else (["--to", "2"], ["--to", "a=3"])
        rewinds = [
            ["rewind", str(folder), *moment, "--out", str(out)]
            for moment in (["--to-push", "gpu-7:6"], *early)
        ]
        for arguments in (["history", str(folder)], *rewinds):
            capfd.readouterr()
            assert main(arguments) == 1, (damage.__name__, arguments)
            error = capfd.readouterr().err
            assert all(part in error for part in said), (damage.__name__, arguments, error)
            assert not out.exists()
        with pytest.raises(fastps.FastpsError, match=said[0]):
            fastps.history(folder)
