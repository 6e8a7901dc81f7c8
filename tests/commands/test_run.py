"""`fastps run` with real workers and servers: their environment and output, deaths, restarts, and the end."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import fastps
import kill_table

RUN = [sys.executable, "-m", "fastps", "run"]
LIMIT = 100.0

#: Ignores the signals that ask it to end, and has started a child process that does so, too.
STUBBORN = """
import os, signal, subprocess, sys, time
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
own = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
print("own", own.pid, flush=True)
time.sleep(1000)
"""


def script(folder: Path, text: str) -> str:
    path = folder / "script.py"
    path.write_text(text)
    return str(path)


def run(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*RUN, *arguments], env={**os.environ, **env}, capture_output=True, text=True, timeout=LIMIT
    )


@contextlib.contextmanager
def running(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    pipe = subprocess.PIPE
    process = subprocess.Popen([*RUN, *arguments], stdout=pipe, stderr=pipe, text=True)
    try:
        yield process
    finally:
        process.terminate()
        process.communicate(timeout=LIMIT)


def events(log: Path, event: str) -> list[dict[str, Any]]:
    """The events of this name in a log; lines that are being written are left out."""
    lines = log.read_text().split("\n")[:-1] if log.exists() else []
    return [one for one in map(json.loads, lines) if one["event"] == event]


def wait_until(condition: Any) -> None:
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def own_of(process: subprocess.Popen[str], workers: int) -> list[psutil.Process]:
    """The launcher's whole family, once each stubborn worker has started a process."""
    assert process.stdout is not None
    own = [process.stdout.readline().split()[-1] for _ in range(workers)]
    family = psutil.Process(process.pid).children(recursive=True)
    assert {int(pid) for pid in own} <= {one.pid for one in family}
    return family


def assert_gone(family: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(family, timeout=LIMIT)
    assert [one for one in alive if one.status() != psutil.STATUS_ZOMBIE] == []


# -- environment and output ----------------------------------------------------------------------------------

UNUSED = "no worker has connected to the servers"
SHOW = """
import json, os, sys
names = ["FASTPS_ADDRESSES", "FASTPS_RANK", "FASTPS_WORKERS", "RANK", "WORLD_SIZE", "LOCAL_RANK"]
names += ["MASTER_ADDR", "MASTER_PORT"]
print(json.dumps({name: os.environ[name] for name in names if name in os.environ}), *sys.argv[1:])
print("complaint", file=sys.stderr)
"""


@pytest.mark.parametrize("torch_env", [False, True], ids=["plain", "torch-env"])
def test_each_worker_knows_its_rank_and_the_servers(tmp_path: Path, torch_env: bool) -> None:
    options = ["-n", "3", "--shards", "2", *["--torch-env"] * torch_env]
    ran = run(*options, script(tmp_path, SHOW), "--lr", "0.1", WORLD_SIZE="9", LOCAL_RANK="8")
    assert ran.returncode == 0, ran.stderr
    lines = sorted(ran.stdout.splitlines())
    found = []
    for rank, line in enumerate(lines):
        assert line.startswith(f"rank {rank} | {{")
        found.append(json.loads(line.partition("| ")[2].removesuffix(" --lr 0.1")))
        assert f"rank {rank} | complaint" in ran.stderr.splitlines()
    addresses, port = found[0]["FASTPS_ADDRESSES"], found[0].get("MASTER_PORT")
    assert addresses.count(",") == 1
    assert f"2 servers at {addresses}, 3 workers" in ran.stderr
    for rank, variables in enumerate(found):
        expected = {"FASTPS_ADDRESSES": addresses, "FASTPS_RANK": str(rank), "FASTPS_WORKERS": "3"}
        expected["RANK"] = str(rank)
        if torch_env:
            expected |= {"WORLD_SIZE": "3", "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1"}
            expected["MASTER_PORT"] = port
        assert variables == expected


def test_ranks_of_several_machines_do_not_collide(tmp_path: Path) -> None:
    """Two launchers at the same servers, which start no worker twice."""
    show, found = script(tmp_path, SHOW), []
    with fastps.serve() as server:
        for node in ("0", "1"):
            place = ["--nnodes", "2", "--node-rank", node, "--servers", server.addresses]
            ran = run("-n", "2", *place, "--stagger", "0.05", show)
            assert ran.returncode == 0, ran.stderr
            assert f"2 workers (ranks {2 * int(node)} to {2 * int(node) + 1} of 4)" in ran.stderr
            found += sorted(ran.stdout.splitlines())
    for rank, line in enumerate(found):
        prefix, _, variables = line.partition(" | ")
        expected = {"FASTPS_ADDRESSES": server.addresses, "FASTPS_RANK": str(rank), "FASTPS_WORKERS": "4"}
        assert (prefix, json.loads(variables)) == (f"rank {rank}", expected | {"RANK": str(rank)})


def test_workers_share_the_cores(tmp_path: Path) -> None:
    """As torch's threads of two workers on the same cores wait for each other."""
    show = script(tmp_path, "import os; print(os.environ.get('OMP_NUM_THREADS'))")
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    own = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    for workers, given, threads in [
        (2, {}, max(1, cores // 2)),
        (2, {"OMP_NUM_THREADS": "7"}, 7),
        (1, {}, None),
    ]:
        command = [*RUN, "-n", str(workers), show]
        printed = subprocess.check_output(command, env={**own, **given}, text=True, timeout=LIMIT)
        assert {line.split()[-1] for line in printed.splitlines()} == {str(threads)}


def test_workers_train_on_the_servers_that_it_starts(tmp_path: Path) -> None:
    text = """
import os
import numpy as np
import fastps
with fastps.connect() as ps:
    if os.environ["FASTPS_RANK"] == "0":
        ps.register("w", np.zeros(3, np.float32), fastps.SGD(lr=1.0))
    ps.wait_for("w", timeout=60)
    print(ps.push("w", np.ones(3, np.float32)).version)
"""
    ran = run("-n", "3", script(tmp_path, text))
    assert ran.returncode == 0, ran.stderr
    assert UNUSED not in ran.stderr
    assert sorted(line.rpartition(" ")[2] for line in ran.stdout.splitlines()) == ["2", "3", "4"]


def test_workers_that_train_without_the_servers_are_told(tmp_path: Path) -> None:
    ran = run("-n", "2", script(tmp_path, "print('done')"))
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr.count(UNUSED) == 1


def test_servers_that_run_already_are_used(tmp_path: Path) -> None:
    with fastps.serve() as server:
        for options, env in (
            (["--servers", server.addresses], {}),
            ([], {"FASTPS_ADDRESSES": server.addresses}),
        ):
            ran = run(*options, script(tmp_path, SHOW), **env)
            assert ran.returncode == 0, ran.stderr
            assert json.loads(ran.stdout.partition("| ")[2])["FASTPS_ADDRESSES"] == server.addresses
            assert "listening on" not in ran.stderr


def test_servers_only_leaves_the_workers_to_another_launcher() -> None:
    command = 'echo "$FASTPS_ADDRESSES:$RANK"; echo complaint >&2; exit 7'
    ran = run("--shards", "2", "--servers-only", "--", "sh", "-c", command, RANK="own")
    assert ran.returncode == 7
    assert re.fullmatch(r"127.0.0.1:\d+,127.0.0.1:\d+:own\n", ran.stdout)
    assert "complaint" in ran.stderr.splitlines()


def test_lines_stay_whole_and_have_colours_on_a_terminal_only(tmp_path: Path) -> None:
    text = "for k in range(200): print('x' * 500)\nprint('10 %\\r20 %\\r100 %'); print('end', end='')"
    lines = run("-n", "2", script(tmp_path, text)).stdout.splitlines()
    for rank in (0, 1):
        own = [line.removeprefix(f"rank {rank} | ") for line in lines if line.startswith(f"rank {rank} | ")]
        assert own == ["x" * 500] * 200 + ["100 %", "end"]
    assert len(lines) == 404
    terminal, child = pty.openpty()
    env = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    with subprocess.Popen(
        [*RUN, script(tmp_path, "print(1)")], stdout=child, stderr=subprocess.DEVNULL, env=env
    ) as process:
        assert process.wait(LIMIT) == 0
    assert os.read(terminal, 1000) == b"\x1b[36mrank 0 |\x1b[0m 1\r\n"
    os.close(child)
    os.close(terminal)


def test_workers_start_one_after_the_other(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert run("-n", "3", "--stagger", "0.3", "--json", str(log), script(tmp_path, "")).returncode == 0
    starts = events(log, "start")
    assert [start["rank"] for start in starts] == [0, 1, 2]
    assert all(b["time"] - a["time"] > 0.29 for a, b in itertools.pairwise(starts))
    assert events(log, "end")[0]["code"] == 0


# -- workers that die ----------------------------------------------------------------------------------------


def test_a_worker_that_dies_starts_again_and_the_others_continue(tmp_path: Path) -> None:
    """Rank 0 lives in one process until rank 1, which kills itself twice, has started for the third time."""
    text = f"""
import os, pathlib, signal, time
folder = pathlib.Path({str(tmp_path)!r})
if os.environ["RANK"] == "0":
    while not (folder / "life-2").exists():
        time.sleep(0.02)
else:
    life = len(list(folder.glob("life-*")))
    (folder / f"life-{{life}}").touch()
    if life < 2:
        os.kill(os.getpid(), signal.SIGKILL)
"""
    log = tmp_path / "log"
    ran = run("-n", "2", "--restart", "2", "--json", str(log), script(tmp_path, text))
    assert ran.returncode == 0, ran.stderr
    assert "rank 1 ended with exit code 137; it starts again (1 left)" in ran.stderr
    lives = [[one["restart"] for one in events(log, "start") if one["rank"] == rank] for rank in range(2)]
    kill_table.check("fastps run", "worker", "the others continue", lives[0] == [0])
    kill_table.check("fastps run", "worker", "`--restart N` starts it again", lives[1] == [0, 1, 2])
    assert [one["code"] for one in events(log, "exit") if one["rank"] == 1] == [137, 137, 0]


def test_a_worker_is_killed_by_its_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests' launchers have another folder, and one that was killed has left its socket there."""
    folder = tempfile.mkdtemp()
    monkeypatch.setenv("TMPDIR", folder)
    with running("--", "sleep", "1000") as process:
        wait_until(lambda: list(Path(folder).glob("*/*.sock")))
        process.kill()
    log, again = tmp_path / "log", tmp_path / "again"
    text = f"import pathlib, time\nwhile not pathlib.Path({str(again)!r}).exists(): time.sleep(0.02)"
    with running("-n", "2", "--restart", "1", "--json", str(log), script(tmp_path, text)) as process:
        wait_until(lambda: len(events(log, "start")) == 2)
        for words, code, answer in (
            (["7"], 1, "there is no rank 7 here: the ranks are 0 to 1"),
            (["1"], 0, f"killed rank 1 (process {events(log, 'start')[1]['pid']})"),
        ):
            ran = run("kill", *words)
            assert (ran.returncode, answer in ran.stdout + ran.stderr) == (code, True), ran
        wait_until(lambda: len(events(log, "start")) == 3)
        with running("-n", "1", "--", "sleep", "1000"):
            wait_until(lambda: len(list(Path(folder).glob("*/*.sock"))) == 2)
            assert "several fastps run" in run("kill", "0").stderr
        again.touch()
        assert process.wait(LIMIT) == 0
    assert [one["code"] for one in events(log, "exit") if one["rank"] == 1] == [137, 0]
    assert list(Path(folder).glob("*/*.sock")) == []
    shutil.rmtree(folder)


def test_used_up_restarts_are_the_exit_code_and_the_others_end_first(tmp_path: Path) -> None:
    log = tmp_path / "log"
    text = f"""
import os, pathlib, sys, time
if os.environ["RANK"] == "1":
    sys.exit(3)
log = pathlib.Path({str(log)!r})
while log.read_text().count('"rank": 1, "code": 3') < 2:
    time.sleep(0.02)
print("done")
"""
    ran = run("-n", "2", "--restart", "1", "--json", str(log), script(tmp_path, text))
    assert (ran.returncode, ran.stdout) == (3, "rank 0 | done\n"), ran.stderr
    assert "rank 1 ended with exit code 3 after 1 restart" in ran.stderr
    assert events(log, "exit")[-1] | {"time": 0} == {"time": 0, "event": "exit", "rank": 0, "code": 0}


def test_what_a_worker_has_started_ends_with_it(tmp_path: Path) -> None:
    text = "import subprocess; print('own', subprocess.Popen(['sleep', '1000']).pid)"
    ran = run(script(tmp_path, text))
    assert ran.returncode == 0, ran.stderr
    with contextlib.suppress(psutil.NoSuchProcess):
        assert_gone([psutil.Process(int(ran.stdout.split()[-1]))])


# -- the end -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda n: n.name)
def test_a_signal_ends_all_also_workers_that_ignore_it(tmp_path: Path, number: signal.Signals) -> None:
    with running("-n", "2", script(tmp_path, STUBBORN)) as process:
        family = own_of(process, 2)
        process.send_signal(number)
        assert process.wait(LIMIT) == 128 + number
        assert_gone(family)


def test_process_1_of_a_container_reaps_orphans_and_passes_signals_on(tmp_path: Path) -> None:
    alone = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc", "--kill-child"]
    if shutil.which("unshare") is None or subprocess.run([*alone, "true"], capture_output=True).returncode:
        pytest.skip("needs unshare and permission to make name spaces")
    text = """
import os, subprocess, time
orphans = [subprocess.check_output(["sh", "-c", "sleep 0.2 >&2 & echo $!"], text=True) for _ in range(3)]
for _ in range(600):
    left = [pid for pid in orphans if os.path.exists("/proc/" + pid.strip())]
    time.sleep(0.1 * bool(left))
print("left", left, flush=True)
time.sleep(1000)
"""
    command = [*alone, *RUN, "--servers", "127.0.0.1:1", script(tmp_path, text)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "rank 0 | left []\n"
            (first,) = psutil.Process(process.pid).children()
            first.terminate()
            assert process.wait(LIMIT) == 128 + signal.SIGTERM
        finally:
            process.kill()  # and with it, the name space


def test_nothing_is_left_of_a_launcher_that_is_killed(tmp_path: Path) -> None:
    with running("-n", "2", "--shards", "2", script(tmp_path, STUBBORN)) as process:
        family = own_of(process, 2)
        process.kill()
        assert_gone(family)


def test_a_worker_may_clean_up_after_ctrl_c(tmp_path: Path) -> None:
    text = """
import time
try:
    print("ready", flush=True)
    time.sleep(1000)
except KeyboardInterrupt:
    print("saved")
"""
    with running(script(tmp_path, text)) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "rank 0 | ready\n"
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "rank 0 | saved\n"


def test_ctrl_c_is_a_line_per_rank_and_no_traceback_of_it(tmp_path: Path) -> None:
    text = """
import os, time
print("ready", flush=True)
try:
    time.sleep(1000)
except KeyboardInterrupt:
    if os.environ["RANK"] == "1":
        raise ValueError("not saved")
    raise
"""
    with running("-n", "3", script(tmp_path, text)) as process:
        assert process.stdout is not None
        assert [process.stdout.readline()[6:] for _ in range(3)] == [" | ready\n"] * 3
        process.send_signal(signal.SIGINT)
        assert process.wait(LIMIT) == 130
        assert process.stderr is not None
        said = process.stderr.read()
    assert [line for line in said.splitlines() if "fastps run: rank" in line] == [
        "fastps run: rank 0 stopped by Ctrl-C",
        "fastps run: rank 1 ended with exit code 1",
        "fastps run: rank 2 stopped by Ctrl-C",
    ]
    assert said.count("Traceback") == 1, said
    assert "rank 1 | ValueError: not saved" in said


def test_a_reader_that_has_left_ends_the_run(tmp_path: Path) -> None:
    with running(script(tmp_path, "while True: print('x' * 1000)")) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("rank 0 | x")
        family = psutil.Process(process.pid).children(recursive=True)
        process.stdout.close()
        assert process.wait(LIMIT) == 141
        assert_gone(family)
        process.stdout = None


# -- servers that die ----------------------------------------------------------------------------------------


def test_a_server_without_a_data_directory_ends_the_run(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with running("--shards", "2", "--json", str(log), script(tmp_path, STUBBORN)) as process:
        family = own_of(process, 1)
        os.kill(events(log, "server_start")[1]["pid"], signal.SIGKILL)
        kill_table.check("fastps run", "servers", "without it the run ends", process.wait(LIMIT) == 1)
        assert_gone(family)
        assert process.stderr is not None
        last = process.stderr.read().splitlines()[-1]
    address = events(log, "server_start")[1]["address"]
    assert last.startswith(
        f"fastps: server 1 ({address}) ended with exit code 137, and what it held in memory"
    )
    assert "--data-dir" in last


def test_a_server_with_a_data_directory_starts_again_and_loses_nothing(tmp_path: Path) -> None:
    text = """
import pathlib, sys
import numpy as np
import fastps
with fastps.connect(ack="logged", timeout=90) as ps:
    ps.register("w", np.zeros(3, np.float32), fastps.SGD(lr=1.0))
    pushes = 0
    while not pathlib.Path(sys.argv[1]).exists():
        ps.push("w", np.ones(3, np.float32))
        pushes += 1
        if pushes == 1:
            print("ready", flush=True)
    assert ps.pull("w").tolist() == [-pushes] * 3
    print("done")
"""
    log, enough, data = tmp_path / "log", tmp_path / "enough", tmp_path / "data"
    options = ["--data-dir", str(data), "--json", str(log)]
    with running(*options, script(tmp_path, text), str(enough)) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "rank 0 | ready\n"
        for life in range(2):
            os.kill(events(log, "server_start")[life]["pid"], signal.SIGKILL)
            wait_until(lambda life=life: len(events(log, "server_start")) == life + 2)
        enough.touch()
        phrase = "they start again from `--data-dir`, and nothing is lost"
        kill_table.check("fastps run", "servers", phrase, process.stdout.readline() == "rank 0 | done\n")
        assert process.wait(LIMIT) == 0
    assert len({start["address"] for start in events(log, "server_start")}) == 1


def test_a_server_that_cannot_start_ends_the_run(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("no folder")
    ran = run("--data-dir", str(tmp_path / "data"), script(tmp_path, "print('never')"))
    assert (ran.returncode, ran.stdout) == (1, "")
    last = ran.stderr.splitlines()[-1]
    assert re.fullmatch(
        r"fastps: server 0 \(127.0.0.1:\d+\) ended with exit code 1 before it listened: see its lines above",
        last,
    )
    assert "server 0 | fastps: error: " in ran.stderr


# -- arguments -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--servers", "a:1", "--shards", "2", "x.py"], 2, "--servers .* --shards is for servers to start"),
        (["--servers", "a:1", "--servers-only", "--", "true"], 2, "--servers-only is for servers to start"),
        (["-n", "2", "--servers-only", "--", "true"], 2, "-n is for workers"),
        (["--nnodes", "2", "x.py"], 2, "needs --node-rank, this machine's number from 0 to 1"),
        (["--nnodes", "2", "--node-rank", "2", "x.py"], 2, "--node-rank 2 is not below --nnodes 2"),
        (["--node-rank", "1", "x.py"], 2, "--node-rank 1 is not below --nnodes 1"),
        (["--nnodes", "2", "--node-rank", "1", "x.py"], 2, "needs servers that every machine reaches"),
        (["--nnodes", "2", "--node-rank", "1", "--torch-env", "x.py"], 2, "--torch-env .* use torchrun"),
        (["--nnodes", "2", "--servers-only", "--", "true"], 2, "--nnodes is for workers"),
        (["-n", "0", "x.py"], 2, "expected 1 or more"),
        (["--restart", "-1", "x.py"], 2, "expected 0 or more"),
        (["--stagger", "nan", "x.py"], 2, "expected seconds"),
        (["-n", "x.py"], 2, "-n takes a number, got 'x.py'; write -n 2 x.py"),
        (["--stagger", "2s", "x.py"], 2, "--stagger takes a number, got '2s'"),
        (["-n", "2"], 2, "nothing to run"),
        (["kill"], 1, "takes a rank.*got none"),
        (["kill", "1", "0"], 1, "no fastps run 0 of this user"),
        (["missing.py"], 1, "there is no script missing.py in .*: .*fastps examples --to examples"),
        (["--", "no-such-program"], 1, "cannot run no-such-program: .* torchrun as -m torch.distributed.run"),
        (["--json", "/nowhere/log", "--", "true"], 1, "cannot write --json /nowhere/log: No such file"),
    ],
)
def test_wrong_arguments_are_named(arguments: list[str], code: int, message: str) -> None:
    ran = run(*arguments)
    assert ran.returncode == code
    assert re.search(message, ran.stderr), ran.stderr


def test_options_after_the_script_are_the_script_s(tmp_path: Path) -> None:
    show = script(tmp_path, "import sys; print(*sys.argv[1:])")
    ran = run(show, "-n", "2", "--lr", "1")
    assert ran.stdout == "rank 0 | -n 2 --lr 1\n", ran.stderr
    said = [line for line in ran.stderr.splitlines() if "come before the script" in line]
    assert said == [f"fastps run: {show} gets -n: options of fastps run come before the script"]


def test_help_lists_it() -> None:
    ran = subprocess.run([*RUN[:-1], "--help"], capture_output=True, text=True, timeout=LIMIT)
    assert "  run          start servers and the workers of a script" in ran.stdout
