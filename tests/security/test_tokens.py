"""Tokens of our own client: who may, who may not, and that the token is never visible."""

from __future__ import annotations

import json
import logging
import os
import pickle
import re
import secrets
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from foreign_client import ForeignClient, Refused, Stubs
from secured_server import Served, served
from token_files import Tokens, new_token

import fastps
import grpc
from fastps.commands.cli import main

ZEROS = np.zeros(8, np.float32)
ONES = np.ones(8, np.float32)
#: A part of a token's secret.
TOKEN = re.compile("fps_[0-9a-f]{4}")


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> float:
    """Seconds until the condition held."""
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() - begin < seconds, "it did not happen in time"
        time.sleep(0.05)
    return time.monotonic() - begin


def refused(
    kind: type[Exception], call: Callable[..., Any], *given: Any, **options: Any
) -> fastps.FastpsError:
    """The error of a call, which has no token."""
    with pytest.raises(kind) as raised:
        call(*given, **options)
    assert not TOKEN.search(f"{raised.value!r} {raised.value}")
    return raised.value


def test_a_token_decides_what_its_client_may_do(tokens: Tokens) -> None:
    worker, reader = tokens.add("alice", "worker"), tokens.add("bob", "reader")
    old = tokens.add("carol", "admin", "*", "expires=2020-01-01")
    unknown = tokens.write_secret("nobody", new_token())
    with fastps.serve(shards=2, tokens=tokens.file, local=True) as server:
        for transport in (None, "tcp", "unix"):
            name = f"w {transport}"
            with fastps.connect(server, token_file=worker, transport=transport) as ps:
                ps.register(name, ZEROS, optimizer=fastps.SGD(lr=1.0))
                ps.push(name, ONES)
                np.testing.assert_array_equal(ps.pull(name), -ONES)
            with fastps.connect(server, token_file=reader, transport=transport) as ps:
                np.testing.assert_array_equal(ps.pull(name), -ONES)
                for call, *given in ((ps.push, name, ONES), (ps.unregister, name)):
                    error = refused(fastps.PermissionDeniedError, call, *given)
                    assert (error.expected, error.got) == ("ROLE_WORKER", "ROLE_READER")
                np.testing.assert_array_equal(ps.pull(name), -ONES)
        for file, why in ((None, "asks for a token"), (old, "expired"), (unknown, "unknown")):
            error = refused(fastps.UnauthenticatedError, fastps.connect, server, token_file=file)
            assert why in str(error)
            assert isinstance(error, PermissionError)


def test_a_scope_hides_the_other_groups(tokens: Tokens) -> None:
    everything = tokens.add("ops", "worker")
    scopes = {"a": "a", "both": "a,b", "n": "namespace:n"}
    files = {name: tokens.add(name, "worker", scope) for name, scope in scopes.items()}
    with fastps.serve(shards=2, tokens=tokens.file) as server:
        with fastps.connect(server, token_file=everything) as ps:
            for group in ("a", "b"):
                ps.register(f"of {group}", ZEROS, optimizer=fastps.SGD(lr=1.0), group=group)
            assert ps.names() == ["of a", "of b"]
        with fastps.connect(server, token_file=files["n"], namespace="n") as ps:
            ps.register("w", ZEROS, optimizer=fastps.SGD(lr=1.0))
            ps.push("w", ONES)
            assert ps.names() == ["w"]
        with fastps.connect(server, token_file=files["a"]) as ps:
            assert ps.names() == ["of a"]
            ps.push("of a", ONES)
            for name in ("of b", "run:n/w", "of c"):
                for call in (ps.pull, ps.unregister):
                    error = refused(fastps.UnknownTensorError, call, name)
                    assert "of b" not in str(error).replace(repr(name), "").replace(f'"{name}"', "")
            outside = "is outside the groups and namespaces of the principal"
            for group, name, says in (
                ("b", "new", outside),
                ("a", "of b", "is taken in another group or namespace"),
                ("a", "run:n/new", outside),
                ("run:n/default", "run:n/v", outside),
            ):
                register = {"optimizer": fastps.SGD(lr=1.0), "group": group}
                error = refused(fastps.PermissionDeniedError, ps.register, name, ZEROS, **register)
                assert says in error.message
        with fastps.connect(server, token_file=files["both"]) as ps:
            assert ps.names() == ["of a", "of b"]
        with fastps.connect(server, token_file=files["n"]) as ps:
            assert ps.names() == ["run:n/w"]


def test_a_token_comes_from_a_private_file_only(tokens: Tokens, tmp_path: Path, monkeypatch: Any) -> None:
    file = Path(tokens.add("alice", "worker"))
    with fastps.serve(tokens=tokens.file) as server:
        monkeypatch.setenv("FASTPS_TOKEN_FILE", str(file))
        with fastps.connect(server) as ps:
            assert ps.names() == []
        link = tmp_path / "link"
        link.symlink_to(file)
        fastps.connect(server, token_file=link).close()
        file.chmod(0o644)
        error = refused(fastps.ConfigError, fastps.connect, server)
        assert f"chmod 600 {file}" in str(error)
        file.chmod(0o600)
        for text, says in (
            ("", "starts with fps_"),
            (file.read_text()[:30], "characters"),
            ("fps_" + "0" * 72, "checksum"),
        ):
            bad = tokens.write_secret("bad", text)
            error = refused(fastps.ConfigError, fastps.connect, server, token_file=bad)
            assert says in str(error)
            assert bad in str(error)
    tokens.file.chmod(0o640 if os.getuid() else 0o644)
    error = refused(fastps.ConfigError, fastps.serve, tokens=tokens.file)
    assert f"chmod 600 {tokens.file}" in str(error)


def test_a_secret_in_the_place_of_a_file_or_an_address_is_not_shown(
    tmp_path: Path, monkeypatch: Any, capfd: Any
) -> None:
    token, pem = new_token(), "-----BEGIN PRIVATE KEY-----\nfps" + "A" * 60 + "\n-----END PRIVATE KEY-----\n"
    shown = re.compile("fps_[0-9a-f]{4}|A{20}")
    there = "127.0.0.1:1"
    for secret in (token, f"{token}\n", pem):
        for call in (
            lambda s: fastps.connect(s, timeout=1),
            lambda s: fastps.connect([there, s], timeout=1),
            lambda s: fastps.connect(lambda: s, timeout=1),
            lambda s: fastps.connect(there, timeout=1, token_file=s),
            lambda s: fastps.connect(there, timeout=1, tls_ca=s),
            lambda s: fastps.connect(there, timeout=1, tls_ca=__file__, tls_cert=s, tls_key=s),
            lambda s: fastps.connect(there, timeout=1, transport=s),
            lambda s: fastps.serve(tokens=s),
            lambda s: fastps.serve(listen=s),
            lambda s: fastps.serve(data_dir=tmp_path / "data", copy_to=s),
        ):
            monkeypatch.chdir(tmp_path)
            with pytest.raises(fastps.FastpsError) as raised:
                call(secret)
            assert not shown.search(f"{raised.value!r} {raised.value} {vars(raised.value)}")
        for command in (
            ["ls", secret],
            ["ls", there, "--token-file", secret, "--timeout", "1"],
            ["ls", there, "--timeout", secret],
            ["status", secret],
            ["status", there, "--token-file", secret],
            ["top", there, "--interval", secret],
            ["token", "list", secret],
            ["checkpoint", "list", secret],
            ["certs", "show", secret],
            ["config", "check", secret],
            ["serve", "--tokens", secret],
            ["serve", "--lease-ms", secret],
            ["serve", secret],
            ["run", secret],
            [secret],
        ):
            assert main(command) != 0, command[0]
            assert not shown.search("".join(capfd.readouterr())), command[0]
        monkeypatch.setenv("FASTPS_ADDRESSES", secret)
        error = refused(fastps.ConfigError, fastps.connect)
        assert not shown.search(f"{error} {error!r}")
        assert main(["status"]) != 0
        assert not shown.search("".join(capfd.readouterr()))
        monkeypatch.delenv("FASTPS_ADDRESSES")


def test_a_star_is_everything(tmp_path: Path, capfd: Any) -> None:
    file = str(tmp_path / "tokens")
    new = ["token", "new", file]
    for name, scope in (
        ("a", []),
        ("b", ["--groups=*"]),
        ("c", ["--namespaces=*"]),
        ("d", ["--groups=*", "--namespaces=*"]),
    ):
        assert main([*new, name, "--role", "worker", *scope]) == 0
    capfd.readouterr()
    assert main(["token", "list", file]) == 0
    assert capfd.readouterr().out == "".join(f"{name}: worker for *\n" for name in "abcd")
    assert main([*new, "e", "--role", "worker", "--groups=g", "--namespaces=*"]) == 1
    assert "expected names, or neither --groups nor --namespaces" in capfd.readouterr().err


def test_a_token_does_not_leave_the_machine_without_tls(tokens: Tokens) -> None:
    file = tokens.add("alice", "worker")
    # An address of documentation, to which nothing may be sent: a try would take until the deadline.
    begin = time.monotonic()
    error = refused(fastps.ConfigError, fastps.connect, "192.0.2.1:7070", token_file=file, timeout=30)
    assert time.monotonic() - begin < 10
    assert "TLS" in str(error)
    # A server that lists itself at such an address.
    with fastps.serve(shards=2, tokens=tokens.file, advertise="192.0.2.1") as server:
        port = server.address_list[0].rpartition(":")[2]
        first = f"127.0.0.1:{port}"
        assert "TLS" in str(refused(fastps.ConfigError, fastps.connect, first, token_file=file, timeout=30))


def test_tokens_over_tls_and_certificates_beside_them(tokens: Tokens, ca: Any) -> None:
    file = tokens.add("alice", "worker")
    with fastps.serve(tokens=tokens.file, **ca.server, **ca.trust) as server:
        with fastps.connect(server, token_file=file, **ca.client) as ps:
            ps.register("w", ZEROS, optimizer=fastps.SGD(lr=1.0))
            ps.push("w", ONES)
        # A certificate without a role does not replace a token.
        refused(fastps.UnauthenticatedError, fastps.connect, server, **ca.client)


def test_a_certificate_without_a_role_reads_unless_the_server_says_otherwise(ca: Any) -> None:
    options = {"optimizer": fastps.SGD(lr=1.0)}
    with (
        fastps.serve(**ca.server, **ca.trust) as server,
        fastps.connect(server, transport="tcp", **ca.client) as ps,
    ):
        assert ps.names() == []
        error = refused(fastps.PermissionDeniedError, ps.register, "w", ZEROS, **options)
        assert "--certificate-role" in error.message
        assert (error.expected, error.got) == ("ROLE_WORKER", "ROLE_READER")
    for role in ("worker", "admin", "server"):
        with (
            fastps.serve(**ca.server, **ca.trust, certificate_role=role) as server,
            fastps.connect(server, transport="tcp", **ca.client) as ps,
        ):
            ps.register("w", ZEROS, **options)
    error = refused(fastps.ConfigError, fastps.serve, **ca.server, **ca.trust, certificate_role="wroker")
    assert "expected worker" in str(error)


def test_servers_show_each_other_a_token_of_their_own(tokens: Tokens, start_shards: Any) -> None:
    worker, own = tokens.add("alice", "worker"), tokens.add("shard", "server")
    for secret, works in ((own, True), (worker, False), (None, False)):
        addresses = start_shards(tokens.file, secret)
        if not works:
            # The second shard has asked the first, without success, whether it has lost anything.
            error = refused(
                fastps.PermissionDeniedError, fastps.connect, addresses, token_file=worker, timeout=30
            )
            assert "--server-token-file" in str(error)
            continue
        with fastps.connect(addresses, token_file=worker) as ps:
            # Large enough for slices on both shards, the second of which asks the first about them.
            ps.register("w", np.zeros(400_000, np.float32), optimizer=fastps.SGD(lr=1.0))
            ps.push("w", np.ones(400_000, np.float32))
            assert ps.pull("w")[-1] == -1


@pytest.fixture
def start_shards() -> Any:
    """Starts two servers of one cluster, each with these tokens."""
    running: list[fastps.Server] = []

    def start(file: Path, secret: str | None) -> str:
        while running:
            running.pop().stop()
        ports: list[str] = []
        with fastps.serve(shards=2) as other:
            ports = other.address_list
        for port in ports:
            server = fastps.serve(listen=port, cluster=ports, tokens=file, server_token_file=secret)
            running.append(server)
        return ",".join(ports)

    yield start
    while running:
        running.pop().stop()


def test_a_revoked_token_ends_its_streams_and_a_new_one_continues(tokens: Tokens, tmp_path: Path) -> None:
    file, other = tokens.add("alice", "worker"), tokens.add("bob", "worker")
    with (
        served(tokens.file, tmp_path / "log") as server,
        fastps.connect(server.address, token_file=file, timeout=60) as ps,
        fastps.connect(server.address, token_file=other) as untouched,
    ):
        ps.register("w", ZEROS, optimizer=fastps.SGD(lr=1.0))
        pushes = 0

        def push_until(reloads: int) -> None:
            nonlocal pushes
            begin = time.monotonic()
            while untouched.stats()["shards"][0]["counters"]["token_reloads"] < reloads:
                ps.push("w", ONES)
                pushes += 1
                assert time.monotonic() - begin < 60

        # The client's file first, then the server's: pushes continue, and none is lost or applied twice.
        for reloads in (1, 2):
            tokens.add("alice", "worker")
            server.reload()
            push_until(reloads)
        ps.push("w", ONES)
        np.testing.assert_array_equal(ps.pull("w"), -(pushes + 1) * ONES)
        tokens.revoke("alice")
        server.reload()
        push_until_refused(ps)
        untouched.pull("w")
        refused(fastps.UnauthenticatedError, fastps.connect, server.address, token_file=file)


def push_until_refused(ps: fastps.ParameterServer) -> None:
    begin = time.monotonic()
    while time.monotonic() - begin < 60:
        try:
            ps.push("w", ONES, timeout=2)
        except fastps.UnauthenticatedError:
            return
        except fastps.PartialPush:
            # The stream ended before the answer.
            continue
    raise AssertionError("a revoked token still pushes")


def server_counter(file: str, server: fastps.Server, name: str) -> int:
    with fastps.connect(server, token_file=file) as ps:
        return ps.stats()["shards"][0]["counters"][name]


def test_a_bad_token_file_leaves_the_last_good_one_in_force(tokens: Tokens) -> None:
    file = tokens.add("alice", "worker")
    with fastps.serve(tokens=tokens.file) as server, fastps.connect(server, token_file=file) as ps:
        good = tokens.file.read_text()
        tokens.file.write_text("alice wroker\n")
        wait_until(lambda: server_counter(file, server, "token_reloads_failed") >= 1)
        assert ps.names() == []
        tokens.file.write_text(good)
        fastps.connect(server, token_file=file).close()
    refused(fastps.ConfigError, fastps.serve, tokens=tokens.file.with_name("absent"))


def test_no_one_sees_a_token(tokens: Tokens, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    file, wrong = tokens.add("alice", "admin"), tokens.write_secret("nobody", new_token())
    with served(tokens.file, tmp_path / "log") as server:
        with fastps.connect(server.address, token_file=file) as ps:
            ps.register("w", ZEROS, optimizer=fastps.SGD(lr=1.0))
            ps.push("w", ONES)
            texts = [repr(ps), repr(ps.stats()), repr(pickle.dumps(ps))]
            with pickle.loads(pickle.dumps(ps)) as copy:
                np.testing.assert_array_equal(copy.pull("w"), -ONES)
        refused(fastps.UnauthenticatedError, fastps.connect, server.address, token_file=wrong)
        own = Path(f"/proc/{server.process.pid}")
        texts += [(own / name).read_bytes().decode() for name in ("cmdline", "environ")]
        texts += [page(server, path, tokens.text["alice"])[1] for path in ("/metrics", "/api/v1/cluster")]
    texts += [server.printed(), caplog.text]
    assert "a call is refused" in server.printed()
    for text in texts:
        assert not TOKEN.search(text), text


def page(server: Served, path: str, token: str | None) -> tuple[int, str]:
    """Status and text of a page of the web listener."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    request = urllib.request.Request(server.page + path, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_the_web_listener_asks_for_a_reader_of_everything(tokens: Tokens, tmp_path: Path) -> None:
    tokens.add("alice", "reader")
    tokens.add("limited", "admin", "a")
    with served(tokens.file, tmp_path / "log") as server:
        for path in ("/healthz", "/readyz"):
            assert page(server, path, None)[0] == 200
        for path in ("/metrics", "/version", "/api/v1/cluster", "/absent"):
            status, text = page(server, path, None)
            assert (status, "asks for a token" in text) == (401, True), path
            assert page(server, path, new_token())[0] == 401
            assert page(server, path, tokens.text["limited"])[0] == 403
            assert page(server, path, tokens.text["alice"])[0] == (404 if path == "/absent" else 200)


def test_status_and_ls_show_a_token(tokens: Tokens, capfd: pytest.CaptureFixture[str]) -> None:
    file = tokens.add("alice", "reader")
    with fastps.serve(tokens=tokens.file) as server:
        assert main(["status", server.addresses]) == 1
        assert "asks for a token" in capfd.readouterr().err
        assert main(["status", server.addresses, "--token-file", file, "--json"]) == 0
        state = json.loads(capfd.readouterr().out)
        assert state["shards"][0]["insecure"] is False
        assert main(["ls", server.addresses, "--token-file", file]) == 0
    capfd.readouterr()
    with fastps.serve(listen="0.0.0.0:0", advertise="127.0.0.1", insecure=True) as server:
        assert main(["status", server.addresses, "--json"]) == 0
        state = json.loads(capfd.readouterr().out)
        assert state["shards"][0]["insecure"] is True
        assert "--insecure" in state["warnings"][0]


def test_wrong_tokens_slow_nobody_down(tokens: Tokens, stubs: Stubs) -> None:
    file = tokens.add("alice", "worker")
    wrong = new_token()
    with (
        fastps.serve(tokens=tokens.file) as server,
        fastps.connect(server, token_file=file, transport="tcp") as ps,
    ):
        ps.register("w", ZEROS, optimizer=fastps.SGD(lr=1.0))
        with ForeignClient(stubs, server.address_list, hello=False, token=wrong) as stranger:
            request = stubs.pb.StatsRequest()
            metadata = [("authorization", f"Bearer {wrong}")]
            calls = [
                stranger.controls[0].Stats.future(request, timeout=60, metadata=metadata)
                for _ in range(10_000)
            ]
            begin = time.monotonic()
            for _ in range(20):
                ps.push("w", ONES, timeout=60)
            assert time.monotonic() - begin < 60
            errors = [call.exception() for call in calls]
            refused = [error for error in errors if error.code().name == "UNAUTHENTICATED"]
            # On a busy machine the calls outlast the time in which a connection must show who calls.
            ended = [error for error in errors if "has shown who calls" in error.details()]
            assert len(refused) + len(ended) == len(errors)
            assert len(ended) < len(errors) / 10
        assert server_counter(file, server, "credentials_refused") >= len(refused)
        np.testing.assert_array_equal(ps.pull("w"), -20 * ONES)


def test_one_principal_does_not_act_as_another(tokens: Tokens, stubs: Stubs, tmp_path: Path) -> None:
    """Not even with the other's secret, and also after the server was killed and started again."""
    for name in ("alice", "bob"):
        tokens.add(name, "worker")
    folder = tmp_path / "data"

    def attack(victim: ForeignClient) -> None:
        thief = ForeignClient(
            stubs,
            addresses,
            client=victim.client,
            secret=victim.secret,
            hello=False,
            token=tokens.text["bob"],
        )
        with thief:
            group = victim.entry("w").placement.group
            requests = {
                "Hello": stubs.pb.HelloRequest(client=victim.client, secret=victim.secret, renew=True),
                "Leave": stubs.pb.LeaveRequest(client=victim.client, group=group),
                "Advance": stubs.pb.AdvanceRequest(client=victim.client, group=group, clock=9),
                "Portion": stubs.pb.PortionRequest(client=victim.client, name="p", n=4, size=1, worker=1),
                "Register": stubs.pb.RegisterRequest(client=victim.client, spec=victim.spec("v", (8,))),
            }
            for method, request in requests.items():
                with pytest.raises(Refused) as raised:
                    thief.call(0, method, request)
                assert raised.value.refusal.kind == "denied", method
            thief.epoch = victim.epoch
            with pytest.raises(Refused, match="another principal"):
                thief.push("w", ONES)
        victim.push("w", ONES)

    def listen(port: str) -> fastps.Server:
        return fastps.serve(listen=port, tokens=tokens.file, data_dir=folder)

    with listen("127.0.0.1:0") as server:
        addresses = server.address_list
        victim = ForeignClient(stubs, addresses, token=tokens.text["alice"])
        victim.register(victim.spec("w", (8,)), ZEROS)
        attack(victim)
    with (
        listen(addresses[0]),
        ForeignClient(
            stubs,
            addresses,
            client=victim.client,
            secret=victim.secret,
            hello=False,
            token=tokens.text["alice"],
        ) as again,
    ):
        again.hello(0, renew=True)
        again.sequence = victim.sequence
        attack(again)
        # Each attack was followed by a push of the victim, and only the victim's pushes are applied.
        assert again.pull("w")[1] == [3]
    victim.close()


def test_headers_that_are_no_token_are_refused(tokens: Tokens, stubs: Stubs) -> None:
    tokens.add("alice", "reader")
    good = tokens.text["alice"]
    with (
        fastps.serve(tokens=tokens.file) as server,
        ForeignClient(stubs, server.address_list, hello=False) as client,
    ):
        stats = client.controls[0].Stats
        assert stats(
            stubs.pb.StatsRequest(), timeout=30, metadata=[("authorization", f"bearer {good}")]
        ).version
        for values in (
            [good],
            [f"Basic {good}"],
            ["Bearer "],
            [f"Bearer {good[:-1]}"],
            [f"Bearer {good}x"],
            [f"Bearer  {good}"],
            [f"Bearer {good}", f"Bearer {good}"],
            [f"Bearer {secrets.token_hex(38)}"],
        ):
            metadata = [("authorization", value) for value in values]
            call = stats.future(stubs.pb.StatsRequest(), timeout=30, metadata=metadata)
            assert call.exception().code().name == "UNAUTHENTICATED", values


def test_health_is_for_everybody_and_reflection_for_readers(tokens: Tokens, stubs: Stubs) -> None:
    tokens.add("alice", "reader")
    shown = [("authorization", f"Bearer {tokens.text['alice']}")]
    with (
        fastps.serve(tokens=tokens.file) as server,
        ForeignClient(stubs, server.address_list, hello=False) as client,
    ):
        (channel,) = client.channels
        assert channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=30) == b"\x08\x01"
        for version in ("v1", "v1alpha"):
            ask = channel.stream_stream(f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo")
            services = b"\x3a\x00"  # list_services
            with pytest.raises(grpc.RpcError) as raised:
                list(ask(iter([services]), timeout=30))
            assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED
            (answer,) = ask(iter([services]), timeout=30, metadata=shown)
            assert b"fastps.v1.Control" in answer


def test_a_reload_changes_roles_and_expiry(tokens: Tokens, tmp_path: Path) -> None:
    """A stream of a principal whose line has changed ends, and its client continues with the new role."""
    file = tokens.add("alice", "worker")
    with (
        served(tokens.file, tmp_path / "log") as server,
        fastps.connect(server.address, token_file=file, timeout=60) as ps,
    ):
        ps.register("w", ZEROS, optimizer=fastps.SGD(lr=1.0))
        ps.push("w", ONES)
        for change, kind in ((" reader ", fastps.PermissionDeniedError), (" worker ", None)):
            old = " worker " if kind else " reader "
            tokens.file.write_text(tokens.file.read_text().replace(old, change))
            server.reload()
            wait_until(lambda: refusal_of(ps) is kind)  # noqa: B023
        lines = tokens.file.read_text().splitlines()
        tokens.file.write_text("".join(f"{line} expires=2020-01-01\n" for line in lines))
        server.reload()
        wait_until(lambda: refusal_of(ps) is fastps.UnauthenticatedError)


def refusal_of(ps: fastps.ParameterServer) -> type[Exception] | None:
    """The error of a push; None: it was applied."""
    try:
        ps.push("w", ONES, timeout=2)
    except fastps.FastpsError as error:
        return type(error)
    return None
