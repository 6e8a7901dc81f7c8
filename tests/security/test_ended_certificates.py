"""Certificates that are revoked or expire while their connections are open: these end within 10 s."""

from __future__ import annotations

import datetime
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy as np
import pytest
from certificates import Authority
from foreign_client import ForeignClient, Stubs

import fastps
import grpc

ONES = np.ones(8, np.float32)
#: Validity of a certificate that expires in the test.
SHORT = datetime.timedelta(seconds=4)
REFUSED = "does not accept the client's certificate"


def end_of_stream(client: ForeignClient) -> grpc.StatusCode:
    """Waits for the end of the client's stream, which sends nothing."""
    with pytest.raises(grpc.RpcError) as raised:
        client.stream(0).receive()
    return raised.value.code()


def push_until_refused(ps: fastps.ParameterServer) -> None:
    """Pushes until the server no longer accepts the certificate. Repeats pushes in doubt."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        with suppress(fastps.PartialPush):
            try:
                ps.push("w", ONES, timeout=2)
            except (fastps.PermissionDeniedError, fastps.ConnectionLostError) as error:
                if REFUSED in str(error):
                    return
    raise AssertionError("the connection stays")


@pytest.mark.timeout(180)
def test_connections_end_with_their_certificates(stubs: Stubs, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    good, _ = authority.client("alice")
    with ExitStack() as stack:
        options = {"tls_ca": authority.file, "tls_crl": authority.revoked()}
        server = stack.enter_context(fastps.serve(**authority.server("127.0.0.1"), **options))
        alice = stack.enter_context(fastps.connect(server, transport="tcp", **good))
        alice.register("w", np.zeros(8, np.float32), optimizer=fastps.SGD(lr=1.0))
        expires, _ = authority.client("bob", until=SHORT)
        ends = time.monotonic() + SHORT.total_seconds()
        revoked, certificate = authority.client("carol")
        clients = {}
        for files in (expires, revoked):
            ours = stack.enter_context(fastps.connect(server, transport="tcp", **files))
            credentials = authority.credentials_of(files)
            plain = stack.enter_context(ForeignClient(stubs, server.address_list, credentials=credentials))
            ours.push("w", ONES)
            plain.push("w", ONES)
            clients[files["tls_cert"]] = (ours, plain)
        authority.revoked(certificate)
        begin = max(ends, time.monotonic())
        for _, plain in clients.values():
            assert end_of_stream(plain) is grpc.StatusCode.UNAVAILABLE
        assert time.monotonic() < begin + 10
        for ours, plain in clients.values():
            with pytest.raises(grpc.RpcError) as raised:
                plain.controls[0].Stats(stubs.pb.StatsRequest(), timeout=30)
            assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
            push_until_refused(ours)
        for files in (expires, revoked):
            with pytest.raises(fastps.PermissionDeniedError, match=REFUSED):
                fastps.connect(server, transport="tcp", **files)
        # The others notice nothing.
        alice.push("w", ONES)
