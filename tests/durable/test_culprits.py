"""What `bisect` and `history` say of a change: all whose gradients are in it, and every kind of change."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import fastps
import fastps.optimize
from fastps.commands.cli import main
from fastps.commands.kit.bisection import what_changed
from fastps.commands.kit.kept import Kept

HISTORY, PATIENT = 1 << 30, 120.0
WORKERS, STEPS, SPOILED = 3, 12, 8
SIZE = 8


def said_of(kept: Kept, version: int) -> list[str]:
    return what_changed(kept, str(version), version, version - 1 if version > 1 else None)


def train(folder: Path, mode: Callable[[], fastps.Mode], bad: int, shards: int) -> None:
    """Three workers whose gradients make each version together, one of them bad."""
    begin = {"w": np.zeros(SIZE, np.float32)}
    with fastps.serve(shards, data_dir=folder, keep_history=HISTORY) as server:
        with fastps.connect(server, name="boss", ack="logged", timeout=PATIENT) as ps:
            ps.register("w", begin["w"], optimizer=fastps.SGD(lr=0.1))
            ps.push("w", np.full(SIZE, 0.01, np.float32))

        def work(rank: int) -> None:
            with (
                fastps.connect(server, name=f"g{rank}", ack="logged", timeout=PATIENT) as ps,
                fastps.Worker(ps, {"w": begin["w"].copy()}, mode=mode(), rank=rank) as worker,
            ):
                for step in range(STEPS):
                    is_bad = rank == bad and step == SPOILED
                    worker.step({"w": np.full(SIZE, 1e4 if is_bad else 0.01, np.float32)})

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(WORKERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def test_a_step_of_several_workers_accuses_none_of_them(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    cases = [
        (lambda: fastps.Sync(workers=WORKERS), 0, 1),
        (lambda: fastps.Sync(workers=WORKERS, deterministic=True), 1, 2),
        (lambda: fastps.Sync(workers=WORKERS, reduce="median"), 2, 1),
    ]
    for k, (mode, bad, shards) in enumerate(cases):
        folder = tmp_path / str(k)
        train(folder, mode, bad, shards)
        past = fastps.history(folder, norms=True)
        first = past.changes[past.is_first & past.is_gradient & (past.changes["shard"] == 0)]
        steps = first[first["workers"] > 1]
        assert len(steps) == STEPS
        version = int(steps["version"][SPOILED])
        rows = past.changes[past.changes["version"] == version]
        assert {past.name(int(row["client"])) for row in rows} == {f"g{rank}" for rank in range(WORKERS)}
        assert len(np.unique(rows["norm"][rows["shard"] == 0])) == 1
        (said, *_) = said_of(Kept(str(folder)), version)
        assert "one step with the gradients of 3 workers to w: 'g0' (its push " in said
        assert "), 'g1' (its push " in said
        assert ") and 'g2' (its push " in said
        assert "cannot tell which" in said
        # What only one has pushed names that one.
        alone = int(first["version"][first["workers"] == 1][0])
        assert "push 2 of worker 'boss' to w: lr 0.1, |g| " in said_of(Kept(str(folder)), alone)[0]
        capfd.readouterr()
        assert main(["history", "--json", str(folder)]) == 0
        shown = json.loads(capfd.readouterr().out)["workers"]
        for rank in range(WORKERS):
            own = [worker for worker in shown if worker["name"] == f"g{rank}"]
            assert own
            for worker in own:
                begin, end = worker["pushes"]
                assert end - begin == STEPS - 1
                assert worker["versions"] == [int(steps["version"][0]), int(steps["version"][-1])]
            push = int(rows["push"][[past.name(int(row["client"])) == f"g{rank}" for row in rows]][0])
            out = tmp_path / f"{k}-{rank}"
            assert main(["rewind", str(folder), "--to-push", f"g{rank}:{push}", "--out", str(out)]) == 0
            with fastps.serve(shards, data_dir=out) as server, fastps.connect(server) as ps:
                assert ps.versions("w")["w"] == version
        picture = tmp_path / f"{k}.png"
        assert main(["history", str(folder), "--plot", str(picture)]) == 0


def test_a_difference_of_several_workers_names_all_of_them(tmp_path: Path) -> None:
    begin = np.zeros(SIZE, np.float32)
    with fastps.serve(data_dir=tmp_path, keep_history=HISTORY) as server:
        with fastps.connect(server, ack="logged", timeout=PATIENT) as ps:
            ps.register("w", begin, optimizer=fastps.DiLoCo.outer)

        def work(rank: int) -> None:
            ps = fastps.connect(server, name=f"g{rank}", ack="logged", timeout=PATIENT)
            mode = fastps.DiLoCo(every=2, workers=WORKERS)
            with ps, fastps.Worker(ps, {"w": begin.copy()}, mode=mode, rank=rank) as worker:
                for _ in range(6):
                    worker.step(values={"w": worker.params["w"] - np.float32(0.1)}, samples=1)

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(WORKERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    past = fastps.history(tmp_path)
    rows = past.changes[past.is_gradient & (past.changes["workers"] == WORKERS)]
    assert len(rows) >= 2 * WORKERS
    said = said_of(Kept(str(tmp_path)), int(rows["version"][-1]))[0]
    assert all(f"'g{rank}' (its push " in said for rank in range(WORKERS)), said


def test_every_kind_of_change_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, SIZE))
    y = np.sign(x @ np.ones(SIZE))

    def objective(params: fastps.Arrays, rows: np.ndarray) -> tuple[float, dict[str, np.ndarray]]:
        margin = y[rows] * (x[rows] @ params["w"])
        slope = -y[rows] / (1 + np.exp(margin))
        return float(np.logaddexp(0, -margin).sum()), {"w": slope @ x[rows]}

    with (
        fastps.serve(2, data_dir=tmp_path, keep_history=HISTORY) as server,
        fastps.connect(server, name="boss", ack="logged", timeout=PATIENT) as ps,
    ):
        ps.register("w", np.zeros(SIZE), optimizer=fastps.SGD(lr=0.1))
        ps.register("u", np.zeros(SIZE, np.float32), optimizer=fastps.Adam(lr=0.1))
        ps.register("v", np.zeros((3, 2), np.float32), optimizer=fastps.SGD(lr=0.1))
        made = {"registered": 1}
        made["assigned"] = ps.assign("w", np.full(SIZE, 0.5)).version
        made["state"] = ps.load_state("u", ps.state("u")).version
        made["rows"] = ps.assign({"v": fastps.Sparse([1], np.full((1, 2), 3, np.float32))})["v"].version
        fastps.optimize.minimize(ps, ["w"], objective, samples=len(x), l2=1e-3)
        made["program"] = ps.versions("w")["w"]
    past = fastps.history(tmp_path)
    programs = past.changes[past.is_program]
    assert len(programs) > 0
    assert not (past.is_program & past.is_gradient).any()
    assert {past.name(int(change["client"])) for change in programs} == {"boss"}
    kept = Kept(str(tmp_path))
    assert any("an assignment by 'boss' (its push" in line for line in said_of(kept, made["assigned"]))
    for kind, wanted in [
        ("registered", "of values to "),
        ("assigned", "of values to "),
        ("rows", "|x| 4.24"),
        ("state", "of optimizer state to u: |x| 0"),
        ("program", "a program on the vectors of 'minimize', command "),
        ("program", "of its coordinator 'boss', to w"),
        ("program", "w moved by "),
    ]:
        lines = said_of(kept, made[kind])
        assert any(wanted in line for line in lines), (kind, lines)
        assert not any("not finite" in line for line in lines), (kind, lines)
    assert main(["history", str(tmp_path)]) == 0
    assert "worker" not in capfd.readouterr().out, "no gradient was pushed"
