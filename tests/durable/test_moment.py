"""A moment of the past is read as a store in memory, and nothing changes it."""

from __future__ import annotations

import gc
import hashlib
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fastps

HISTORY = 1 << 30
PATIENT = 60.0
AVERAGED = ("half", "mean")


def run(folder: Path, shards: int) -> list[int]:
    """A worker's pushes to tensors of each type; the versions that they made."""
    rng = np.random.default_rng(shards)
    made = []
    with (
        fastps.serve(shards, data_dir=folder, keep_history=HISTORY, snapshot_after=1) as server,
        fastps.connect(server.address_list, ack="logged", timeout=PATIENT) as ps,
    ):
        # More than one slice, so that a tensor lies on several shards.
        shapes = {"wide": (300_000,), "half": (301, 3), "mean": (17,), "double": (5,)}
        start = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
        ps.register("wide", start["wide"], fastps.SGD(lr=0.1, momentum=0.9))
        ps.register(
            "half", start["half"], fastps.Adam(lr=0.1), average=fastps.EMA(0.5), dtype="bfloat16", seed=3
        )
        ps.register("mean", start["mean"], fastps.Adagrad(lr=0.1), average=fastps.EMA(0.9))
        ps.register("double", start["double"].astype(np.float64), fastps.SGD(lr=0.1))
        for step in range(12):
            gradient = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
            gradient["double"] = gradient["double"].astype(np.float64)
            made.append(ps.push(gradient)["wide"].version)
            if step == 7:
                ps.mark("two thirds")
    return made


def content(ps: fastps.ParameterServer) -> dict[str, Any]:
    """All that can be read, as bytes."""
    names = ps.names()
    read: dict[str, Any] = {f"{name}": ps.pull(name).tobytes() for name in names}
    read |= {f"{name}, average": ps.pull(name, view="average").tobytes() for name in AVERAGED}
    read |= {f"{name}, spec": ps.spec(name) for name in names}
    for name in names:
        for slot, value in ps.state(name).items():
            read[f"{name}, {slot}"] = np.asarray(value).tobytes()
    versions = ps.versions()
    return read | {f"{name}, versions": versions.slices(name) for name in names}


def digest(folder: Path) -> str:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return hashlib.sha256(b"".join(str(path).encode() + path.read_bytes() for path in files)).hexdigest()


def test_a_moment_in_memory_is_the_rewound_directory(tmp_path: Path) -> None:
    for shards in (1, 2, 5):
        folder = tmp_path / str(shards)
        made = run(folder, shards)
        before = digest(folder)
        for moment in ({"to": made[0]}, {"to": made[6]}, {"to_mark": "two thirds"}, {"to": made[-1]}):
            out = tmp_path / f"{shards}-{'-'.join(map(str, moment.values()))}"
            assert fastps.rewind(folder, out, **moment) == []
            with (
                fastps.serve(shards, data_dir=out) as server,
                fastps.connect(server.address_list, timeout=PATIENT) as ps,
            ):
                expected = content(ps)
            with fastps.rewind(folder, **moment) as past:
                found = content(past)
            assert found.keys() == expected.keys()
            assert [name for name in found if found[name] != expected[name]] == [], (shards, moment)
        assert digest(folder) == before, shards


def test_nothing_changes_a_moment(tmp_path: Path) -> None:
    made = run(tmp_path / "data", 2)
    past = fastps.rewind(tmp_path / "data", to=made[3])
    assert type(past) is fastps.Store
    before = content(past)
    one = np.ones(17, np.float32)
    bound = past.bind({"mean": one})
    changes = {
        "register": lambda: past.register("new", one, fastps.SGD(lr=0.1)),
        "unregister": lambda: past.unregister("mean"),
        "push": lambda: past.push("mean", one),
        "push of several": lambda: past.push({"mean": one}),
        "bound push": lambda: past.push(bound),
        "push_async": lambda: past.push_async("mean", one).result(),
        "push_pull": lambda: past.push_pull({"mean": one}),
        "assign": lambda: past.assign("mean", one),
        "load_state": lambda: past.load_state("mean", past.state("mean")),
        "mark": lambda: past.mark("now"),
        "a client of its own": lambda: past.another().push("mean", one),
        "a worker": lambda: fastps.Worker(past, {"mean": one.copy()}).step({"mean": one}),
    }
    for what, change in changes.items():
        with pytest.raises(fastps.ConfigError, match="moment of the past") as refused:
            change()
        assert "fastps fork" in str(refused.value), what
        assert "out" in str(refused.value), what
    assert content(past) == before
    past.close()
    with pytest.raises(fastps.ConfigError, match="is closed"):
        past.pull("mean")


def test_a_closed_moment_frees_its_memory(tmp_path: Path) -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    size = 16 << 20
    with (
        fastps.serve(data_dir=tmp_path / "data", keep_history=HISTORY) as server,
        fastps.connect(server.address_list, ack="logged", timeout=PATIENT) as ps,
    ):
        ps.register("w", np.zeros(size // 4, np.float32), fastps.SGD(lr=1.0))
        version = ps.push("w", np.ones(size // 4, np.float32)).version
    del server, ps
    moments, most = [], 0
    gc.collect()
    start = resident()
    for _ in range(8):
        moments.append(fastps.rewind(tmp_path / "data", to=version))
        moments[-1].close()
        most = max(most, resident() - start)
    end = time.monotonic() + 30
    while resident() - start > 4 * size and time.monotonic() < end:
        time.sleep(0.1)
    assert resident() - start <= 4 * size, most


def test_what_has_no_history_is_said(tmp_path: Path) -> None:
    with (
        fastps.serve(data_dir=tmp_path / "data", keep_history=HISTORY) as server,
        fastps.connect(server.address_list, ack="logged", timeout=PATIENT) as ps,
    ):
        ps.register("w", np.zeros(2, np.float32), fastps.SGD(lr=1.0))
        ps.register("racing", np.zeros(2, np.float32), fastps.SGD(lr=1.0), apply="hogwild")
        version = ps.push("w", np.ones(2, np.float32)).version
    with pytest.warns(RuntimeWarning, match='"racing" is hogwild'):
        past = fastps.rewind(tmp_path / "data", to=version)
    assert (past.pull("w") == -1).all()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrong = [
            ({"to": 999}, "after the last change"),
            ({"to_mark": "epoch 1"}, "no such mark"),
            ({"to": version, "shards": 2}, "out=DIRECTORY"),
            ({}, "got none"),
            ({"to": version, "to_push": "a:1"}, "got to and to_push"),
        ]
        for arguments, why in wrong:
            with pytest.raises(fastps.ConfigError, match=why):
                fastps.rewind(tmp_path / "data", **arguments)
