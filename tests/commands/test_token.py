"""`fastps token` and `fastps cluster new`: secrets that are shown once, and files that hold their hashes."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path

import pytest

from fastps.commands.cli import main

FASTPS = [sys.executable, "-m", "fastps"]


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def principals(file: Path) -> dict[str, list[str]]:
    """The columns of a token file, by the first."""
    lines = [line.split() for line in file.read_text().splitlines() if not line.startswith("#")]
    return {name: columns for name, *columns in lines}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "tokens"


def new(file: Path, *arguments: str, capfd: pytest.CaptureFixture[str]) -> str:
    """Adds a principal; returns its token."""
    capfd.readouterr()
    assert main(["token", "new", str(file), *arguments]) == 0
    printed = capfd.readouterr()
    assert printed.out == ""
    return printed.err.strip()


def test_a_secret_is_shown_once(file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    limits = ["--frames-per-second", "500", "--bytes-per-second", "1MiB", "--memory", "2GiB"]
    scope = ["--groups", "a,b", "--namespaces", "n"]
    token = new(file, "alice", "--role", "worker", *scope, *limits, "--days", "30", capfd=capfd)
    assert re.fullmatch(r"fps_[0-9a-f]{64}[0-9a-f]{8}", token)
    assert int(token[-8:], 16) == zlib.crc32(token[:-8].encode())
    out = tmp_path / "bob.token"
    shown = new(file, "bob", "--role", "reader", "--out", str(out), capfd=capfd)
    other = out.read_text().strip()
    assert other not in shown
    assert other != token
    assert mode(out) == mode(file) == 0o600
    written = principals(file)
    role, where, digest, expires, *rest = written["alice"]
    assert (role, where) == ("worker", "a,b,namespace:n")
    assert digest == hashlib.sha256(token.encode()).hexdigest()
    assert rest == ["frames/s=500", f"bytes/s={2**20}", f"memory={2**31}"]
    assert re.fullmatch(r"expires=\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", expires)
    assert written["bob"] == ["reader", "*", hashlib.sha256(other.encode()).hexdigest()]
    assert token[4:] not in file.read_text()

    assert main(["token", "list", str(file), "--json"]) == 0
    alice, bob = json.loads(capfd.readouterr().out)["principals"]
    assert (alice["name"], alice["role"], alice["memory"], alice["expired"]) == (
        "alice",
        "worker",
        2**31,
        False,
    )
    assert (bob["scope"], bob["expires"]) == ("*", None)
    assert main(["token", "list", str(file)]) == 0
    printed = capfd.readouterr().out
    assert "alice: worker for a,b,namespace:n" in printed
    assert "bob: reader for *" in printed
    assert digest not in printed


def test_a_change_keeps_the_rest(file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for name in ("alice", "bob"):
        new(file, name, "--role", "worker", capfd=capfd)
    link = tmp_path / "link"
    link.symlink_to(file)
    kept = f"# a comment about alice\n{file.read_text()}".removesuffix("\n")
    file.write_text(kept)
    file.chmod(0o400)
    new(link, "carol", "--role", "admin", capfd=capfd)
    assert link.is_symlink()
    assert mode(file) == 0o400
    assert file.read_text().startswith(f"{kept}\ncarol admin * ")
    assert main(["token", "revoke", str(link), "alice"]) == 0
    assert set(principals(file)) == {"bob", "carol"}
    assert "# a comment about alice\n" in file.read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "tokens"]


def test_processes_change_a_file_one_after_another(file: Path) -> None:
    names = [f"p{k}" for k in range(6)]
    command = [*FASTPS, "token", "new", str(file)]
    running = [
        subprocess.Popen([*command, name, "--role", "worker"], stderr=subprocess.PIPE, text=True)
        for name in names
    ]
    tokens = [process.communicate(timeout=120)[1].strip() for process in running]
    assert all(process.returncode == 0 for process in running), tokens
    written = principals(file)
    assert {name: columns[2] for name, columns in written.items()} == {
        name: hashlib.sha256(token.encode()).hexdigest() for name, token in zip(names, tokens, strict=True)
    }


def test_bad_input_is_named_and_changes_nothing(
    file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    token = new(file, "alice", "--role", "worker", capfd=capfd)
    before = file.read_text()
    taken = tmp_path / "taken"
    taken.write_text("something")
    out = tmp_path / "out"
    add: Sequence[str] = ["token", "new", str(file)]
    for arguments, code, says in (
        ([*add, "alice", "--role", "worker", "--out", str(out)], 1, "is also in line 3"),
        ([*add, "bob", "--role", "wroker"], 1, "expected worker (one of reader"),
        ([*add, "bob"], 2, "--role"),
        ([*add, "a b", "--role", "worker"], 1, "name of a principal"),
        ([*add, "bob", "--role", "worker", "--groups", "a,"], 1, "groups or namespaces"),
        ([*add, "bob", "--role", "worker", "--namespaces", "*,a"], 1, "neither --groups nor --namespaces"),
        ([*add, "bob", "--role", "worker", "--memory", "lots"], 2, "--memory"),
        ([*add, "bob", "--role", "worker", "--frames-per-second", "0"], 2, "--frames-per-second"),
        ([*add, "bob", "--role", "worker", "--out", str(taken)], 1, "is not overwritten"),
        (["token", "revoke", str(file), "alcie"], 1, 'expected "alice"'),
        (["token", "list", str(tmp_path / "missing")], 1, "missing"),
    ):
        assert main(list(arguments)) == code, arguments
        assert says in capfd.readouterr().err, arguments
    assert file.read_text() == before
    assert taken.read_text() == "something"
    assert not out.exists()
    file.write_text(before.replace("\n", "\r\n"))
    assert main([*add, "bob", "--role", "worker"]) == 1
    assert f"{file}: line 1: the line ends as on Windows" in capfd.readouterr().err
    file.chmod(0o644)
    assert main(["token", "list", str(file)]) == 1
    said = capfd.readouterr().err
    assert f"run chmod 600 {file}" in said
    assert token not in said


def test_a_new_cluster_has_all_it_needs(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "cluster"
    command = ["cluster", "new", str(folder), "--servers", "host-a,10.0.0.2", "--port", "7171"]
    assert main(command) == 0
    printed = capfd.readouterr()
    for host in ("host-a", "10.0.0.2"):
        own = folder / host
        assert f"--listen {host}:7171 --cluster host-a:7171,10.0.0.2:7171" in printed.out
        assert main(["certs", "show", str(own / "cert.pem"), str(own / "key.pem"), "--json"]) == 0
        leaf, ca = json.loads(capfd.readouterr().out)["certificates"]
        assert leaf["names"] == [host]
        assert leaf["key"] == str(own / "key.pem")
        assert ca["is_ca"]
        digest = hashlib.sha256((own / "server.token").read_text().strip().encode()).hexdigest()
        assert principals(own / "tokens")[host] == ["server", "*", digest]
    clients = folder / "clients"
    for role in ("admin", "worker", "reader"):
        digest = hashlib.sha256((clients / f"{role}.token").read_text().strip().encode()).hexdigest()
        assert principals(folder / "host-a" / "tokens")[role] == [role, "*", digest]
    assert (clients / "ca.pem").read_text() == (folder / "ca.pem").read_text()
    secrets = [
        path for path in folder.rglob("*") if path.is_file() and path.name not in ("ca.pem", "cert.pem")
    ]
    assert {mode(path) for path in secrets} == {0o600}
    assert {mode(path) for path in folder.rglob("*") if path.is_dir()} == {0o700} == {mode(folder)}
    assert not any(path.read_text().strip() in printed.out for path in folder.rglob("*.token"))

    files = sorted(tmp_path.rglob("*"))
    for arguments, says in (
        (command, "is not overwritten"),
        (["cluster", "new", str(tmp_path / "other"), "--servers", "a,a"], "listed twice"),
        (["cluster", "new", str(tmp_path / "other"), "--servers", "a,b:1"], "without ports"),
        (["cluster", "new", str(tmp_path / "other"), "--servers", "a,clients"], "another name"),
    ):
        assert main(arguments) == 1
        assert says in capfd.readouterr().err
    assert sorted(tmp_path.rglob("*")) == files
