"""`fastps certs`: a CA and what it issues, judged by OpenSSL and by real servers."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

import fastps
from fastps.commands.cli import main

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl")


def openssl(*arguments: str) -> str:
    done = subprocess.run(["openssl", *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


@pytest.fixture
def certs(tmp_path: Path) -> Path:
    """A folder with a CA."""
    folder = tmp_path / "certs"
    assert main(["certs", "init", str(folder)]) == 0
    return folder


@needs_openssl
def test_openssl_accepts_what_is_issued(certs: Path, tmp_path: Path) -> None:
    request = ["--csr", str(tmp_path / "csr.pem")]
    key = str(tmp_path / "own-key.pem")
    openssl("genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256", "-out", key)
    openssl("req", "-new", "-key", key, "-subj", "/CN=whoever", "-out", request[1])
    scope = ["--role", "worker", "--groups", "a,b", "--namespaces", "n"]
    uri = "URI:fastps://principal/alice?role=worker&scope=a,b,namespace:n"
    issues = {
        "host-a": (["--server", "host-a,10.0.0.1,fe80::1"], "sslserver", "DNS:host-a, IP Address:10.0.0.1"),
        "fe80--1": (["--server", "fe80::1"], "sslserver", "IP Address:FE80:0:0:0:0:0:0:1"),
        "alice": (["--client", "alice", *scope], "sslclient", uri),
        "bob": (["--client", "bob", "--role", "reader", *request], "sslclient", "principal/bob?role=reader"),
    }
    ca = str(certs / "ca.pem")
    for name, (options, purpose, names) in issues.items():
        assert main(["certs", "issue", str(certs), *options, "--days", "30"]) == 0
        certificate = certs / f"{name}.pem"
        # Nothing but the leaf is checked, and the CA comes second in the chain.
        assert "OK" in openssl("verify", "-x509_strict", "-purpose", purpose, "-CAfile", ca, str(certificate))
        chain = certificate.read_text().split("-----END CERTIFICATE-----\n")
        assert len(chain) == 3
        assert chain[1] + "-----END CERTIFICATE-----\n" == Path(ca).read_text()
        text = openssl("x509", "-in", str(certificate), "-noout", "-ext", "subjectAltName,extendedKeyUsage")
        assert names in text
        assert ("Server Authentication" in text) == (purpose == "sslserver")
        own = certs / f"{name}-key.pem" if name != "bob" else Path(key)
        public = openssl("x509", "-in", str(certificate), "-noout", "-pubkey")
        assert openssl("pkey", "-in", str(own), "-pubout") == public
    assert not (certs / "bob-key.pem").exists()
    modes = {path.name: mode(path) for path in certs.iterdir()}
    assert mode(certs) == 0o700
    assert modes == {name: 0o600 if name.endswith("-key.pem") else 0o644 for name in modes}


def test_servers_and_clients_trust_each_other(certs: Path) -> None:
    assert main(["certs", "issue", str(certs), "--server", "127.0.0.1"]) == 0
    assert main(["certs", "issue", str(certs), "--client", "alice", "--role", "admin"]) == 0
    ca = certs / "ca.pem"
    server = {"tls_cert": certs / "127.0.0.1.pem", "tls_key": certs / "127.0.0.1-key.pem", "tls_ca": ca}
    client = {"tls_cert": certs / "alice.pem", "tls_key": certs / "alice-key.pem", "tls_ca": ca}
    with fastps.serve(shards=2, **server) as running:
        with fastps.connect(running.addresses, transport="tcp", **client) as ps:
            ps.register("w", np.zeros(3, np.float32), optimizer=fastps.SGD(lr=1.0))
            ps.push({"w": np.ones(3, np.float32)})
            assert ps.pull(["w"])["w"].tolist() == [-1.0] * 3
        with pytest.raises(fastps.PermissionDeniedError, match="asks for a client's certificate"):
            fastps.connect(running.addresses, transport="tcp", tls_ca=ca)


def test_show(certs: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for options in (["--server", "host-a"], ["--client", "alice", "--role", "worker", "--groups", "a"]):
        assert main(["certs", "issue", str(certs), *options, "--days", "20"]) == 0
    host, key, alice, ca = (certs / name for name in ("host-a.pem", "host-a-key.pem", "alice.pem", "ca.pem"))
    capfd.readouterr()
    assert main(["certs", "show", str(host), str(alice), "--json"]) == 0
    shown = json.loads(capfd.readouterr().out)
    assert shown["ok"] is True
    assert shown["problems"] == []
    first, its_ca, third, _ = shown["certificates"]
    assert first["names"] == ["host-a"]
    assert first["key"] == str(key)
    assert first["days_left"] in (19, 20)
    assert first["principal"] == {"name": "host-a", "role": "server", "scope": "*"}
    assert third["principal"] == {"name": "alice", "role": "worker", "scope": "a"}
    assert its_ca["is_ca"] is True
    assert its_ca["subject"] == first["issuer"]
    assert its_ca["key"] is None
    assert main(["certs", "show", str(host)]) == 0
    printed = capfd.readouterr().out
    assert "role:    server, as host-a, for *" in printed
    assert f"key:     {key}" in printed

    backwards = tmp_path / "backwards.pem"
    chain = host.read_text().split("-----END CERTIFICATE-----\n")[:2]
    backwards.write_text("".join(f"{part}-----END CERTIFICATE-----\n" for part in reversed(chain)))
    nonsense = tmp_path / "nonsense.pem"
    nonsense.write_text("not a certificate")
    for arguments, says in (
        ([host, "--warn-days", "30"], "certificate 1 expires in "),
        ([alice, key], f"{key} is the key of another certificate"),
        ([backwards], "is not followed by its issuer"),
        ([nonsense], "neither a certificate nor a private key"),
        ([tmp_path / "missing.pem"], "missing.pem"),
    ):
        assert main(["certs", "show", *map(str, arguments)]) == 1
        assert says in capfd.readouterr().err
    assert main(["certs", "show", str(ca), str(certs / "ca-key.pem")]) == 0


def test_nothing_is_overwritten_and_bad_input_is_named(
    certs: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    issue = ["certs", "issue", str(certs)]
    assert main([*issue, "--server", "host-a"]) == 0
    before = {path: path.read_bytes() for path in certs.iterdir()}
    wide = tmp_path / "wide"
    wide.mkdir(mode=0o755)
    bad_csr = tmp_path / "bad-csr.pem"
    bad_csr.write_text("nonsense")
    client = [*issue, "--client", "alice", "--role"]
    for arguments, code, says in (
        (["certs", "init", str(certs)], 1, "is not overwritten"),
        (["certs", "init", str(wide)], 1, f"run chmod 700 {wide}"),
        ([*issue, "--server", "host-a"], 1, "is not overwritten"),
        ([*issue, "--server", "host-b", "--name", "host-a"], 1, "is not overwritten"),
        ([*issue, "--server", "host-b", "--name", "ca"], 1, "the file name is reserved"),
        ([*issue, "--server", "host-b:7070"], 1, "without ports"),
        ([*issue, "--server", "https://host-b"], 1, "without ports"),
        ([*issue, "--server", "host-b", "--days", "4000"], 1, "outlive its CA"),
        ([*issue, "--server", "host-b", "--days", "0"], 2, "--days"),
        ([*issue, "--server", "host-b", "--role", "worker"], 2, "--role"),
        ([*issue, "--server", "host-b", "--csr", str(bad_csr)], 1, "certificate request"),
        ([*issue], 2, "--server"),
        ([*issue, "--client", "alice"], 2, "--role"),
        ([*client, "wroker"], 1, "expected worker (one of"),
        ([*client, "worker", "--groups", "a b"], 1, "groups or namespaces"),
        ([*issue, "--client", "a/b", "--role", "worker"], 1, "name of a principal"),
        (["certs", "issue", str(tmp_path), "--server", "host-b"], 1, "has no CA"),
    ):
        assert main(arguments) == code, arguments
        assert says in capfd.readouterr().err, arguments
    assert {path: path.read_bytes() for path in certs.iterdir()} == before
    (certs / "ca-key.pem").chmod(0o644)
    assert main([*issue, "--server", "host-b"]) == 1
    assert "run chmod 600" in capfd.readouterr().err
