"""`--audit`: one JSON line for each event, and what happens when it cannot be written."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from foreign_client import ForeignClient, Stubs
from token_files import Tokens, new_token

import fastps
from fastps.commands.cli import main


@contextlib.contextmanager
def serving(tokens: Tokens, audit: Path, data: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server process, and its address."""
    command = [sys.executable, "-m", "fastps", "serve", "--listen", "127.0.0.1:0", "--web", "off"]
    options = [f"--tokens={tokens.file}", f"--audit={audit}", f"--data-dir={data}"]
    with (data.parent / "log").open("a") as log:
        server = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, stderr=log, text=True)
    assert server.stdout is not None
    try:
        yield server, server.stdout.readline().split()[-1]
    finally:
        server.terminate()
        server.communicate(timeout=60)


def events(audit: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in audit.read_text().splitlines()]


def wait_for(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.timeout(120)
def test_each_event_is_a_line(tokens: Tokens, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "audit"
    folder.mkdir()
    audit = folder / "audit.jsonl"
    alice, ops = tokens.add("alice", "worker"), tokens.add("ops", "admin")
    wrong = tokens.write_secret("wrong", new_token())
    with serving(tokens, audit, tmp_path / "data") as (server, address):
        for _ in range(20):
            with pytest.raises(fastps.UnauthenticatedError):
                fastps.connect(address, transport="tcp", token_file=wrong)
        with fastps.connect(address, transport="tcp", token_file=alice) as ps:
            ps.register("w", np.zeros(3, np.float32), optimizer=fastps.SGD(lr=1.0))
            save = ["checkpoint", "save", address, "--token-file"]
            assert main([*save, alice]) == 1
            assert main([*save, ops]) == 0
            assert main([*save, ops, "--consistent=default"]) == 0
            ps.unregister("w")
        tokens.add("bob", "reader")
        server.send_signal(signal.SIGHUP)
        wait_for(lambda: events(audit)[-1]["event"] == "reload")
        written = events(audit)
        names = [event["event"] for event in written]
        # Twenty attempts are some lines only.
        assert 1 <= names.count("refused") <= 15
        in_order = [name for k, name in enumerate(names) if name != "refused" and name != names[k - 1]]
        assert in_order == [
            "start",
            "register",
            "checkpoint",
            "hold",
            "checkpoint",
            "unregister",
            "drop",
            "reload",
        ]
        by_name = {event["event"]: event for event in written}
        assert by_name["start"]["addresses"] == [address]
        assert by_name["reload"]["files"] == "tokens"
        assert "token" in by_name["refused"]["reason"]
        for event in written:
            assert abs(datetime.fromisoformat(event["time"]).timestamp() - time.time()) < 120
        for event in written[1:-1]:
            assert event["address"] == "127.0.0.1"
        by = {name: by_name[name]["principal"] for name in ("register", "checkpoint", "hold", "drop")}
        assert by == {"register": "alice", "checkpoint": "ops", "hold": "ops", "drop": "alice"}
        assert by_name["register"]["tensor"] == by_name["unregister"]["tensor"] == "w"
        secrets = [*tokens.text.values(), Path(wrong).read_text().strip()]
        assert not any(secret[4:20] in audit.read_text() for secret in secrets)

        # It cannot be written: who administrates is refused, and others are served.
        folder.rename(tmp_path / "gone")
        capfd.readouterr()
        assert main([*save, ops, "--timeout", "2"]) == 1
        assert "the audit cannot be written" in capfd.readouterr().err
        wait_for(lambda: "the audit cannot be written" in (tmp_path / "log").read_text())
        with fastps.connect(address, transport="tcp", token_file=alice) as ps:
            ps.register("w", np.zeros(3, np.float32), optimizer=fastps.SGD(lr=1.0))
        folder.mkdir()
        assert main([*save, ops]) == 0
        assert [event["event"] for event in events(audit)] == ["checkpoint"]
    with serving(tokens, audit, tmp_path / "data"):
        assert events(audit)[-1]["event"] == "start"


def test_a_space_that_changes_hands_is_listed(tokens: Tokens, stubs: Stubs, tmp_path: Path) -> None:
    audit, pb = tmp_path / "audit.jsonl", stubs.pb
    for name in ("alice", "bob"):
        tokens.add(name, "worker")
    with (
        fastps.serve(audit=audit, tokens=tokens.file) as server,
        ForeignClient(stubs, server.address_list, token=tokens.text["alice"]) as alice,
        ForeignClient(stubs, server.address_list, token=tokens.text["bob"]) as bob,
    ):
        alice.register(alice.spec("w", (8,)), np.zeros(8, np.float32))
        slices = list(alice.entry("w").placement.slices)
        opening = {"name": "plans", "tensors": ["w"], "vectors": ["v"], "keep_for_ms": 60_000}
        request = pb.OpenSpaceRequest(client=alice.client, slices=slices, **opening)
        space = alice.call(0, "OpenSpace", request).space
        for client, seat in (
            (alice, {"action": pb.SEAT_TAKE, "name": "first"}),
            (alice, {"action": pb.SEAT_LEAVE, "term": 1}),
            (bob, {"action": pb.SEAT_TAKE, "name": "second", "term": 1}),
        ):
            client.call(0, "Coordinate", pb.CoordinateRequest(client=client.client, space=space, **seat))
        (taken,) = (event for event in events(audit) if event["event"] == "space taken over")
        assert (taken["principal"], taken["holder"], taken["term"]) == ("bob", "second", 2)
        assert (taken["space"], taken["shard"], taken["address"]) == (space, 0, "127.0.0.1")


@pytest.mark.timeout(120)
def test_a_loop_of_registrations_does_not_fill_the_disk(tokens: Tokens, stubs: Stubs, tmp_path: Path) -> None:
    audit, pb, loops = tmp_path / "audit.jsonl", stubs.pb, 1100
    for name in ("loop", "other"):
        tokens.add(name, "worker")
    with (
        fastps.serve(audit=audit, tokens=tokens.file) as server,
        ForeignClient(stubs, server.address_list, token=tokens.text["loop"]) as client,
        ForeignClient(stubs, server.address_list, token=tokens.text["other"]) as other,
    ):
        begin = time.monotonic()
        for k in range(loops):
            spec = client.spec(f"w {k % 8}", (8,))
            first = client.call(0, "Register", pb.RegisterRequest(spec=spec, client=client.client))
            client.call(0, "Drop", pb.DropRequest(slices=first.placement.slices))
        other.register(other.spec("w", (8,)), np.zeros(8, np.float32))

        def listed() -> int:
            return sum((e["event"], e["principal"]) == ("register", "loop") for e in events(audit)[1:])

        wait_for(lambda: listed() + sum(e.get("count", 0) for e in events(audit)) == loops)
        found = events(audit)
        # At once 1000, then some each second; the others are counted, and other principals are listed.
        assert 1000 <= listed() <= 1001 + time.monotonic() - begin
        assert [e["tensor"] for e in found if e.get("principal") == "other"] == ["w"]
        assert all(e["principal"] == "loop" for e in found if e["event"] == "suppressed")


def test_a_server_of_this_process_has_an_audit_and_lists_of_revoked_certificates(tmp_path: Path) -> None:
    audit = tmp_path / "audit.jsonl"
    with fastps.serve(audit=audit) as server, fastps.connect(server) as ps:
        ps.register("w", np.zeros(3, np.float32), fastps.SGD(lr=1.0))
    assert [event["event"] for event in events(audit)] == ["start", "register"]
    with pytest.raises(fastps.ConfigError, match="tls_crl and tls_ca"):
        fastps.serve(tls_crl=tmp_path / "crl.pem")
