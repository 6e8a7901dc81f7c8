"""TLS from Python: the options take effect, and failures raise typed errors."""

import multiprocessing
import time
from pathlib import Path

import numpy as np
import pytest

import fastps
from fastps.commands.cli import main

LARGE = 600_001


def train(ps):
    """Some steps of a worker, and a pull; the worker is a client with its own connections."""
    params = {"w": np.zeros(LARGE, np.float32)}
    ps.register("w", params["w"], optimizer=fastps.SGD(lr=1.0))
    with fastps.Worker(ps, params, mode=fastps.Local(push_every=1, pull_every=1, lr=1.0)) as worker:
        for _ in range(3):
            worker.step({"w": -np.ones(LARGE, np.float32)})
        worker.flush()
    np.testing.assert_array_equal(ps.pull("w"), np.full(LARGE, 3, np.float32))


@pytest.mark.parametrize("mutual", [False, True])
@pytest.mark.parametrize("transport", ["tcp", None])
def test_training_over_tls(ca, mutual, transport):
    server_files = ca.mutual if mutual else ca.server
    client_files = ca.client if mutual else ca.trust
    with (
        fastps.serve(shards=2, **server_files) as server,
        fastps.connect(server.addresses, transport=transport, **client_files) as ps,
    ):
        train(ps)
        # With certificates of clients there is no way around them.
        way = "tcp with TLS: " if transport or mutual else "shm: "
        assert all(text.startswith(way) for text in ps.transport.values())


def test_processes_of_the_same_user_need_no_certificate_if_allowed(ca):
    with (
        fastps.serve(**ca.mutual, local=True) as server,
        fastps.connect(server.addresses, **ca.client) as ps,
    ):
        train(ps)
        assert all(text.startswith("shm: ") for text in ps.transport.values())


def test_paths_and_names(ca):
    files = {name: Path(file) for name, file in ca.issue("host", "host-a").items()}
    with fastps.serve(**files) as server:
        trust = {"tls_ca": Path(ca.file)}
        with fastps.connect(server.addresses, tls_server_name="host-a", **trust) as ps:
            train(ps)
        with pytest.raises(fastps.PermissionDeniedError, match=r"is for host-a, not for 127\.0\.0\.1"):
            fastps.connect(server.addresses, **trust)


def pull_in_a_child(ps, queue):
    queue.put(ps.pull("w").sum())


def test_a_pickled_client_connects_with_tls(ca):
    spawn = multiprocessing.get_context("spawn")
    with (
        fastps.serve(**ca.mutual) as server,
        fastps.connect(server.addresses, transport="tcp", **ca.client) as ps,
    ):
        ps.register("w", np.ones(5, np.float32), optimizer=fastps.SGD(lr=1.0))
        queue = spawn.Queue()
        child = spawn.Process(target=pull_in_a_child, args=(ps, queue))
        child.start()
        assert queue.get(timeout=60) == 5
        child.join(30)
        assert child.exitcode == 0


def refused(addresses, match, **files):
    begin = time.monotonic()
    with pytest.raises(fastps.PermissionDeniedError, match=match) as caught:
        fastps.connect(addresses, timeout=60, **files)
    assert time.monotonic() - begin < 10
    assert addresses in str(caught.value)


def test_who_is_not_trusted_is_refused(ca, tmp_path_factory):
    other = type(ca)(tmp_path_factory.mktemp("other"))
    with fastps.serve(**ca.mutual) as server:
        address = server.addresses
        refused(address, "the server asks for a client's certificate", **ca.trust)
        refused(address, "does not accept the client's certificate", **(other.client | ca.trust))
        refused(address, "was not signed by a CA of tls_ca", **other.client)
        refused(address, "this port speaks TLS")
        with fastps.connect(address, **ca.client) as ps:
            train(ps)
    ends = time.time() + 3  # a server does not start with one that has expired
    with fastps.serve(**ca.issue("old", "127.0.0.1", valid=(-60, 3))) as server:
        time.sleep(max(ends - time.time(), 0) + 1)
        refused(server.addresses, "has expired", **ca.trust)
    with fastps.serve() as server:
        refused(server.addresses, "does not speak TLS", **ca.trust)


def test_files_that_cannot_be_used_are_named(ca, tmp_path):
    missing = tmp_path / "missing.pem"
    for files in [{"tls_ca": missing}, {"tls_ca": ca.file, "tls_cert": missing, "tls_key": missing}]:
        with pytest.raises(fastps.ConfigError, match=r"missing\.pem"):
            fastps.connect("127.0.0.1:1", **files)
    with pytest.raises(fastps.ConfigError, match=r"missing\.pem"):
        fastps.serve(**(ca.server | {"tls_key": missing}))
    with pytest.raises(fastps.ConfigError, match="tls_ca"):
        fastps.connect("127.0.0.1:1", tls_server_name="host-a")
    with pytest.raises(fastps.ConfigError, match="go together"):
        fastps.serve(tls_cert=ca.server["tls_cert"])
    good, other = ca.issue("good", "127.0.0.1"), ca.issue("other", "127.0.0.1")
    dos = tmp_path / "dos.pem"
    dos.write_text(Path(good["tls_cert"]).read_text().replace("\n", "\r\n", 1))
    for files, match in (
        (ca.issue("old", "127.0.0.1", valid=(-86_400 * 9, -86_400 * 2)), r"old\.pem has expired.*2 days ago"),
        (ca.issue("early", "127.0.0.1", valid=(3600, 7200)), r"early\.pem is not valid yet"),
        (good | {"tls_key": other["tls_key"]}, r"other-key\.pem is the private key of another.*good\.pem"),
        (good | {"tls_cert": ca.file}, r"ca\.pem is that of a CA"),
        (good | {"tls_cert": dos}, r"dos\.pem: line 1 ends as on Windows"),
        (good | {"tls_ca": dos}, r"dos\.pem: line 1 ends as on Windows"),
    ):
        with pytest.raises(fastps.ConfigError, match=match):
            fastps.serve(**files)


def test_a_key_that_others_can_read_warns(ca):
    files = ca.issue("open", "127.0.0.1")
    Path(files["tls_key"]).chmod(0o640)
    with (
        pytest.warns(RuntimeWarning, match=r"open-key\.pem \(mode 640\)") as record,
        fastps.serve(**files) as server,
    ):
        fastps.connect(server.addresses, **ca.trust, **files).close()
    assert [warning.filename for warning in record] == [__file__] * 2


def test_status_over_tls(ca, capfd):
    client = ca.client
    options = [part for name, file in client.items() for part in (f"--{name.replace('_', '-')}", file)]
    with fastps.serve(**ca.server, tls_ca=ca.file) as server:
        assert main(["status", server.addresses, *options]) == 0
        printed = capfd.readouterr().out
        assert printed.startswith("1 shard serving")
        assert main(["status", server.addresses, "--all", *options]) == 0
        assert "handshakes_failed: 0" in capfd.readouterr().out
        assert main(["status", server.addresses]) == 1
        assert "this port speaks TLS" in capfd.readouterr().err
