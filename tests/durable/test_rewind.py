"""Any version of a run comes back, and a bad push is found by bisection, over real servers."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import fastps
from fastps._shared.process import CommandError
from fastps.commands.cli import main
from fastps.commands.kit.bisection import BAD, GOOD, SKIP, Search
from fastps.commands.kit.servers import free_ports

SHAPES = {"a": (300, 3), "b": (17,)}
HISTORY = 1 << 30


def run(folder: Path, shards: int, steps: int, spoil: int = -1) -> dict[int, dict[str, np.ndarray]]:
    """Two workers in turn, with a codec, rows and an assignment; what each version of the tensors was."""
    rng = np.random.default_rng(shards)
    had: dict[int, dict[str, np.ndarray]] = {}
    with fastps.serve(shards, data_dir=folder, keep_history=HISTORY, snapshot_after=1) as server:
        workers = [
            fastps.connect(server.address_list, name=f"gpu-{k}", ack="logged", timeout=60.0) for k in (7, 8)
        ]
        for name in ("a", "b"):
            zeros = np.zeros(SHAPES[name], np.float32)
            workers[0].register(name, zeros, optimizer=fastps.Adam(lr=0.01))
        for step in range(steps):
            ps = workers[step % 2]
            gradient = {name: rng.normal(size=SHAPES[name]).astype(np.float32) for name in ("a", "b")}
            if step == spoil:
                gradient = {name: value * 1000 for name, value in gradient.items()}
            version = ps.push(gradient, codec=fastps.Int8() if step % 3 else None)["a"].version
            had[version] = ps.pull(["a", "b"])
            if step == steps // 2:
                assert main(["checkpoint", "save", *server.address_list]) == 0
        for ps in workers:
            ps.close()
    return had


def values(folder: Path) -> dict[str, np.ndarray]:
    shards = len([*folder.glob("shard-*")])
    with fastps.serve(shards, data_dir=folder) as server, fastps.connect(server.address_list) as ps:
        return ps.pull(ps.names())


def test_any_version_comes_back_on_any_number_of_shards(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for shards in (1, 2, 5):
        folder = tmp_path / str(shards)
        had = run(folder, shards, 24)
        for version in [*had][::7]:
            out = tmp_path / f"{shards}-{version}"
            assert fastps.rewind(folder, out, to=version, shards=3) == []
            now = values(out)
            assert all((now[name] == had[version][name]).all() for name in had[version]), version
        past = fastps.history(folder, norms=True)
        assert {past.name(client) for client in past.changes["client"][past.is_gradient]} == {
            "gpu-7",
            "gpu-8",
        }
        assert len(past.spans) == shards
        assert max(span.last for span in past.spans) == max(had)
        out = tmp_path / f"{shards}-by-push"
        push = int(past.changes["push"][past.changes["version"] == 20][0])
        name = past.name(int(past.changes["client"][past.changes["version"] == 20][0]))
        assert main(["rewind", str(folder), "--to-push", f"{name}:{push}", "--out", str(out)]) == 0
        assert (values(out)["a"] == had[20]["a"]).all()
        capfd.readouterr()
        assert main(["history", "--json", str(folder)]) == 0
        shown = json.loads(capfd.readouterr().out)
        assert {worker["name"] for worker in shown["workers"]} == {"gpu-7", "gpu-8"}
    spans = fastps.history(folder).spans
    first, last = min(one.first_time or 0 for one in spans), max(one.last_time or 0 for one in spans)
    noted = [f"{time:.3f} s since 1970" for time in (first, last)]
    wrong = [
        (["--to", "999"], "after the last change"),
        (["--to", "a=999"], 'tensor "a" never had version 999'),
        (["--to-push", "gpu-9:1"], 'did you mean "gpu-'),
        (["--to-push", "gpu-7:999"], "expected one of its pushes "),
        (["--to-push", "gpu-7:999"], "push 999, which is not in the history"),
        (["--to-push", "face:3"], 'got "face", which pushed nothing'),
        (["--to-push", "7:3"], 'got "7", which pushed nothing'),
        (["--to", "a=999"], "expected version 1 to 25, got 999"),
        (["--to", "aa=9"], 'no tensor is called "aa"'),
        (["--to", "aa=9"], 'did you mean "a"?'),
        (["--to-time", "1970-01-01T00:00:00Z"], "before"),
        (
            ["--to-time", "1970-01-01T00:00:00Z"],
            f"expected a time from {noted[0]} to {noted[1]}, got 0.000 s",
        ),
        (
            ["--to-time", "2930-01-01T00:00:00Z"],
            f"expected a time from {noted[0]} to {noted[1]}, got 30294691200",
        ),
        (["--to-time", "1e12"], "has not come yet"),
        (["--to-snapshot", "1"], "that `fastps checkpoint save --consistent` has taken, and there is none"),
    ]
    for arguments, why in wrong:
        assert main(["rewind", str(folder), *arguments, "--out", str(tmp_path / "none")]) == 1
        error = capfd.readouterr().err
        assert why in error, (arguments, error)
        assert not (tmp_path / "none").exists()


def test_a_log_without_times_says_so(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    data, out = tmp_path / "data", tmp_path / "out"
    with fastps.serve(data_dir=data) as server, fastps.connect(server, ack="logged") as ps:
        ps.register("w", np.zeros(2, np.float32), optimizer=fastps.SGD(lr=1.0))
    for clock in ("14:03", "2026-01-31T14:03:00Z"):
        assert main(["rewind", str(data), "--to-time", clock, "--out", str(out)]) == 1
        error = capfd.readouterr().err
        assert "servers that ran with --keep-history" in error, (clock, error)
        assert not out.exists()


def test_a_time_of_day_is_the_last_one_of_the_history(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with (
        fastps.serve(data_dir=data, keep_history=HISTORY) as server,
        fastps.connect(server.address_list, ack="logged") as ps,
    ):
        ps.register("w", np.zeros(2, np.float32), optimizer=fastps.SGD(lr=1.0))
        ps.push({"w": np.ones(2, np.float32)})
        time.sleep(2.5)
        ps.push({"w": np.ones(2, np.float32)})
        between = time.gmtime(time.time() - 0.5)
    for clock in (time.strftime("%H:%M:%S", between), time.strftime("%Y-%m-%dT%H:%M:%SZ", between)):
        out = tmp_path / clock
        assert main(["rewind", str(data), "--to-time", clock, "--out", str(out)]) == 0
        assert values(out)["w"].tolist() == [-1.0, -1.0]


def test_consistent_snapshots_come_back(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    data, had = tmp_path / "data", []
    with (
        fastps.serve(2, data_dir=data, keep_history=HISTORY) as server,
        fastps.connect(server.address_list, name="gpu-7", ack="logged") as ps,
    ):
        for name in ("a", "b"):
            ps.register(name, np.zeros(SHAPES[name], np.float32), optimizer=fastps.Adam(lr=0.01))
        for _ in range(3):
            for _ in range(5):
                ps.push({name: np.ones(SHAPES[name], np.float32) for name in ("a", "b")})
            save = ["checkpoint", "save", *server.address_list]
            assert main([*save, "--consistent=default"]) == 0
            had.append(ps.pull(["a", "b"]))
            ps.push("a", np.ones(SHAPES["a"], np.float32))
            assert main(save) == 0
        capfd.readouterr()
        assert main(["checkpoint", "list", "--json", str(data)]) == 0
        shards = json.loads(capfd.readouterr().out)["shards"]
        first = next(shard["snapshots"] for shard in shards if shard["shard"] == 0)
        cuts = sorted(one["number"] for one in first if one["cut"])
        others = [one["number"] for one in first if not one["cut"]]
        assert len(cuts) == len(had)
        for number, expected in zip(cuts, had, strict=True):
            out = tmp_path / f"at-{number}"
            assert main(["rewind", str(data), "--to-snapshot", str(number), "--out", str(out)]) == 0
            now = values(out)
            assert all(now[name].tobytes() == expected[name].tobytes() for name in expected), number
        for number in (others[0], 999):
            none = ["--to-snapshot", str(number), "--out", str(tmp_path / "none")]
            assert main(["rewind", str(data), *none]) == 1
            assert f"expected one of {cuts[::-1]}" in capfd.readouterr().err
        # What a moment of one shard means for the other.
        name = min(("a", "b"), key=lambda name: (name != "b", name))
        assert main(["rewind", str(data), "--to", f"{name}=3", "--out", str(tmp_path / "b3")]) == 0
        assert "slices are as of the time of the moment" in capfd.readouterr().err


def test_a_worker_of_the_run_is_a_stranger_to_its_past(tmp_path: Path) -> None:
    listen = f"127.0.0.1:{free_ports(1)[0]}"
    with fastps.serve(data_dir=tmp_path / "now", keep_history=HISTORY, listen=listen) as server:
        ps = fastps.connect(server.address_list, timeout=30.0, ack="logged")
        ps.register("w", np.zeros(2, np.float32), optimizer=fastps.SGD(lr=1.0))
        for _ in range(3):
            ps.push("w", np.ones(2, np.float32))
        fastps.rewind(tmp_path / "now", tmp_path / "past", to=2)
    with (
        fastps.serve(listen=listen, data_dir=tmp_path / "past"),
        pytest.raises(fastps.FastpsError, match="cluster"),
    ):
        ps.push("w", np.ones(2, np.float32))


def test_folders_of_two_clusters_are_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Also by `history`, which looks up no slice of the other shard."""
    for name in ("one", "other"):
        run(tmp_path / name, 2, 4)
    mixed = tmp_path / "mixed"
    shutil.copytree(tmp_path / "one", mixed)
    shutil.rmtree(mixed / "shard-1")
    shutil.copytree(tmp_path / "other" / "shard-1", mixed / "shard-1")
    out, search = tmp_path / "out", ["--good", "2", "--run", "true"]
    for arguments in (
        ["history", str(mixed)],
        ["rewind", str(mixed), "--to", "3", "--out", str(out)],
        ["rewind", str(mixed), "--to-push", "gpu-7:1", "--out", str(out)],
        ["bisect", str(mixed), *search],
    ):
        assert main(arguments) == 1, arguments
        assert "shards 0 and 1 of different clusters" in capfd.readouterr().err, arguments
    with pytest.raises(fastps.ConfigError, match="of different clusters"):
        fastps.rewind(mixed, to=3)
    assert not out.exists()


def test_bisect_finds_the_first_bad_version_within_its_runs() -> None:
    def judge(first_bad: int, skipped: frozenset[int] = frozenset()) -> Callable[[int], str]:
        return lambda version: SKIP if version in skipped else BAD if version >= first_bad else GOOD

    for first_bad in [40_001, 40_002, 43_333, 43_334, 45_000, 49_999, 50_000]:
        search = Search(40_000, 50_000, judge(first_bad))
        assert search.run() == first_bad
        assert search.runs <= 15
    for last, constant, runs in [
        (8192, lambda version: GOOD, 1),
        (8192, lambda version: BAD, 2),
        (10_000, lambda version: GOOD, 1),
        (10_000, lambda version: BAD, 3),
    ]:
        search = Search(0, last, constant)
        with pytest.raises(CommandError, match=r"may (never|always) fail"):
            search.run()
        assert search.runs == runs
    for last in (1, 2, 3, 100, 8192, 8193):
        for first_bad in {1, last // 2 + 1, last}:
            search = Search(0, last, judge(first_bad))
            assert search.run() == first_bad
            assert search.runs <= 15
    assert Search(0, 9, judge(7, frozenset({3, 4, 5}))).run() == 7
    for skipped, end in ((9, "bad"), (0, "good")):
        with pytest.raises(CommandError, match=f"cannot judge version {skipped}: give another --{end}"):
            Search(0, 9, judge(7, frozenset({skipped}))).run()
    with pytest.raises(CommandError, match="one of version 7 to version 9"):
        Search(0, 9, judge(8, frozenset({7, 8}))).run()


def test_bisect_finds_a_planted_push(tmp_path: Path) -> None:
    folder, spoiled = tmp_path / "data", 33
    had = run(folder, 2, 40, spoil=spoiled)
    first_bad = [*had][spoiled]
    # Both forms of the command: a number on the last line, and an exit status.
    script = tmp_path / "judge.py"
    script.write_text(
        "import sys, numpy as np, fastps\n"
        "with fastps.connect(sys.argv[1]) as ps:\n"
        "    print('a and b'); print(max(abs(ps.state(name)['exp_avg']).max() for name in ('a', 'b')))\n"
    )
    bisect = [sys.executable, "-m", "fastps", "bisect", str(folder), "--good", "3", "--threshold", "10"]
    bisect += ["--run", f"{sys.executable} {script} {{addresses}}", "--resume", str(tmp_path / "verdicts")]
    for runs in (8, 0):
        done = subprocess.run(bisect, capture_output=True, text=True, check=False, timeout=300)
        assert done.returncode == 0, done.stderr
        found = f"first bad version: {first_bad}\n"
        assert found in done.stdout
        assert done.stdout.count(": good\n") + done.stdout.count(": bad\n") <= runs
    worker = f"gpu-{7 + spoiled % 2}"
    before, after = had[[*had][spoiled - 1]], had[first_bad]
    for name in ("a", "b"):
        old, new = before[name].astype(float), after[name].astype(float)
        moved = f"{name} moved by {np.linalg.norm(new - old):.3g}, from |{name}| {np.linalg.norm(old):.3g}\n"
        assert moved in done.stdout
    assert f"of worker '{worker}' to 'a' and 1 more tensor: lr 0.01" in done.stdout
    assert "x the median of the" in done.stdout


@pytest.mark.parametrize("shards", [1, 2])
def test_bisect_tries_only_moments_that_were(tmp_path: Path, shards: int) -> None:
    """Where a tensor changes ten times as often as another, versions are no moments, and pushes are."""
    folder = tmp_path / "data"
    with (
        fastps.serve(shards, data_dir=folder, keep_history=1 << 30) as server,
        fastps.connect(server.address_list, name="often", ack="logged") as often,
        fastps.connect(server.address_list, name="rarely", ack="logged") as rarely,
    ):
        start = {"a": np.zeros(4, np.float32), "b": np.zeros(4, np.float32)}
        often.register(start, optimizer=fastps.SGD(lr=1.0))
        for step in range(200):
            often.push("a", np.full(4, -1.0, np.float32))
            if step % 10 == 0:
                gradient = np.full(4, -1.0 if step != 120 else -400.0, np.float32)
                rarely.push({"b": gradient, "a": np.zeros(4, np.float32)}, note=f"batch {step}")
    script = tmp_path / "judge.py"
    script.write_text(
        "import sys, fastps\n"
        "with fastps.connect(sys.argv[1]) as ps:\n"
        "    print(abs(ps.pull('a')[0] - 10 * ps.pull('b')[0]))\n"
    )
    bisect = [sys.executable, "-m", "fastps", "bisect", str(folder), "--threshold"]
    run = ["--run", f"{sys.executable} {script} {{addresses}}", "--resume", str(tmp_path / "verdicts")]

    def said(*options: str) -> str:
        done = subprocess.run([*bisect, *options], capture_output=True, text=True, check=False, timeout=300)
        return done.stdout + done.stderr

    found = said("100", *run)
    assert "first bad push: 13 of worker 'rarely'" in found, found
    assert "push 13 of worker 'rarely' (batch 120) to '" in found
    assert "' and 1 more tensor: lr 1, |g| 800" in found
    assert "b moved by 800, from |b| 24" in found
    assert "first bad push: 13 of" in said("100", "--good", "1,00", "--bad", "1_90", *run)
    assert "of another search, by its threshold: expected 100.0, got 1.0" in said("1", *run)
    assert "has push 1 of worker" in said("100", "--good", "180", "--bad", "90", *run)
    with fastps.rewind(folder, to_push="rarely:13") as after:
        assert (after.pull("a")[0], after.pull("b")[0]) == (121.0, 412.0)
    with pytest.raises(fastps.ConfigError, match="to and to_push"):
        fastps.rewind(folder, to=3, to_push="rarely:14")
