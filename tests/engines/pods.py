"""Runs servers with the arguments of pods, in their own namespaces, and trains on them.

It is a program: `run_pods` starts it. All pods share one network, where each has its own loopback address, so
their ports may be fixed; their names are in `/etc/hosts`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from grpc_health.v1 import health_pb2, health_pb2_grpc

import fastps
import grpc

#: As many elements as a slice of float32 has; a tensor of several slices is on all shards.
SLICE = 63 * 4096


def run_pods(folder: Path, pods: list[dict[str, Any]], addresses: str, **client: Any) -> str:
    """Runs each pod, with `args` and the `host` of its address, and returns what the program said."""
    (folder / "hosts").write_text("".join(f"127.0.0.{k + 2} {pod['host']}\n" for k, pod in enumerate(pods)))
    (folder / "pods.json").write_text(json.dumps({"pods": pods, "addresses": addresses, "client": client}))
    shell = 'mount --bind "$0/hosts" /etc/hosts && ip link set lo up && exec "$@"'
    program = [sys.executable, __file__, str(folder)]
    done = subprocess.run(
        ["unshare", "--net", "--mount", "sh", "-c", shell, str(folder), *program],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def start(folder: Path, shard: int, args: list[str]) -> subprocess.Popen[bytes]:
    """A server with its own address and data folder."""
    own = {
        "--listen=0.0.0.0:7070": f"--listen=127.0.0.{shard + 2}:7070",
        "--data-dir=/data": f"--data-dir={folder}",
    }
    own["--web=0.0.0.0:7069"] = f"--web=127.0.0.{shard + 2}:7069"
    assert {"--listen=0.0.0.0:7070", "--data-dir=/data"} <= {*args}
    environment = {name: value for name, value in os.environ.items() if name != "FASTPS_WEB"}
    command = [sys.executable, "-m", "fastps", "serve", *(own.get(one, one) for one in args)]
    return subprocess.Popen(command, env=environment)


def train(addresses: str, shards: int, client: dict[str, Any]) -> None:
    with fastps.connect(addresses, wait=100, **client) as ps:
        ps.register("w", np.zeros(shards * SLICE, np.float32), fastps.SGD(lr=1.0))
        ps.push("w", np.ones(shards * SLICE, np.float32))
        assert (ps.pull("w") == -1).all()
        counters = [shard["counters"]["pushes"] for shard in ps.stats()["shards"]]
    assert len(counters) == shards, counters
    assert all(counters), counters
    print(f"trained on {shards} shards")


def probe(shard: int) -> None:
    """Asks what the kubelet's gRPC probe asks."""
    with grpc.insecure_channel(f"127.0.0.{shard + 2}:7070") as channel:
        answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=30)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING
    print(f"shard {shard} is ready")


def main(folder: Path) -> None:
    asked = json.loads((folder / "pods.json").read_text())
    servers = [start(folder / f"data-{shard}", shard, pod["args"]) for shard, pod in enumerate(asked["pods"])]
    try:
        train(asked["addresses"], len(servers), asked["client"])
        if not asked["client"]:
            for shard in range(len(servers)):
                probe(shard)
        for server in servers:
            server.send_signal(signal.SIGTERM)
        assert [server.wait(60) for server in servers] == [0] * len(servers)
    finally:
        for server in servers:
            server.kill()
            server.wait()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
