"""The log of a server: whom it serves, and a reader that stops (a terminal after Ctrl-S, a busy program)."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import fastps


@pytest.mark.timeout(180)
def test_a_log_that_nobody_reads_stops_nothing() -> None:
    """Far more lines than a pipe holds are written; the server serves, and obeys SIGTERM."""
    command = [sys.executable, "-m", "fastps", "serve", "--listen", "127.0.0.1:0"]
    pipe = subprocess.PIPE
    server = subprocess.Popen(
        command, stdout=pipe, stderr=pipe, text=True, env=os.environ | {"FASTPS_LOG": "trace"}
    )
    try:
        assert server.stdout is not None
        assert server.stderr is not None
        address = server.stdout.readline().split()[-1]
        gradient = np.ones(100_000, np.float32)
        with fastps.connect(address, timeout=60.0, transport="tcp") as ps:
            ps.register("w", np.zeros(100_000, np.float32), fastps.SGD(lr=1.0))
            for _ in range(200):
                ps.push("w", gradient)
            assert (ps.pull("w") == -200).all()
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0
        held = server.stderr.read()
        assert len(held) > 32_000, "the log was too short to fill the pipe"
    finally:
        server.kill()
        server.communicate()


ZEROS = np.zeros(10, np.float32)
#: A worker that is killed: its process ends without a word.
KILLED = """
import os, sys
import fastps, numpy as np
ps = fastps.connect(sys.argv[1])
worker = fastps.Worker(ps, {"w": np.zeros(10, np.float32)}, mode=fastps.Async(), name="the killed one")
os._exit(0)
"""


@contextmanager
def logging_server(log: Path, *options: str, **variables: str) -> Iterator[str]:
    """A server in a separate process; yields its address."""
    command = [
        sys.executable,
        "-m",
        "fastps",
        "serve",
        "--listen",
        "127.0.0.1:0",
        "--lease-ms",
        "2000",
        *options,
    ]
    with log.open("w") as errors:
        server = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=os.environ | variables
        )
    try:
        assert server.stdout is not None
        yield re.findall(r"listening on ([\d.:]+)", server.stdout.readline())[0]
    finally:
        server.kill()
        server.communicate()


def await_line(log: Path, *words: str) -> str:
    """Waits for a line with these words."""
    deadline = time.monotonic() + 60
    while True:
        for line in log.read_text().splitlines():
            if all(word in line for word in words):
                return line
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)


@pytest.mark.timeout(180)
def test_who_comes_and_goes_is_logged(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with logging_server(log) as address, fastps.connect(address, transport="tcp") as ps:
        ps.register("w", ZEROS, fastps.SGD(lr=1.0))
        await_line(log, "INFO", "a client joined", f"pid {os.getpid()}")
        with fastps.Worker(ps, {"w": ZEROS}, mode=fastps.Async(), name="the tidy one") as worker:
            worker.step({"w": ZEROS})
            await_line(log, "INFO", "a worker joined its group", "the tidy one", "Async")
            with pytest.raises(fastps.ConfigError, match="another mode"):
                fastps.Worker(ps, {"w": ZEROS}, mode=fastps.Sync(workers=1), name="the odd one")
            await_line(log, "WARN", "a worker is refused", "the odd one", "another mode")
        await_line(log, "INFO", "a worker left its group")
        await_line(log, "INFO", "the client closed its session")
        assert "lease ran out" not in log.read_text(), "a clean exit is no lost lease"
        subprocess.run([sys.executable, "-c", KILLED, address], check=True)
        await_line(log, "INFO", "a worker joined its group", "the killed one")
        await_line(log, "INFO", "the client's lease ran out")
        closed = ps.stats()["shards"][0]["counters"]["sessions_closed"]
        assert closed >= 1


SECRETS = {"AWS_ACCESS_KEY_ID": "AKIAUNTOLD", "AWS_SECRET_ACCESS_KEY": "hush-hush-hush"}


def events(log: Path, form: str) -> set[tuple[str, str, str | None]]:
    """Level, text, and the client or worker of each event."""
    found = set()
    for line in log.read_text().splitlines():
        if form == "json":
            event = json.loads(line)
            assert event["timestamp"].endswith("Z")
            assert event["target"].startswith("fastps")
            found.add((event["level"], event["message"], event.get("worker") or event.get("client")))
            continue
        line = re.sub(r"\x1b\[[\d;]*m", "", line)
        level, text = re.findall(r"^\S+ +([A-Z]+) [\w:]+: (.*?)(?= \w+=|$)", line)[0]
        names = re.findall(r'(?:worker|client)="(.*?)"', line)
        found.add((level, text, names[0] if names else None))
    return found


@pytest.mark.timeout(180)
def test_both_formats_have_the_same_events_and_no_secret(tmp_path: Path) -> None:
    """A client joins, trains, is refused and leaves; copies fail; each format says the same."""
    found = {}
    for form in ("text", "json"):
        log, data = tmp_path / form, tmp_path / f"data {form}"
        options = ["--log-format", form, "--data-dir", str(data), "--copy-to", "s3://nowhere/x"]
        endpoint = {"AWS_ENDPOINT_URL": "http://127.0.0.1:9", "AWS_ALLOW_HTTP": "true", "AWS_REGION": "x"}
        with (
            logging_server(log, *options, **SECRETS, **endpoint) as address,
            fastps.connect(address, transport="tcp", name="the client") as ps,
        ):
            ps.register("w", ZEROS, fastps.SGD(lr=1.0))
            with fastps.Worker(ps, {"w": ZEROS}, mode=fastps.Async(), name="the worker") as worker:
                worker.step({"w": ZEROS})
                with pytest.raises(fastps.ConfigError, match="another mode"):
                    fastps.Worker(ps, {"w": ZEROS}, mode=fastps.Sync(workers=1), name="the odd one")
            await_line(log, "a worker left its group")
        text = log.read_text()
        assert not [secret for secret in SECRETS.values() if secret in text]
        found[form] = events(log, form)
    # The odd one's client may still be leaving when a server is killed.
    both = found["text"] & found["json"]
    assert ("INFO", "a worker joined its group", "the worker") in both
    assert ("WARN", "a worker is refused", "the odd one") in both
    assert ("INFO", "a worker left its group", "the worker") in both
    assert ("INFO", "a client joined", "the client") in both
    differ = {text for _, text, _ in found["text"] ^ found["json"]}
    assert differ <= {
        "the client closed its session",
        "the snapshot is not copied; the next one will be tried",
    }


def test_every_line_of_a_server_is_json(tmp_path: Path) -> None:
    """Also before there is a log, and of a server that does not start."""
    config = tmp_path / "fastps.toml"
    config.write_text('log-format = "json"\nno-such-key = 1\n')
    form = ["--log-format", "json"]
    by_variable = {"FASTPS_LOG_FORMAT": "json"}
    cases: list[tuple[list[str], dict[str, str], int, list[str]]] = [
        ([*form, "--listen", "127.0.0.1:99999"], {}, 1, ["127.0.0.1:99999"]),
        (["--log-format=json", "--no-such-option"], {}, 2, ["--no-such-option"]),
        ([*form, "--shards", "two"], {}, 2, ["--shards"]),
        (["--shards", "two"], by_variable, 2, ["--shards"]),
        (["--config", str(config)], {}, 2, ["no-such-key"]),
        (form, {"FASTPS_LOG": "loud"}, 2, ["FASTPS_LOG"]),
        ([*form, "--shards", "0"], {"FASTPS_" + "LISTN": "x"}, 1, ["FASTPS_LISTEN", "number of shards"]),
    ]
    for options, variables, code, texts in cases:
        command = [sys.executable, "-m", "fastps", "serve", *options]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=60, env=os.environ | variables)
        assert (ran.returncode, ran.stdout) == (code, ""), options
        found = [json.loads(line) for line in ran.stderr.splitlines()]
        assert [event["level"] for event in found] == ["WARN", "ERROR"][-len(texts) :], options
        for event, text in zip(found, texts, strict=True):
            assert text in event["message"], event
            assert not event["message"].startswith("error"), event
            assert event["timestamp"].endswith("Z"), event
    command = [sys.executable, "-m", "fastps", "serve", *form, "--listen", "127.0.0.1:0", "--web", "off"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        lines = [json.loads(server.stdout.readline()) for _ in range(2)]
        server.terminate()
        assert server.stdout.read() == ""
    assert "shard 0 listening on 127.0.0.1:" in lines[0]["message"], lines
    assert {line["level"] for line in lines} == {"INFO"}


def test_routine_snapshots_write_no_lines(tmp_path: Path) -> None:
    """Dozens of automatic snapshots and copies: one line of each kind."""
    log, n = tmp_path / "log", 300_000
    options = ["--data-dir", str(tmp_path / "data"), "--snapshot-every", "0.1", "--snapshot-after", "1"]
    options += ["--copy-to", (tmp_path / "copies").as_uri()]
    with logging_server(log, *options) as address, fastps.connect(address) as ps:
        ps.register("w", np.zeros(n, np.float32), fastps.SGD(lr=1e-3))
        deadline = time.monotonic() + 120
        while (counters := ps.stats()["shards"][0]["counters"])["snapshot"] < 20 or counters["copy"] < 3:
            assert time.monotonic() < deadline, counters
            ps.push("w", np.ones(n, np.float32))
        await_line(log, "copied snapshot")
        text = log.read_text()
        assert (len(re.findall("INFO.* snapshot ", text)), text.count("copied snapshot")) == (2, 1), text
        before = len(text.splitlines())
        for _ in range(20):
            ps.push("w", np.ones(n, np.float32))
            time.sleep(0.02)
        assert len(log.read_text().splitlines()) == before
