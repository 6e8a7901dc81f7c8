"""Callers who mean harm: in another's name, with bad certificates, with handshakes that stall."""

from __future__ import annotations

import re
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from certificates import DAY, Authority
from foreign_client import ForeignClient, Refused, Stubs
from secured_server import served
from test_roles import ZEROS, Target, calls, frames, of_call, of_frame, outcome, requests, sent_by_clients
from token_files import Tokens

import fastps
import grpc

ONES = np.ones(8, np.float32)
STALLED = 1000


@contextmanager
def process(*options: str, listen: str = "127.0.0.1:0") -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server's process and its address."""
    command = [sys.executable, "-m", "fastps", "serve", "--listen", listen, "--web", "off", *options]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert server.stdout is not None
    try:
        line = server.stdout.readline()
        yield server, line.rpartition("listening on ")[2].split()[0]
    finally:
        server.kill()
        server.wait(60)
        server.stdout.close()


def in_the_name_of(victim: ForeignClient, thief: ForeignClient) -> dict[str, str]:
    """Outcome of every call and frame that names a client, where a thief names the victim."""
    found, pb = {}, victim.pb
    for method in calls(pb):
        target = Target(victim, True, method)
        request = requests(pb, victim.client, thief.secret, target)[method]
        if "client" in request.DESCRIPTOR.fields_by_name:
            found[method] = outcome(lambda: of_call(thief, method, request, target))  # noqa: B023
    thief.epoch = victim.epoch
    for kind in sent_by_clients(pb):
        frame = frames(victim, Target(victim, True, kind))[kind]
        found[kind] = of_frame(thief, frame)
    return found


@pytest.mark.timeout(300)
def test_nobody_acts_as_another_before_and_after_a_kill(stubs: Stubs, tokens: Tokens, tmp_path: Path) -> None:
    """Not with the victim's secret and the thief's token, and not with only the victim's token."""
    for name in ("alice", "bob"):
        tokens.add(name, "worker")
    options = ("--tokens", str(tokens.file), "--data-dir", str(tmp_path / "data"))
    address, victim = "127.0.0.1:0", None
    with ExitStack() as stack:
        for _life in range(2):
            with process(*options, listen=address) as (server, address):
                own = {"token": tokens.text["alice"]}
                if victim is not None:  # as its client comes back after a kill
                    own |= {"client": victim.client, "secret": victim.secret, "hello": False}
                again = stack.enter_context(ForeignClient(stubs, [address], **own))
                if victim is None:
                    again.register(again.spec("mine", (8,)), np.zeros(8, np.float32))
                else:
                    again.hello(0, renew=True)
                    again.sequence = victim.sequence + 1000
                victim, (before,) = again, again.pull("mine")[1]
                for secret, token in ((victim.secret, "bob"), (secrets.token_bytes(16), "alice")):
                    shown = {"client": victim.client, "secret": secret, "token": tokens.text[token]}
                    with ForeignClient(stubs, [address], **shown, hello=False) as thief:
                        found = in_the_name_of(victim, thief)
                    allowed = {name for name, got in found.items() if got != "denied"}
                    assert allowed <= {"KIND_DELTA"}, "nobody may send a difference yet"
                    assert len(found) > 20
                    victim.push("mine", ONES)
                assert victim.pull("mine")[1] == [before + 2]
                server.send_signal(signal.SIGKILL)
                server.wait(60)


def test_certificates_out_of_date_or_of_another_authority_open_nothing(stubs: Stubs, tmp_path: Path) -> None:
    for folder in ("own", "other"):
        (tmp_path / folder).mkdir()
    authority, other = Authority(tmp_path / "own"), Authority(tmp_path / "other")
    shown = {
        "good": authority.credentials("admin"),
        "expired": authority.credentials("admin", until=-DAY / 2),
        "not yet valid": authority.credentials("admin", since=DAY / 2),
        "of another authority": other.credentials("admin", trust=authority.file),
        "none": grpc.ssl_channel_credentials(Path(authority.file).read_bytes()),
    }
    server = fastps.serve(**authority.server("127.0.0.1"), tls_ca=authority.file)
    with server:
        for name, credentials in shown.items():
            with ForeignClient(stubs, server.address_list, credentials=credentials, hello=False) as client:
                call = client.controls[0].Stats.future(stubs.pb.StatsRequest(), timeout=30)
                code = call.code()
            assert code is (grpc.StatusCode.OK if name == "good" else grpc.StatusCode.UNAVAILABLE), name


def test_strangers_are_refused_before_their_request_is_read(stubs: Stubs, tokens: Tokens) -> None:
    """By each call once, whatever it asks other shards for."""
    file = tokens.add("alice", "worker")
    with fastps.serve(tokens=tokens.file) as server, fastps.connect(server, token_file=file) as ps:
        ps.register("w", np.zeros(8, np.float32), optimizer=fastps.SGD(lr=1.0))

        def refused() -> int:
            return ps.stats()["shards"][0]["counters"]["credentials_refused"]

        large = stubs.pb.GetMapRequest(names=[""] * 1_000_000)
        drop = stubs.pb.DropRequest(slices=range(1, 100))
        with ForeignClient(stubs, server.address_list, hello=False) as stranger:
            for request, method in ((large, "GetMap"), (drop, "Drop")):
                before = refused()
                call = getattr(stranger.controls[0], method).future(request, timeout=60)
                assert call.code() is grpc.StatusCode.UNAUTHENTICATED
                assert refused() == before + 1, method


def test_spaces_of_others_are_not_described(stubs: Stubs, tokens: Tokens) -> None:
    """A caller of another group gets the same answer for a space of others and for none."""
    for name, scope in (("owner", "*"), ("thief", "b")):
        tokens.add(name, "worker", scope)
    with (
        fastps.serve(shards=2, tokens=tokens.file) as server,
        ForeignClient(stubs, server.address_list, token=tokens.text["owner"]) as owner,
        ForeignClient(stubs, server.address_list, token=tokens.text["thief"]) as thief,
    ):
        owner.register(owner.spec("w", (8,), group="a"), ZEROS)
        opening = {"name": "plans of a", "vectors": ["v"], "keep_for_ms": 60_000}
        slices = list(owner.entry("w").placement.slices)
        request = stubs.pb.OpenSpaceRequest(client=owner.client, tensors=["w"], slices=slices, **opening)
        space = owner.call(0, "OpenSpace", request).space
        answers = set()
        for number in (space, space + 1000):
            request = stubs.pb.OpenSpaceRequest(client=thief.client, space=number, name="x", keep_for_ms=1000)
            with pytest.raises(Refused) as raised:
                thief.call(1, "OpenSpace", request)
            refusal = raised.value.refusal
            answers.add((refusal.kind, refusal.message))
            assert "plans" not in f"{refusal}"
            # Only who may use it learns that it is to be closed at shard 0 first.
            request = stubs.pb.CloseSpaceRequest(client=thief.client, space=number)
            thief.call(1, "CloseSpace", request)
        assert len(answers) == 1
        with pytest.raises(Refused, match="shard 0 lists the space"):
            owner.call(1, "CloseSpace", stubs.pb.CloseSpaceRequest(client=owner.client, space=space))
        # The name of the space is taken, and the refusal says so.
        tensor = thief.spec("v", (8,), group="b")
        thief.register(tensor, ZEROS)
        request = stubs.pb.OpenSpaceRequest(client=thief.client, tensors=["v"], **opening)
        with pytest.raises(Refused, match="taken in another group"):
            thief.call(0, "OpenSpace", request)
        # A program on a slice of its own, which the space does not have, tells nothing either.
        target: Any = SimpleNamespace(entry=thief.entry("v"))
        said = set()
        for number in (space, space + 1000):
            target.space = number
            stream = thief.stream(target.entry.placement.shards[0])
            (answer,) = stream.exchange([frames(thief, target)["KIND_VECTOR"]])
            (refused,) = answer.header.table.refusals
            said.add((refused.refusal.kind, refused.refusal.message))
            assert "plans" not in f"{answer}"
        assert len(said) == 1


def test_a_call_names_a_bounded_number_of_tensors(stubs: Stubs, tokens: Tokens) -> None:
    file, pb = tokens.add("alice", "worker"), stubs.pb
    with (
        fastps.serve(tokens=tokens.file) as server,
        ForeignClient(stubs, server.address_list, token=tokens.text["alice"]) as client,
        fastps.connect(server, token_file=file) as ps,
    ):
        for count in (4096, 4097):
            names = [f"w{k}" for k in range(count)]
            for method, request in (
                ("GetMap", pb.GetMapRequest(names=names)),
                ("Stats", pb.StatsRequest(changed=names)),
                ("OpenSpace", pb.OpenSpaceRequest(client=client.client, tensors=names, name="s")),
            ):
                outcome_of = outcome(lambda: client.call(0, method, request) and "ok")  # noqa: B023
                assert (outcome_of == "config") == (count > 4096), method
        # Our own client asks for more in several calls.
        with pytest.raises(fastps.UnknownTensorError):
            ps.pull(names)


def test_a_reader_pushes_no_worker_out_of_the_lists(stubs: Stubs, tokens: Tokens, tmp_path: Path) -> None:
    for name, role in (("honest", "worker"), ("greedy", "worker"), ("idle", "reader")):
        tokens.add(name, role)
    file, pb = tokens.add("admin", "admin"), stubs.pb
    with served(tokens.file, tmp_path / "log") as server, ExitStack() as stack:
        for principal, count, steps in (("idle", 80, 10**6), ("greedy", 80, 10**5), ("honest", 8, 1)):
            token = tokens.text[principal]
            client = stack.enter_context(ForeignClient(stubs, [server.address], token=token))
            for k in range(count):
                report = pb.WorkerReport(steps=steps)
                greeting = {"client": secrets.randbits(63) | 1, "secret": client.secret, "report": report}
                client.call(0, "Hello", pb.HelloRequest(name=f"{principal} {k}", **greeting))
        authorization = {"Authorization": f"Bearer {Path(file).read_text().strip()}"}
        for path in ("/metrics", "/api/v1/cluster"):
            request = urllib.request.Request(server.page + path, headers=authorization)
            with urllib.request.urlopen(request, timeout=60) as answer:
                listed = set(re.findall(r"(?:honest|greedy|idle) \d+", answer.read().decode()))
            assert {name for name in listed if name[0] == "h"} == {f"honest {k}" for k in range(8)}
            assert sum(name[0] == "g" for name in listed) == 56
            assert len(listed) == 64


def unfinished(address: str) -> socket.socket:
    """A connection that begins a handshake and says no more."""
    host, _, port = address.rpartition(":")
    connection = socket.create_connection((host, int(port)), timeout=60)
    connection.sendall(b"\x16\x03\x01\x02\x00\x01")
    return connection


@pytest.mark.timeout(300)
def test_stalled_handshakes_keep_nobody_out(tokens: Tokens, ca: Any) -> None:
    file = tokens.add("alice", "worker")
    with (
        fastps.serve(tokens=tokens.file, **ca.server) as server,
        fastps.connect(server, token_file=file, **ca.trust) as ps,
        ExitStack() as stack,
    ):
        ps.register("w", np.zeros(8, np.float32), optimizer=fastps.SGD(lr=1.0))
        stalled = [stack.enter_context(unfinished(server.address_list[0])) for _ in range(STALLED)]
        for _ in range(20):
            ps.push("w", ONES, timeout=60)
        with fastps.connect(server, token_file=file, timeout=60, **ca.trust) as late:
            np.testing.assert_array_equal(late.pull("w"), -20 * ONES)
        end = time.monotonic() + 120
        for connection in stalled:
            connection.settimeout(max(0.1, end - time.monotonic()))
            with suppress(ConnectionResetError):
                assert connection.recv(64) == b"", "the server closes the connection"
