"""Idle clients and servers sleep, and spinning is configurable."""

import subprocess
import sys
import time

import numpy as np
import pytest

import fastps
from long.soak import Server, Setting, transports

SECONDS = 3.0

CLIENT = """
import sys, time, fastps, numpy as np
grads = {"w": np.ones(1000, np.float32)}
with fastps.connect(sys.argv[1], transport=sys.argv[2], spin_us=int(sys.argv[3])) as ps:
    ps.register("w", np.zeros(1000, np.float32), optimizer=fastps.SGD(lr=1.0))
    for _ in range(200):
        ps.push_pull(grads)
    time.sleep(0.2)
    print("idle", flush=True)
    before = time.process_time()
    time.sleep(float(sys.argv[4]))
    print(time.process_time() - before, flush=True)
"""


def cpu_seconds(pid: int) -> float:
    """CPU seconds of all threads of a process."""
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("transport", transports())
@pytest.mark.parametrize("spinning", [False, True])
def test_an_idle_client_and_its_server_use_no_core(transport: str, spinning: bool):
    setting = Setting(transport, pinned=False, spinning=spinning, loaded=False)
    server = Server(setting)
    try:
        command = [
            sys.executable,
            "-c",
            CLIENT,
            server.address,
            transport,
            str(setting.spin_us),
            str(SECONDS),
        ]
        client = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert client.stdout is not None
        assert client.stdout.readline() == "idle\n"
        before, start = cpu_seconds(server.process.pid), time.monotonic()
        theirs = float(client.stdout.readline())
        used, took = cpu_seconds(server.process.pid) - before, time.monotonic() - start
        # A fiftieth of a core, where a thousandth is meant; the clock of the system has steps of 10 ms.
        assert used <= 0.02 * took + 0.02, f"an idle server used {used:.3f} s of {took:.1f} s"
        assert theirs <= 0.02 * SECONDS, f"an idle client used {theirs:.3f} s of {SECONDS} s"
        client.communicate(timeout=20)
    finally:
        server.close()


@pytest.mark.parametrize("bad", [-1, 1_000_001])
def test_an_absurd_time_to_spin_is_refused(bad: int):
    with pytest.raises(fastps.ConfigError, match="spin"):
        fastps.serve(spin_us=bad)
    with fastps.serve() as server, pytest.raises(fastps.ConfigError, match="spin"):
        fastps.connect(server.addresses, spin_us=bad)


@pytest.mark.parametrize("spin_us", [0, 50, 1000])
def test_spinning_changes_no_result(spin_us: int):
    with fastps.serve(spin_us=spin_us) as server, fastps.connect(server.addresses, spin_us=spin_us) as ps:
        ps.register("w", np.zeros(5, np.float32), optimizer=fastps.SGD(lr=1.0))
        for _ in range(20):
            ps.push({"w": np.ones(5, np.float32)})
        np.testing.assert_array_equal(ps.pull("w"), np.float32(-20))
