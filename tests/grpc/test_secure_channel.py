"""A foreign client over TLS: the same port and bytes, with a certificate if the server requires one."""

from pathlib import Path

import numpy as np
import pytest
from foreign_client import ForeignClient
from samples import BIG, normal

import fastps
import grpc


def credentials(tls_ca, tls_cert=None, tls_key=None):
    read = [None if file is None else Path(file).read_bytes() for file in (tls_ca, tls_key, tls_cert)]
    return grpc.ssl_channel_credentials(*read)


@pytest.mark.parametrize("mutual", [False, True])
def test_a_foreign_client_trains_over_tls(stubs, ca, mutual):
    files = ca.client if mutual else ca.trust
    with (
        fastps.serve(shards=2, **(ca.mutual if mutual else ca.server)) as server,
        ForeignClient(stubs, server.address_list, credentials=credentials(**files)) as foreign,
        fastps.connect(server.addresses, transport="tcp", **files) as native,
    ):
        initial = normal((BIG,), 1)
        foreign.register(foreign.spec("w", (BIG,), "sgd", {"lr": 1.0}), initial)
        gradient = normal((BIG,), 2)
        foreign.push("w", gradient)
        np.testing.assert_array_equal(foreign.pull("w")[0], initial - gradient)
        np.testing.assert_array_equal(native.pull("w"), initial - gradient)


def test_a_foreign_client_without_a_certificate_is_refused(stubs, ca):
    with (
        fastps.serve(**ca.server, tls_ca=ca.file) as server,
        ForeignClient(stubs, server.address_list, credentials=credentials(ca.file), hello=False) as foreign,
        pytest.raises(grpc.RpcError) as caught,
    ):
        foreign.controls[0].Stats(stubs.pb.StatsRequest(), timeout=30)
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
