"""Moments and pushes that users have named come back by their names."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import numpy as np
import pytest

import fastps
from fastps.commands.cli import main
from fastps.commands.kit.bisection import what_changed
from fastps.commands.kit.kept import Kept

HISTORY = 1 << 30
PATIENT = 60.0
ONE = np.ones(1, np.float32)


def values(folder: Path) -> dict[str, float]:
    shards = len([*folder.glob("shard-*")])
    with fastps.serve(shards, data_dir=folder) as server, fastps.connect(server.address_list) as ps:
        return {name: float(value[0]) for name, value in ps.pull(ps.names()).items()}


def test_a_mark_has_the_cause_of_all_that_it_has(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Each worker pushes to one shard after the other; a cut never has the second push without the first."""
    names = ["a", "b", "c", "d"]
    for shards in (1, 3):
        folder = tmp_path / str(shards)
        with fastps.serve(shards, data_dir=folder, keep_history=HISTORY) as server:
            ps = fastps.connect(server.address_list, timeout=PATIENT)
            for name in names:
                ps.register(name, np.zeros(1, np.float32), optimizer=fastps.SGD(lr=1.0))
            stop = threading.Event()

            def work(addresses: list[str], stop: threading.Event) -> None:
                with fastps.connect(addresses, timeout=PATIENT) as own:
                    while not stop.is_set():
                        for name in names:
                            own.push(name, -ONE)

            thread = threading.Thread(target=work, args=(server.address_list, stop))
            thread.start()
            for epoch in range(4):
                ps.mark(f"epoch {epoch}")
            ps.mark("epoch 0")
            stop.set()
            thread.join(PATIENT)
            ps.close()
        past = fastps.history(folder)
        assert [mark.name for mark in past.marks] == [f"epoch {k}" for k in (0, 1, 2, 3, 0)]
        assert all(mark.time is not None for mark in past.marks)
        seen = []
        for epoch in (1, 2, 3, 0):
            out = tmp_path / f"{shards}-{epoch}"
            fastps.rewind(folder, out, to_mark=f"epoch {epoch}", shards=1)
            found = values(out)
            counts = [found[name] for name in names]
            assert counts == sorted(counts, reverse=True), counts
            assert counts[0] - counts[-1] <= 1
            seen.append(counts[0])
        assert seen == sorted(seen)  # the newest "epoch 0" counts
        assert main(["history", str(folder)]) == 0
        assert 'mark "epoch 3": version ' in capfd.readouterr().out
        assert main(["history", "--json", str(folder)]) == 0
        assert len(json.loads(capfd.readouterr().out)["marks"]) == 5
        out = tmp_path / f"{shards}-cli"
        assert main(["rewind", str(folder), "--to-mark", "epoch 3", "--out", str(out)]) == 0
        capfd.readouterr()
        assert main(["rewind", str(folder), "--to-mark", "epoch3", "--out", str(tmp_path / "none")]) == 1
        assert 'did you mean "epoch ' in capfd.readouterr().err
    for wrong in ({}, {"to": 1, "to_mark": "epoch 3"}):
        with pytest.raises(fastps.ConfigError, match="one moment"):
            fastps.rewind(folder, tmp_path / "none", **wrong)


def test_marks_that_cannot_be_made(tmp_path: Path) -> None:
    with pytest.raises(fastps.FastpsError, match="no history"):
        fastps.Store().mark("epoch 1")
    with (
        fastps.serve(data_dir=tmp_path / "without") as server,
        fastps.connect(server.address_list) as ps,
        pytest.raises(fastps.FastpsError, match="--keep-history"),
    ):
        ps.mark("epoch 1")
    with (
        fastps.serve(data_dir=tmp_path / "with", keep_history=HISTORY) as server,
        fastps.connect(server.address_list) as ps,
    ):
        for name in ("", "x" * 257, "a\nb"):
            with pytest.raises(fastps.ConfigError, match="name of a mark"):
                ps.mark(name)
        ps.mark("epoch 1")
        assert ps.stats()["shards"][0]["counters"]["history_bytes"] > 0
        assert main(["status", *server.address_list]) == 0
    assert [mark.name for mark in fastps.history(tmp_path / "with").marks] == ["epoch 1"]


def test_a_note_leads_to_its_batch(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with fastps.serve(2, data_dir=tmp_path / "data", keep_history=HISTORY) as server:
        ps = fastps.connect(server.address_list, name="gpu-7", ack="logged", timeout=PATIENT)
        ps.register("w", np.zeros(1, np.float32), optimizer=fastps.SGD(lr=1.0))
        ps.register("table", np.zeros((9, 1), np.float32), optimizer=fastps.SGD(lr=1.0))
        made = {
            "push": ps.push("w", ONE, note="batch 8131").version,
            "async": ps.push_async("w", ONE, note="batch 8132").result(PATIENT).version,
            "pull": ps.push_pull("w", ONE, note="Stapel 7 ü").receipts.version,
            "none": ps.push("w", ONE).version,
            "rows": ps.push("table", fastps.Sparse([3], np.ones((1, 1), np.float32)), note="rows").version,
        }
        for wrong, why in [("x" * 65, "64 bytes"), ("é" * 33, "66 bytes"), ("a\x1b[1m", "U\\+001B")]:
            with pytest.raises(fastps.ConfigError, match=why):
                ps.push("w", ONE, note=wrong)
        before = ps.pull("w")
        assert before == -4
        for mode in (fastps.Async(), fastps.Local(push_every=2, pull_every=2, lr=1.0)):
            with fastps.Worker(ps, {"w": before.copy()}, mode=mode) as worker:
                with pytest.raises(fastps.ConfigError, match="64 bytes"):
                    worker.step({"w": ONE}, note="x" * 65)
                for step in range(2):
                    worker.step({"w": ONE}, note=f"{type(mode).__name__} {step}")
                worker.flush()
        assert ps.pull("w") == -8
        ps.close()
    past = fastps.history(tmp_path / "data")
    w = past.tensors.index("w")
    gradients = past.changes[past.is_gradient]
    notes = {(int(one["tensor"]) == w, int(one["version"])): past.note(one) for one in gradients}
    assert notes[True, made["push"]] == "batch 8131"
    assert notes[True, made["async"]] == "batch 8132"
    assert notes[True, made["pull"]] == "Stapel 7 ü"
    assert notes[True, made["none"]] == ""
    assert notes[False, made["rows"]] == "rows"
    assert {"Async 0", "Async 1", "Local 1"} <= {*notes.values()}
    kept = Kept(str(tmp_path / "data"))
    (said,) = [
        line for line in what_changed(kept, str(made["async"]), made["async"], None) if " to w" in line
    ]
    assert "of worker 'gpu-7' (batch 8132) to w" in said
    assert main(["history", str(tmp_path / "data")]) == 0
    assert 'the last one "rows"' in capfd.readouterr().out


def test_a_server_without_history_ignores_notes(tmp_path: Path) -> None:
    for folder in (None, tmp_path / "data"):
        with fastps.serve(data_dir=folder) as server, fastps.connect(server.address_list) as ps:
            ps.register("w", np.zeros(1, np.float32), optimizer=fastps.SGD(lr=1.0))
            assert ps.push("w", ONE, note="batch 1").version == 2
    assert fastps.history(tmp_path / "data").notes == ("",)
    with fastps.Store() as store:
        store.register("w", np.zeros(1, np.float32), optimizer=fastps.SGD(lr=1.0))
        assert store.push("w", ONE, note="batch 1").version == 2
        with pytest.raises(fastps.ConfigError, match="64 bytes"):
            store.push("w", ONE, note="x" * 65)


def test_a_worker_is_known_by_its_name(tmp_path: Path) -> None:
    """In the history, and to servers that refuse it."""
    with (
        fastps.serve(data_dir=tmp_path, keep_history=HISTORY, refuse_worker="gpu-8") as server,
        fastps.connect(server, ack="logged") as ps,
    ):
        ps.register("w", ONE, optimizer=fastps.SGD(lr=1.0))
        with fastps.Worker(ps, {"w": ONE}, fastps.Async(), name="gpu-7") as worker:
            worker.step({"w": ONE})
        with pytest.raises(fastps.PermissionDeniedError, match="gpu-8"):
            fastps.Worker(ps, {"w": ONE}, fastps.Async(), name="gpu-8")
    past = fastps.history(tmp_path)
    assert {past.name(client) for client in past.changes[past.is_gradient]["client"]} == {"gpu-7"}
