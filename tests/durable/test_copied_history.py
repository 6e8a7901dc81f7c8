"""Any version of a run comes back from the bucket alone: real servers, and moto in place of S3."""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fastps
from fastps.commands.cli import main
from fastps.commands.kit.servers import free_ports

AWS = {"AWS_ACCESS_KEY_ID": "user", "AWS_SECRET_ACCESS_KEY": "hidden-secret", "AWS_REGION": "us-east-1"}
BUCKETS = itertools.count(1)
SHAPES = {"a": (300, 3), "b": (17,), "c": (5,), "d": (2, 2), "e": (40,)}


@pytest.fixture(params=["file", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A place for copies, with nothing in it."""
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    if request.param == "file":
        yield (tmp_path / "a bucket").as_uri()
        return
    moto = pytest.importorskip("moto.server", reason="moto is not installed")
    (port,) = free_ports(1)
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=port, verbose=False)
    server.start()
    try:
        endpoint = f"http://127.0.0.1:{port}"
        bucket = f"history-{os.getpid()}-{next(BUCKETS)}"
        with urllib.request.urlopen(urllib.request.Request(f"{endpoint}/{bucket}", method="PUT")) as answer:
            assert answer.status == 200
        for name, value in {**AWS, "AWS_ENDPOINT_URL": endpoint, "AWS_ALLOW_HTTP": "true"}.items():
            monkeypatch.setenv(name, value)
        yield f"s3://{bucket}/runs/first"
    finally:
        server.stop()


@contextmanager
def serving(shards: int, data: Path, url: str, listen: str) -> Iterator[subprocess.Popen[str]]:
    """Servers in a process of their own, which is killed at the end."""
    command = [sys.executable, "-m", "fastps", "serve", "--shards", str(shards), "--listen", listen]
    command += ["--web", "off", "--data-dir", str(data), "--snapshot-after", "1", "--snapshot-every", "0.5"]
    command += ["--copy-to", url, "--copy-history", "--keep-history", "1GiB"]
    with data.with_name(f"{data.name}.log").open("a") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        assert process.stdout is not None
        for _ in range(shards):
            assert "listening on" in process.stdout.readline(), data.with_name(f"{data.name}.log").read_text()
        yield process
    finally:
        process.kill()
        process.communicate()


def gradients(rng: np.random.Generator) -> dict[str, np.ndarray]:
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


def until_copied(url: str, version: int) -> None:
    """The version on all shards. The next snapshots seal the log that has it."""
    end = time.monotonic() + 120
    while True:
        try:
            if min(span.last for span in fastps.history(url).spans) >= version:
                return
        except fastps.FastpsError:
            assert time.monotonic() < end  # nothing is there yet
        assert time.monotonic() < end
        time.sleep(0.3)


def newest(url: str) -> int:
    """The newest version in a bucket; 0: there is none yet."""
    try:
        return fastps.history(url).spans[0].last
    except fastps.ConfigError as error:
        if "no history yet" in str(error) or "no complete copy" in str(error):
            return 0
        raise


def train(address: str, had: dict[int, dict[str, np.ndarray]], steps: int, seed: int) -> None:
    """Two workers in turn; what each version of the tensors was."""
    rng = np.random.default_rng(seed)
    workers = [fastps.connect(address, name=f"gpu-{k}", ack="logged", timeout=60.0) for k in (7, 8)]
    if not workers[0].names():
        for name, shape in SHAPES.items():
            workers[0].register(name, np.zeros(shape, np.float32), optimizer=fastps.Adam(lr=0.01))
    for step in range(steps):
        ps = workers[step % 2]
        codec = fastps.Int8() if step % 3 else None
        version = ps.push(gradients(rng), codec=codec, note=f"batch {step}")["a"].version
        had[version] = ps.pull([*SHAPES])
        if step % 10 == 0:
            time.sleep(0.1)  # several snapshots on the way
    for ps in workers:
        ps.close()


def values(folder: Path) -> dict[str, np.ndarray]:
    shards = len([*folder.glob("shard-*")])
    with fastps.serve(shards, data_dir=folder) as server, fastps.connect(server.address_list) as ps:
        return ps.pull(ps.names())


@pytest.mark.parametrize("shards", [1, 2])
def test_a_bucket_gives_the_bytes_that_the_folder_gives(
    url: str, shards: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    data, had = tmp_path / "data", {}
    ports = free_ports(shards)
    addresses = ",".join(f"127.0.0.1:{port}" for port in ports)
    with serving(shards, data, url, f"127.0.0.1:{ports[0]}"):
        train(addresses, had, 60, seed=shards)
        marked = max(had)
        with fastps.connect(addresses, timeout=60.0) as ps:
            ps.mark("epoch 1")
        train(addresses, had, 3, seed=9)
        last = max(had)
        until_copied(url, last)
        # The servers run and copy meanwhile.
        for version in [1, last // 3, last // 2, last - 1]:
            one, other = tmp_path / f"bucket-{version}", tmp_path / f"folder-{version}"
            assert fastps.rewind(url, one, to=version, shards=3) == []
            assert fastps.rewind(data, other, to=version, shards=3) == []
            mine, theirs = values(one), values(other)
            for name in SHAPES:
                assert mine[name].tobytes() == theirs[name].tobytes(), (version, name)
                if version in had:
                    assert mine[name].tobytes() == had[version][name].tobytes(), (version, name)
    # The machine is gone.
    whole = fastps.history(data, norms=True)
    shutil.rmtree(data)
    copied = fastps.history(url, norms=True)
    assert copied.clients == whole.clients
    assert [mark.name for mark in copied.marks] == ["epoch 1"]
    assert len(copied.changes) <= len(whole.changes)
    for shard in range(shards):
        mine = copied.changes[copied.changes["shard"] == shard]
        theirs = whole.changes[whole.changes["shard"] == shard][: len(mine)]
        assert mine["version"].tolist() == theirs["version"].tolist()
        np.testing.assert_array_equal(mine["norm"], theirs["norm"])
    with fastps.rewind(url, to_mark="epoch 1") as moment:
        assert moment.pull("a").tobytes() == had[marked]["a"].tobytes()
    capfd.readouterr()
    row = copied.changes[copied.changes["version"] == 20][0]
    push, name = int(row["push"]), copied.name(int(row["client"]))
    out = tmp_path / "by-push"
    assert main(["rewind", url, "--to-push", f"{name}:{push}", "--out", str(out)]) == 0
    assert values(out)["a"].tobytes() == had[20]["a"].tobytes()
    assert json.loads((out / "rewound.json").read_text())["from"] == url
    capfd.readouterr()
    assert main(["history", "--json", url]) == 0
    shown = json.loads(capfd.readouterr().out)
    assert [shard["path"] for shard in shown["shards"]] == [f"{url}/history-{k}" for k in range(shards)]
    for arguments, why in [
        (["--to", "9999"], "after the last change"),
        (["--to-mark", "epoch 2"], 'did you mean "epoch 1"'),
        (["--to-time", "1970-01-01T00:00:00Z"], "before"),
        (["--to-time", "9999-01-01T00:00:00Z"], "ends before the moment"),
    ]:
        assert main(["rewind", url, *arguments, "--out", str(tmp_path / "none")]) == 1
        error = capfd.readouterr().err
        assert why in error
        assert "fastps-past-" not in error, "the bucket is named, not a temporary folder"
        assert not (tmp_path / "none").exists()
    script = tmp_path / "judge.py"
    script.write_text(
        "import sys, fastps\n"
        "with fastps.connect(sys.argv[1]) as ps:\n"
        f"    sys.exit(ps.versions('a')['a'] >= {last // 2})\n"
    )
    command = [sys.executable, "-m", "fastps", "bisect", url, "--good", "3", "--bad", str(last - 1)]
    command += ["--run", f"{sys.executable} {script} {{addresses}}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert f"first bad version: {last // 2}\n" in done.stdout, done.stdout + done.stderr
    assert "of worker 'gpu-" in done.stdout


@pytest.mark.parametrize("url", ["file"], indirect=True)
def test_fifty_moments_of_five_shards_come_back_from_the_bucket(url: str, tmp_path: Path) -> None:
    had: dict[int, dict[str, np.ndarray]] = {}
    ports = free_ports(5)
    addresses = ",".join(f"127.0.0.1:{port}" for port in ports)
    with serving(5, tmp_path / "data", url, f"127.0.0.1:{ports[0]}"):
        train(addresses, had, 80, seed=5)
        until_copied(url, max(had))
        with fastps.connect(addresses, timeout=60.0) as ps:
            end = time.monotonic() + 120
            while not all(copied_history(shard) for shard in ps.stats()["shards"]):
                assert time.monotonic() < end
                time.sleep(0.1)
            assert all(shard["counters"]["slices"] == 1 for shard in ps.stats()["shards"])
    shutil.rmtree(tmp_path / "data")
    for version in random.Random(5).sample(sorted(had), 50):
        with fastps.rewind(url, to=version) as moment:
            for name, before in had[version].items():
                assert moment.pull(name).tobytes() == before.tobytes(), (version, name)


def copied_history(shard: dict[str, Any]) -> int:
    """Bytes of a shard's history in the bucket, by its counters."""
    assert shard["counters"]["history_copies_failed"] == 0
    return shard["counters"]["history_copied_bytes"]


def test_a_server_killed_while_it_copies_leaves_what_can_be_read(url: str, tmp_path: Path) -> None:
    data, had = tmp_path / "data", {}
    (port,) = free_ports(1)
    address = f"127.0.0.1:{port}"
    chance = random.Random(5)
    for k in range(4):
        with serving(1, data, url, address) as process:
            train(address, had, 30, seed=k)
            time.sleep(chance.uniform(0.0, 1.2))
            process.send_signal(signal.SIGKILL)
            process.wait(timeout=60)
        last = newest(url)
        # Whatever is there is a part of the run.
        for version in {last // 2, last} & had.keys():
            with fastps.rewind(url, to=version) as moment:
                assert moment.pull("a").tobytes() == had[version]["a"].tobytes(), version
    last = max(had)
    with serving(1, data, url, address):
        until_copied(url, last)
    for version in range(min(had), last, 17):
        with fastps.rewind(url, to=version) as moment:
            assert moment.pull("a").tobytes() == had[version]["a"].tobytes(), version


def test_history_needs_a_place_and_something_to_copy(tmp_path: Path) -> None:
    copies = (tmp_path / "copies").as_uri()
    for options, needed in [
        ({"copy_history": True, "data_dir": tmp_path / "d", "keep_history": 1 << 20}, "copy_to="),
        ({"copy_history": True, "data_dir": tmp_path / "d", "copy_to": copies}, "keep_history="),
    ]:
        with pytest.raises(fastps.ConfigError, match="copy_history") as caught:
            fastps.serve(**options)
        assert needed in str(caught.value)
    with (
        fastps.serve(data_dir=tmp_path / "d", copy_to=copies) as server,
        fastps.connect(server.address_list) as ps,
    ):
        ps.register("w", np.zeros(2, np.float32), optimizer=fastps.SGD(lr=1.0))
        assert main(["checkpoint", "save", *server.address_list]) == 0
    with pytest.raises(fastps.ConfigError, match="no history yet"):
        fastps.history(copies)
    with pytest.raises(fastps.ConfigError, match="no complete copy"):
        fastps.rewind((tmp_path / "nowhere").as_uri(), to=1)
