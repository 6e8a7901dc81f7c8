"""The first hour in an empty folder, with nothing but the package: examples, a run with dying workers and
servers, a checkpoint, an evaluation, an export, and the end, which leaves nothing behind.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

FASTPS = [sys.executable, "-m", "fastps"]
LIMIT = 180.0

#: Trains until the file "enough" exists, so that the test decides what dies meanwhile.
TRAIN = """
import itertools, os
from pathlib import Path
import numpy as np
import fastps

TRUTH = np.linspace(-1.0, 1.0, 50, dtype=np.float32)
rank = int(os.environ["FASTPS_RANK"])
rng = np.random.default_rng(rank)
with fastps.connect(timeout=120.0, ack="logged", name=f"rank {rank}") as ps:
    params = {"w": np.zeros(50, np.float32)}
    ps.register("w", params["w"], fastps.SGD(lr=0.02))
    with fastps.Worker(ps, params, fastps.Async()) as worker:
        for step in itertools.count():
            if Path("enough").exists():
                break
            x = rng.standard_normal((16, 50), np.float32)
            worker.step({"w": x.T @ (x @ (worker.params["w"] - TRUTH)) / 16})
            if step % 20 == 0:
                print(f"step {step}", flush=True)
"""

EVALUATE = """
import sys
import numpy as np
import fastps

TRUTH = np.linspace(-1.0, 1.0, 50, dtype=np.float32)
with fastps.connect(sys.argv[1]) as ps:
    print(float(np.abs(ps.pull("w") - TRUTH).max()), ps.versions()["w"])
"""


def wait_for(condition: Any, log: Path) -> Any:
    deadline = time.monotonic() + LIMIT
    while not (found := condition()):
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.02)
    return found


def test_the_first_hour(tmp_path: Path) -> None:
    folder, home, temporary = (tmp_path / name for name in ("empty", "home", "temporary"))
    for made in (folder, home, temporary):
        made.mkdir()
    environment = {key: value for key, value in os.environ.items() if not key.startswith("FASTPS_")}
    environment |= {"HOME": str(home), "TMPDIR": str(temporary), "XDG_RUNTIME_DIR": str(temporary)}

    def fastps(*arguments: str) -> str:
        command = [*FASTPS, *arguments]
        ran = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT
        )
        assert ran.returncode == 0, f"{arguments}: {ran.stdout}{ran.stderr}"
        return ran.stdout

    # Discover.
    assert "quickstart.py" in fastps("examples")
    fastps("examples", "--to", "examples")
    quick = [sys.executable, "examples/quickstart.py"]
    subprocess.run(quick, cwd=folder, env=environment, check=True, capture_output=True, timeout=LIMIT)

    # Train: three workers on two servers that keep their data.
    (folder / "train.py").write_text(TRAIN)
    (folder / "evaluate.py").write_text(EVALUATE)
    log, events = tmp_path / "run.log", tmp_path / "events.jsonl"
    options = ["-n", "3", "--shards", "2", "--data-dir", "data", "--restart", "5", "--json", str(events)]
    with log.open("w") as output:
        run = subprocess.Popen(
            [*FASTPS, "run", *options, "train.py"], cwd=folder, env=environment, stdout=output, stderr=output
        )
    family: list[psutil.Process] = []
    try:

        def seen(event: str, **fields: Any) -> list[dict[str, Any]]:
            lines = events.read_text().split("\n")[:-1] if events.exists() else []
            found = [one for one in map(json.loads, lines) if one["event"] == event]
            return [one for one in found if all(one.get(key) == value for key, value in fields.items())]

        def steps(rank: int) -> int:
            return len(re.findall(rf"^rank {rank} \| step", log.read_text(), re.MULTILINE))

        def train_on(rank: int) -> None:
            done = steps(rank)
            wait_for(lambda: steps(rank) > done, log)

        wait_for(lambda: all(steps(rank) for rank in range(3)), log)
        addresses = ",".join(seen("server_start", shard=shard)[0]["address"] for shard in range(2))

        # Kill any worker and any server: the others continue, and each starts again.
        for rank in range(3):
            os.kill(seen("start", rank=rank)[-1]["pid"], signal.SIGKILL)
            wait_for(lambda rank=rank: seen("start", rank=rank, restart=1), log)
            train_on(rank)
        for shard in range(2):
            os.kill(seen("server_start", shard=shard)[-1]["pid"], signal.SIGKILL)
            wait_for(lambda shard=shard: len(seen("server_start", shard=shard)) == 2, log)
            train_on(shard)
        family = psutil.Process(run.pid).children(recursive=True)

        def serves() -> bool:
            status = [*FASTPS, "status", addresses]
            return subprocess.run(status, env=environment, capture_output=True, timeout=LIMIT).returncode == 0

        # Look, save, evaluate and export while it trains. `ls` says at once that a server recovers its log.
        wait_for(serves, log)
        assert re.search(r"^-\s+w\s+50\s+float32\s+SGD", fastps("ls", addresses), re.MULTILINE)
        assert addresses.split(",")[1] in fastps("status", addresses)
        assert "shard 1" in fastps("checkpoint", "save", addresses, "--consistent")
        fastps("checkpoint", "export", "data", "saved.safetensors", "--consistent")
        fastps("checkpoint", "export", addresses, "running.safetensors", "--state")
        evaluate = [sys.executable, "evaluate.py", addresses]
        judged = subprocess.check_output(evaluate, cwd=folder, env=environment, text=True, timeout=LIMIT)
        assert float(judged.split()[0]) < 2.0

        # Stop: every worker ends on its own, then the servers.
        (folder / "enough").touch()
        assert run.wait(LIMIT) == 0, log.read_text()
    finally:
        run.terminate()
        run.wait(LIMIT)
    fastps("checkpoint", "verify", "data")
    fastps("checkpoint", "export", "data", "final.safetensors")

    _, alive = psutil.wait_procs(family, timeout=LIMIT)
    assert [one for one in alive if one.status() != psutil.STATUS_ZOMBIE] == []
    ports = {int(address.rpartition(":")[2]) for address in addresses.split(",")}
    listening = [one for one in psutil.net_connections() if one.status == psutil.CONN_LISTEN]
    assert not ports & {one.laddr.port for one in listening}
    assert not [*home.iterdir(), *temporary.iterdir()]
    written = {"examples", "train.py", "evaluate.py", "enough", "data"}
    written |= {"saved.safetensors", "running.safetensors", "final.safetensors"}
    assert {path.name for path in folder.iterdir()} == written
