"""The demo as a new user runs it: a short ``fastps demo`` in a subprocess, and its ledger separately."""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fastps._shared.process import CommandError
from fastps.commands.demo import command, run
from fastps.commands.demo.config import CODECS, default_data, from_arguments
from fastps.commands.demo.output.view import PlainView
from fastps.commands.kit.datasets import load
from fastps.commands.kit.ledger import COUNTER, EXIT_MISMATCH, Account, Ledger, LedgerError, reconcile

KEYS = {
    "test_accuracy",
    "updates",
    "seconds",
    "staleness_p50",
    "staleness_p99",
    "bytes_pushed",
    "bytes_saved",
    "serial_test_accuracy",
    "acknowledged",
    "versions",
    "out",
}


def demo(*options: str, cwd: Path, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run ``fastps demo`` to its end in ``cwd``."""
    command = [sys.executable, "-m", "fastps", "demo", *options]
    return subprocess.run(
        command, cwd=cwd, env={**os.environ, **(env or {})}, capture_output=True, text=True, timeout=120
    )


def processes_of(folder: Path) -> list[int]:
    """Processes whose environment marks them as started by a test in ``folder`` (Linux)."""
    mark = f"DEMO_TEST_MARK={folder}".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def wait_until_gone(folder: Path, seconds: float = 20.0) -> list[int]:
    deadline = time.monotonic() + seconds
    while (left := processes_of(folder)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


@pytest.mark.parametrize(
    "codec",
    [
        codec if codec in ("float32", "onebit") else pytest.param(codec, marks=pytest.mark.nightly)
        for codec in CODECS
    ],
)
def test_demo_learns_survives_a_kill_and_reconciles(codec: str, tmp_path: Path) -> None:
    env = {"DEMO_TEST_MARK": str(tmp_path)}
    # A number of updates, so that accuracy does not depend on the machine's speed.
    limits = ["--data", "digits", "--updates", "4000", "--seconds", "90"]
    ran = demo("--codec", codec, *limits, "--json", cwd=tmp_path, env=env)
    assert ran.returncode == 0, ran.stderr
    result: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    assert set(result) >= KEYS
    assert len(ran.stdout.splitlines()) == 1
    assert "killed (SIGKILL)" in ran.stderr
    assert "started late" in ran.stderr
    assert result["test_accuracy"] >= 0.96
    assert result["serial_test_accuracy"] >= 0.96
    for version in result["versions"].values():
        assert result["acknowledged"] <= version <= result["acknowledged"] + result["in_flight"]
    elements = 64 * 96 + 96 + 96 * 10 + 10
    float32_bytes = result["bytes_pushed"] + result["bytes_saved"]
    assert (
        float32_bytes >= 0.5 * result["updates"] * 4 * elements
    )  # the killed worker's last report may be old
    assert (result["bytes_saved"] == 0) == (codec == "float32")
    assert Path(result["out"]) == tmp_path / "fastps-demo"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["fastps-demo"]
    assert (tmp_path / "fastps-demo" / "report.json").is_file()
    assert wait_until_gone(tmp_path) == []


def test_undisturbed_books_are_exact(tmp_path: Path) -> None:
    ran = demo(
        "--no-kill",
        "--data",
        "digits",
        "--seconds",
        "2",
        "--push-every",
        "3",
        "--pull-every",
        "5",
        "--workers",
        "2",
        "--json",
        cwd=tmp_path,
    )
    assert ran.returncode == 0, ran.stderr
    result = json.loads(ran.stdout.splitlines()[-1])
    assert set(result["versions"].values()) == {result["acknowledged"]} == {result["updates"]}
    assert result["in_flight"] == 0
    # Each worker's last push carries what was left.
    assert 0 <= 3 * result["updates"] - result["minibatches"] <= 2 * 2


def test_the_counting_tensor_never_counts_beyond_its_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here it carries as early as it does late in a run of hours."""
    monkeypatch.setattr(run, "CARRY_AT", 100)
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    config = from_arguments(
        parser.parse_args(["--data", "digits", "--seconds", "1.5", "--workers", "2", "--shards", "1"])
    )
    training = run.Training(config, load(config.data, None), PlainView(io.StringIO()), tmp_path)
    balance = training.execute().balance
    assert balance is not None
    assert training._carries > 1
    assert balance.minibatches > 100 * training._carries
    assert balance.acknowledged <= balance.applied[COUNTER] <= balance.acknowledged + balance.in_flight


def test_the_options_of_a_server_of_one_s_own_are_not_the_demo_s(tmp_path: Path) -> None:
    (data := tmp_path / "data").mkdir()
    env = {"FASTPS_SERVER_DATA_DIR": str(data), "FASTPS_LISTEN_UNIX": str(data / "socket")}
    ran = demo("--no-kill", "--seconds", "1", "--workers", "1", cwd=tmp_path, env=env)
    assert ran.returncode == 0, ran.stderr
    assert list(data.iterdir()) == []


@pytest.mark.parametrize(
    ("number", "after"),
    [(signal.SIGINT, 0.3), (signal.SIGINT, 4.0), (signal.SIGTERM, 4.0), (signal.SIGKILL, 4.0)],
)
def test_nothing_stays_behind_when_it_is_stopped(
    number: signal.Signals, after: float, tmp_path: Path
) -> None:
    env = {**os.environ, "DEMO_TEST_MARK": str(tmp_path)}
    command = [sys.executable, "-m", "fastps", "demo", "--seconds", "60"]
    with subprocess.Popen(
        command, cwd=tmp_path, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        # Once the folder exists, the demo handles signals; before, Python does.
        end = time.monotonic() + 60
        while not (tmp_path / "fastps-demo").is_dir():
            assert process.poll() is None
            assert time.monotonic() < end
            time.sleep(0.01)
        time.sleep(after)
        assert process.poll() is None
        process.send_signal(number)
        _, errors = process.communicate(timeout=40)
    if number == signal.SIGKILL:
        assert process.returncode == -number
    else:
        assert process.returncode == 128 + number
        by = "Ctrl-C" if number == signal.SIGINT else number.name
        assert errors == f"fastps: stopped by {by}\n"
    assert wait_until_gone(tmp_path) == []
    assert {p.name for p in tmp_path.iterdir()} <= {"fastps-demo"}


def test_a_late_worker_that_takes_no_step_fails_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stopped(run.Training):
        def _start_worker(self, share: int, note: str = "") -> Any:
            worker = super()._start_worker(share, note)
            if note:
                worker.process.send_signal(signal.SIGSTOP)
            return worker

    monkeypatch.setattr(run, "LATE_TIMEOUT", 0.5)
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    config = from_arguments(
        parser.parse_args(["--data", "digits", "--seconds", "1", "--workers", "2", "--shards", "1"])
    )
    training = Stopped(config, load(config.data, None), PlainView(io.StringIO()), tmp_path)
    with pytest.raises(CommandError, match=r"worker 2, started late at .* s, has taken no step after"):
        training.execute()


def test_the_default_data_is_what_the_machine_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTPS_DATA_DIR", str(tmp_path))
    assert default_data() == ("shifted", None)
    (tmp_path / "mnist").mkdir()
    assert default_data() == ("mnist", str(tmp_path / "mnist"))
    monkeypatch.delenv("FASTPS_DATA_DIR")
    assert default_data() == ("shifted", None)


def test_plain_lines_without_the_extra(tmp_path: Path) -> None:
    """As from a wheel installed without ``[demo]``: rich and matplotlib cannot be found."""
    blocker = tmp_path / "site"
    blocker.mkdir()
    (blocker / "sitecustomize.py").write_text(
        "import importlib.util as u\n"
        "find = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name in ('rich', 'matplotlib') else find(name, *a)\n"
    )
    work = tmp_path / "work"
    work.mkdir()
    path = os.pathsep.join(filter(None, [str(blocker), os.environ.get("PYTHONPATH")]))
    ran = demo("--seconds", "1", cwd=work, env={"PYTHONPATH": path, "FASTPS_DATA_DIR": ""})
    assert ran.returncode == 0, ran.stderr
    assert [line for line in ran.stdout.splitlines() if len(line) > 80] == []
    late = re.search(r"done \(late\) +(\d+)", ran.stdout)
    assert late is not None, ran.stdout
    assert int(late[1]) > 0
    assert "pip install rich matplotlib" in ran.stdout
    assert not (work / "fastps-demo" / "demo.png").exists()


def test_wrong_usage_is_one_line_and_code_2(tmp_path: Path) -> None:
    ran = demo("--codec", "float31", cwd=tmp_path)
    assert ran.returncode == 2
    assert "float31" in ran.stderr
    for option, text, says in (
        ("--workers", "x", "'x' is not a whole number"),
        ("--push-every", "1.5", "'1.5' is not a whole number"),
        ("--seed", "x", "'x' is not a whole number"),
        ("--lr", "x", "'x' is not a positive number"),
        ("--compare", "sync,asynch", "'asynch' is not one of sync, bounded, local, async"),
        ("--compare", "sync,sync", "'sync,sync' names a mode twice"),
        ("--slow-worker", "0.5", "0.5 is not at least 1"),
    ):
        ran = demo(option, text, cwd=tmp_path)
        assert ran.returncode == 2
        assert ran.stderr.splitlines()[-1].endswith(f"argument {option}: {says}")
    for options, says in (
        ("--slow-worker 10", "--slow-worker is for --compare"),
        ("--compare sync,async --updates 100", "use --seconds instead of --updates"),
        ("--compare sync --workers 1", "--compare needs at least 2 workers"),
        ("--data shifted --dataset-dir .", "--dataset-dir is for --data mnist"),
    ):
        ran = demo(*options.split(), cwd=tmp_path)
        assert ran.returncode == 1
        assert says in ran.stderr
    ran = demo("--help", cwd=tmp_path, env={"COLUMNS": "80"})
    assert [line for line in ran.stdout.splitlines() if len(line) > 80] == []
    ran = demo("--data", "mnist", cwd=tmp_path)
    assert ran.returncode == 1
    assert ran.stderr.startswith("fastps: --data mnist needs --dataset-dir")
    assert len(ran.stderr.splitlines()) == 1
    (tmp_path / "taken").write_text("")
    ran = demo("--out", str(tmp_path / "taken"), cwd=tmp_path)
    assert ran.returncode == 1
    assert "choose a folder" in ran.stderr


FINISHED = [Account(10, 10, 10), Account(7, 7, 7)]


def test_the_books_balance() -> None:
    balance = reconcile(FINISHED, [Account(5, 5, 3)], 1, {"w": [22, 21], COUNTER: [20]}, 20.0)
    assert (balance.acknowledged, balance.in_flight) == (20, 2)
    assert balance.applied == {"w": 21, COUNTER: 20}


def test_minibatches_are_counted_where_pushes_hold_several() -> None:
    finished = [Account(11, 4, 4)]  # three pushes of 3 minibatches, and the flush pushed the last 2
    killed = [Account(7, 2, 1)]
    for applied, counted in ((5, 14.0), (6, 17.0)):
        assert reconcile(finished, killed, 3, {COUNTER: [applied]}, counted).applied == {COUNTER: applied}
    with pytest.raises(LedgerError, match="14 to 17 minibatch gradients sent, but the model contains 13"):
        reconcile(finished, killed, 3, {COUNTER: [5]}, 13.0)


@pytest.mark.parametrize(
    ("applied", "minibatches", "says"),
    [
        ({"w": [17], COUNTER: [16]}, 17.0, f"{COUNTER}: 17 pushes acknowledged, but versions made: 16"),
        ({"w": [8], COUNTER: [8]}, 8.0, "versions made: 8"),
        ({"w": [17, 18], COUNTER: [17]}, 17.0, "w: 17 pushes acknowledged, but versions made: 17 / 18"),
        ({"w": [17], COUNTER: [17]}, 9.0, "contains 9"),
        ({"w": [17], COUNTER: [17]}, 16.5, "contains 16.5"),
    ],
)
def test_what_does_not_balance_is_reported(
    applied: dict[str, list[int]], minibatches: float, says: str
) -> None:
    with pytest.raises(LedgerError, match=says) as caught:
        reconcile(FINISHED, [], 1, applied, minibatches)
    assert caught.value.exit_code == EXIT_MISMATCH


def test_a_finished_worker_without_a_receipt_is_reported() -> None:
    with pytest.raises(LedgerError, match="finished worker 0: 10 pushes issued, 9 acknowledged"):
        reconcile([Account(10, 10, 9)], [], 1, {"w": [9]}, 10.0)


def test_the_ledger_is_seen_by_other_readers(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    reader = Ledger(path, create=True)
    writer = Ledger(path)
    writer.will_step(12, 4)
    writer.acknowledge(3)
    assert reader.read() == Account(12, 4, 3)


MNIST = Path(os.environ.get("FASTPS_DATA_DIR", "/nowhere")) / "mnist"


@pytest.mark.nightly
@pytest.mark.timeout(400)
@pytest.mark.skipif(not MNIST.is_dir(), reason="FASTPS_DATA_DIR names no folder with mnist/")
def test_mnist_from_its_original_files(tmp_path: Path) -> None:
    options = ["--data", "mnist", "--dataset-dir", str(MNIST), "--json"]
    limits = ["--updates", "1500", "--seconds", "270"]
    command = [sys.executable, "-m", "fastps", "demo", *options, *limits]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=360)
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout.splitlines()[-1])["test_accuracy"] >= 0.95  # acceptance.py asks for more


def test_a_spoiled_run_is_found_and_repaired(tmp_path: Path) -> None:
    options = ("--data", "digits", "--updates", "300", "--workers", "3", "--codec", "float32", "--json")
    done = demo("--spoil", *options, "--out", "out", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    accuracy = found["test_accuracy"]
    assert accuracy["forked"] > accuracy["undisturbed"] - 0.03 > accuracy["spoiled"]
    push, *moves = found["push"]
    assert "of worker 'worker-0' (update 180) to 'w1' and 3 more tensors" in push
    assert "moved by" in moves[0]
    assert found["runs"] <= 10
    written = json.loads((tmp_path / "out/report.json").read_text())
    assert written["tried"][0][1] < written["tried"][1][1]
    for wrong in (["--spoil", "--compare", "sync"], ["--spoil", "--updates", "9"]):
        assert demo(*wrong, cwd=tmp_path).returncode == 1


def test_a_lost_machine_comes_back_by_itself(tmp_path: Path) -> None:
    pytest.importorskip("moto.server", reason="moto is not installed")
    options = ("--data", "digits", "--seconds", "10", "--workers", "3", "--json", "--out", "out")
    done = demo("--lose-a-machine", *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    # The lease runs from the owner's last renewal: a quarter of it before the loss, more on a busy machine.
    assert found["gap_s"] >= found["lease_s"] / 2
    assert found["updates"] > found["updates_lost"] >= 0
    before, after = found["test_accuracy_before_the_loss"], found["test_accuracy_after_the_take_over"]
    assert after > before - 0.2
    assert found["test_accuracy"] > 0.5
    written = json.loads((tmp_path / "out/report.json").read_text())
    assert not any(
        found["killed_s"] < point["seconds"] < found["killed_s"] + found["gap_s"] * 0.99
        for point in written["curve"]
    )
    assert not (tmp_path / "out/machines/shard-0").exists()
    for wrong in (
        ["--lose-a-machine", "--updates", "9"],
        ["--lose-a-machine", "--spoil"],
        ["--bucket", "s3://a/b"],
    ):
        refused = demo(*wrong, cwd=tmp_path)
        assert refused.returncode == 1, refused
        assert "--lose-a-machine" in refused.stderr, refused
