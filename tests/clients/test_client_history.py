"""What a client of another language names in the history of servers comes back by its name."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np

import fastps
from clients.driver import Driver
from faults.shards import PATIENT, Shards

ONE = np.ones(1, np.float32)


def test_marks_and_notes_are_in_the_history(
    clusters: Callable[..., Shards], drivers: Callable[..., Driver], tmp_path: Path
) -> None:
    """A worker pushes to one shard after the other: a mark never has the second push without the first."""
    names, data = ["a", "b", "c"], tmp_path / "data"
    cluster = clusters("--keep-history", "1GiB", shards=3, data=data)
    driver = drivers(cluster.addresses, logged=True)
    for name in names:
        driver.register(name, np.zeros(1), lr=1.0)
    stop = threading.Event()

    def work() -> None:
        with fastps.connect(cluster.addresses, timeout=PATIENT) as own:
            while not stop.is_set():
                for name in names:
                    own.push(name, -ONE)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for mark in ("epoch 0", "epoch 1", "epoch 0", "é" * 128):
            driver.do("mark", mark=mark)
    finally:
        stop.set()
        thread.join(PATIENT)
    assert "error" not in driver.push("b", -1000 * ONE, note="batch 8131")

    past = fastps.history(data)
    assert [mark.name for mark in past.marks] == ["epoch 0", "epoch 1", "epoch 0", "é" * 128]
    (noted,) = [change for change in past.changes if past.note(change)]
    assert past.note(noted) == "batch 8131"
    assert past.name(int(noted["client"])) == f"pid {driver.process.pid}"
    assert past.tensors[noted["tensor"]] == "b"
    seen = []
    for mark in ("epoch 1", "epoch 0", "é" * 128):
        with fastps.rewind(data, to_mark=mark) as moment:
            found = [int(moment.pull(name)[0]) for name in names]
        assert found == sorted(found, reverse=True)
        assert found[0] <= found[-1] + 1
        seen.append(found)
    assert seen == sorted(seen)


def test_marks_that_cannot_be_are_refused(
    clusters: Callable[..., Shards], drivers: Callable[..., Driver], tmp_path: Path
) -> None:
    without = drivers(clusters(data=tmp_path / "without").addresses)
    error = without.refused("mark", mark="epoch 1")
    assert (error["kind"], error["shard"]) == ("precondition", 0)
    assert "--keep-history" in error["expected"]

    driver = drivers(clusters("--keep-history", "1GiB", data=tmp_path / "with").addresses)
    for name in ("", "x" * 257, "é" * 129, "a\x1bb", "a\nb"):
        error = driver.refused("mark", mark=name)
        assert error["kind"] == "config", (name, error)
        assert error["seconds"] < PATIENT / 4, (name, error)
    assert fastps.history(tmp_path / "with").marks == ()
    driver.do("mark", mark="epoch 1")
    assert [mark.name for mark in fastps.history(tmp_path / "with").marks] == ["epoch 1"]
