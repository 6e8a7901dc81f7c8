"""A rewound folder is served as a new cluster, without the worker that spoiled the run."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import fastps
from fastps.commands.cli import main
from fastps.commands.kit.servers import free_ports

PATIENT = 60.0


@contextmanager
def fork(folder: Path, errors: Path, *options: str, listen: str = "127.0.0.1:0") -> Iterator[list[str]]:
    """The addresses of its servers; its standard error goes to a file."""
    command = [sys.executable, "-m", "fastps", "fork", str(folder), "--listen", listen, *options]
    with (
        errors.open("w") as to,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=to, text=True) as process,
    ):
        assert process.stdout is not None
        try:
            shards = len([*folder.glob("shard-*")])
            lines = [process.stdout.readline() for _ in range(shards)]
            assert all("listening on" in line for line in lines), errors.read_text()
            yield [line.split()[-1] for line in lines]
        finally:
            process.terminate()
            assert process.wait(PATIENT) == 0


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """The folder of a run by two workers, on two shards."""
    folder = tmp_path / "state"
    with fastps.serve(2, data_dir=folder, keep_history=1 << 30) as server:
        workers = [
            fastps.connect(server.address_list, name=name, ack="logged") for name in ("gpu-7", "gpu-8")
        ]
        for name in ("a", "b"):
            workers[0].register(name, np.zeros(3, np.float32), optimizer=fastps.SGD(lr=1.0))
        for step in range(6):
            workers[step % 2].push({name: np.ones(3, np.float32) for name in ("a", "b")})
        for ps in workers:
            ps.close()
    return folder


def test_a_fork_goes_on_without_a_worker(state: Path, tmp_path: Path) -> None:
    before, errors = tmp_path / "before", tmp_path / "errors"
    assert fastps.rewind(state, before, to=3) == []
    for start in range(2):  # the second one goes on where the first one ended
        with fork(before, errors, "--without", "gpu-8", "--without", "gpu8") as addresses:
            assert 'did you mean "gpu-8"?' in errors.read_text()
            assert 'no worker "gpu-8"' not in errors.read_text()
            for name in ("gpu-8", "gpu8"):
                with pytest.raises(fastps.PermissionDeniedError) as refused:
                    fastps.connect(addresses, name=name, timeout=PATIENT)
                assert f'"{name}"' in str(refused.value)
                assert "train on without it" in str(refused.value)
            with fastps.connect(addresses, name="gpu-7", ack="logged", timeout=PATIENT) as ps:
                assert (ps.pull("a") == -2 - start).all()
                ps.push("a", np.ones(3, np.float32))


def test_a_client_of_the_old_run_is_refused(state: Path, tmp_path: Path) -> None:
    before, errors = tmp_path / "before", tmp_path / "errors"
    listen = f"127.0.0.1:{free_ports(2)[0]}"
    with fastps.serve(2, data_dir=state, listen=listen) as server:
        old = fastps.connect(server.address_list, timeout=PATIENT)
        fastps.rewind(state, before, to=3)
    with (
        fork(before, errors, listen=listen),
        pytest.raises(fastps.FastpsError, match="cluster"),
    ):
        old.push("a", np.ones(3, np.float32))


def test_only_a_rewound_folder_is_forked(
    state: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rewound = tmp_path / "rewound"
    fastps.rewind(state, rewound, to=3)
    (rewound / "rewound.json").write_text("{")
    for folder, why in [(state, "was not written by fastps rewind"), (rewound, "is damaged")]:
        assert main(["fork", str(folder)]) == 1
        assert why in capfd.readouterr().err


def test_refused_workers_of_a_server_in_this_process() -> None:
    with fastps.serve(refuse_worker=["bad", "worse"]) as server:
        for name in ("bad", "worse"):
            with pytest.raises(fastps.PermissionDeniedError, match=name):
                fastps.connect(server.address_list, name=name, timeout=PATIENT)
        fastps.connect(server.address_list, name="good", timeout=PATIENT).close()
