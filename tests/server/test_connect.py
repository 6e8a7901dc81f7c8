"""Addresses of `fastps.connect`, its messages while it waits, and tensors that are gone."""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

import fastps
from cases import case
from fastps.commands.kit.servers import free_ports

ONES = np.ones(3, np.float32)


# -- addresses -----------------------------------------------------------------------------------------------


def test_a_server_a_port_and_lists_are_addresses() -> None:
    with fastps.serve(shards=2) as server:
        port = int(server.address_list[0].rpartition(":")[2])
        for addresses in (
            server,
            server.addresses,
            server.address_list,
            tuple(server.address_list),
            port,
            np.int64(port),
            [port],
            [server.address_list[0]],
            iter(server.address_list),
        ):
            with fastps.connect(addresses) as ps:
                assert sorted(ps.transport) == sorted(server.address_list)


def test_a_client_keeps_its_server_running() -> None:
    """Also if nothing else refers to either: a worker's own client does."""
    ps = fastps.connect(fastps.serve(), timeout=5.0)
    gc.collect()
    ps.register("w", np.zeros(3, np.float32), fastps.SGD(lr=1.0))
    worker = fastps.Worker(ps, {"w": np.zeros(3)}, fastps.Async())
    del ps
    gc.collect()
    worker.step({"w": ONES})
    assert worker.params["w"].tolist() == [-1.0] * 3
    worker.close()


@pytest.mark.parametrize("wrong", [3.5, True, 0, 65536, [None], [("127.0.0.1:1",)], b"host-a:7070"], ids=repr)
def test_what_is_no_address_is_refused(wrong: object) -> None:
    with pytest.raises(fastps.ConfigError, match="invalid"):
        fastps.connect(wrong)  # type: ignore[arg-type]


def test_host_and_port_are_one_text() -> None:
    for wrong in (("host-a", 7070), ["host-a", 7070], ("host-a", "7070"), "host-a,7070"):
        with (
            case(wrong),
            pytest.raises(fastps.ConfigError, match="expected one str, 'host-a:7070', got host"),
        ):
            fastps.connect(wrong)


@pytest.mark.parametrize(
    "wrong", [list("127.0.0.1:7070"), ",".join("127.0.0.1:7070,127.0.0.1:7071")], ids=["list", "str"]
)
def test_the_characters_of_addresses_are_no_addresses(wrong: str | list[str]) -> None:
    with pytest.raises(
        fastps.ConfigError, match=r"server\.address_list, got the characters of a str, '1', '2'"
    ):
        fastps.connect(wrong)


def test_serve_names_its_arguments_and_no_options() -> None:
    for arguments, text in (
        ({"listen": "0.0.0.0:0"}, "tls_cert=, tls_key= and tokens= (or tls_ca=); or insecure=True"),
        ({"listen": "0.0.0.0:7070", "cluster": "a:1,b:2", "insecure": True}, "expected advertise=HOST"),
        ({"copy_to": "file:///nowhere"}, "expected copy_to= with data_dir=, got only copy_to="),
        ({"keep_history": 1 << 20}, "expected keep_history= with data_dir=, got only keep_history="),
    ):
        with case(text), pytest.raises(fastps.ConfigError) as caught:
            fastps.serve(**arguments)
        assert text in str(caught.value)
        assert "--" not in str(caught.value)


# -- waiting -------------------------------------------------------------------------------------------------


def log_texts(caplog: pytest.LogCaptureFixture, level: int = logging.WARNING) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "fastps" and r.levelno == level]


def test_connect_says_for_which_server_it_waits(caplog: pytest.LogCaptureFixture) -> None:
    address = f"127.0.0.1:{free_ports(1)[0]}"
    with pytest.raises(fastps.ConnectionLostError):
        fastps.connect(address, timeout=4)
    (text,) = log_texts(caplog)
    assert text.startswith(f"waiting for the server at {address}: ")


CALLS: dict[str, Callable[[fastps.ParameterServer], object]] = {
    "pull": lambda ps: ps.pull("w", timeout=1.5),
    "push": lambda ps: ps.push("w", ONES, timeout=1.5),
    "push_async": lambda ps: ps.push_async("w", ONES, timeout=1.5).result(),
    "names": lambda ps: ps.names(timeout=1.5),
}


@pytest.fixture(scope="module")
def deserted() -> fastps.ParameterServer:
    """A client whose server is gone."""
    with fastps.serve() as server:
        ps = fastps.connect(server)
        ps.register("w", ONES, optimizer=fastps.SGD(lr=1.0))
    return ps


@pytest.mark.parametrize("call", CALLS)
def test_a_call_says_once_for_which_server_it_waits(
    deserted: fastps.ParameterServer, caplog: pytest.LogCaptureFixture, call: str
) -> None:
    with pytest.raises((fastps.ConnectionLostError, fastps.DeadlineError, fastps.PartialPush)):
        CALLS[call](deserted)
    (text,) = log_texts(caplog)
    (address,) = deserted.transport
    assert text.startswith(f"waiting for the server at {address}: ")


def test_a_slow_answer_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "fastps")
    mode = fastps.Sync(workers=2)
    with fastps.serve() as server, fastps.connect(server) as ps:
        ps.register("w", ONES, optimizer=fastps.SGD(lr=1.0))
        one, two = (fastps.Worker(ps, {"w": ONES}, mode=mode) for _ in range(2))
        step = threading.Thread(target=one.step, args=[{"w": ONES}])
        step.start()
        end = time.monotonic() + 60
        while not log_texts(caplog, logging.INFO):
            assert time.monotonic() < end, "nothing is said"
            time.sleep(0.02)
        two.step({"w": ONES})
        step.join()
        one.close()
        two.close()
    assert log_texts(caplog, logging.INFO)[0] == f"waiting for an answer of shard 0 at {server.addresses}"
    assert log_texts(caplog) == []


# -- tensors that are gone -----------------------------------------------------------------------------------


def test_a_tensor_that_another_client_has_removed_is_not_the_server_s_loss() -> None:
    with fastps.serve() as server, fastps.connect(server) as ps, fastps.connect(server) as other:
        ps.register("w", ONES, optimizer=fastps.SGD(lr=1.0))
        other.unregister("w")
        for _ in range(2):
            with pytest.raises(fastps.UnknownTensorError, match='"w" is no longer registered'):
                ps.pull("w")
