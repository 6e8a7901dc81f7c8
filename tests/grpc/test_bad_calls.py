"""Bad unary calls: each leaves values and versions unchanged, and the server keeps working."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from foreign_client import TIMEOUT, ForeignClient, Message, Refused, trailing_refusal
from samples import SMALL, STATUS, unharmed

import grpc
from cases import case

Control = Callable[[ForeignClient], tuple[str, Message]]


def registering(**fields: Any) -> Control:
    def request(client: ForeignClient) -> tuple[str, Message]:
        spec = client.spec(**({"name": "bad", "shape": (4,)} | fields))
        return "Register", client.pb.RegisterRequest(spec=spec, client=client.client)

    return request


def calling(method: str, **fields: Any) -> Control:
    return lambda client: (method, getattr(client.pb, f"{method}Request")(**fields))


SMALL_SPEC: dict[str, Any] = {"name": "small", "shape": (SMALL,), "optimizer": "sgd", "settings": {"lr": 0.5}}
ADAM = {"optimizer": "adam", "settings": {}}
MOMENTUM = {"settings": {"lr": 0.5, "momentum": 0.9}}
SECRET = bytes(range(16))
LONG = "x" * 1024  # errors quote no more than that
# what: (call, kind, tensor, expected, got)
BAD_CALLS: dict[str, tuple[Control, str, str, str, str]] = {
    "unknown name": (calling("Unregister", name="nobody"), "unknown_tensor", "nobody", "", ""),
    "another shape": (registering(**SMALL_SPEC | {"shape": (14,)}), "precondition", "small", "13", "14"),
    "another rule": (registering(**SMALL_SPEC | ADAM), "precondition", "small", "SGD", "Adam"),
    "another setting": (registering(**SMALL_SPEC | MOMENTUM), "precondition", "small", "0", "0.9"),
    "another apply": (registering(**SMALL_SPEC | {"apply": 2}), "precondition", "small", "exact", "hogwild"),
    "another group": (
        registering(**SMALL_SPEC | {"group": "other"}),
        "precondition",
        "small",
        "default",
        "other",
    ),
    "2^60 elements": (registering(shape=(1 << 60,)), "shape", "bad", "2^57", str(1 << 60)),
    "2^80 elements": (registering(shape=(1 << 40, 1 << 40)), "shape", "bad", "2^57", str(1 << 40)),
    "no elements, and 2^62 rows": (registering(shape=(0, 1 << 62)), "shape", "bad", "2^57", str(1 << 62)),
    "33 dimensions": (registering(shape=(1,) * 33), "shape", "bad", "32", "33"),
    "no name": (registering(name=""), "config", "", "1 to 1024", "0"),
    "a name of 1025 bytes": (registering(name="x" * 1025), "config", LONG, "1 to 1024", "1025"),
    "a name of 100,000 bytes": (registering(name="x" * 100_000), "config", LONG, "1 to 1024", "100000"),
    "an unknown name of 100,000 bytes": (
        calling("Unregister", name="x" * 100_000),
        "unknown_tensor",
        LONG,
        "",
        "",
    ),
    "no group": (registering(group=""), "config", "bad", "1 to 1024", "0"),
    "float16": (registering(dtype=4), "dtype", "bad", "BFLOAT16", "DTYPE_FLOAT16"),
    "bfloat16 without locks": (registering(dtype=3, apply=2), "dtype", "bad", "float32", "bfloat16"),
    "a rounding of float32": (registering(rounding=1), "config", "bad", "bfloat16", "stochastic"),
    "an unknown rounding": (registering(dtype=3, rounding=7), "frame", "bad", "0 to 2", "7"),
    "a seed of nothing": (registering(dtype=3, rounding=2, seed=5), "config", "bad", "no seed", "5"),
    "float64 without locks": (registering(dtype=2, apply=2), "dtype", "bad", "float32", "float64"),
    "no dtype": (registering(dtype=0), "dtype", "bad", "FLOAT32", "UNSPECIFIED"),
    "no apply": (registering(apply=0), "config", "bad", "1 or 2", "0"),
    "unknown rule": (registering(optimizer="sophia"), "config", "bad", "sgd", "sophia"),
    "unknown setting": (registering(settings={"beta3": 1}), "config", "bad", "lr", "beta3"),
    "invalid setting": (registering(settings={"momentum": -1}), "config", "bad", "", "-1"),
    "a flag that is 2": (registering(settings={"maximize": 2}), "config", "bad", "0 or 1", "2"),
    "no spec": (calling("Register", client=1), "config", "", "", ""),
    "sealing nothing": (calling("Seal", reservation=4711), "lease", "", "", ""),
    "committing nothing": (calling("Commit", reservation=4711), "lease", "", "", ""),
    "a hello without client": (calling("Hello", secret=SECRET), "config", "", "", ""),
    "a hello without a secret": (calling("Hello", client=4711), "config", "", "16 random bytes", "0 bytes"),
    "a hello with a short secret": (
        calling("Hello", client=4711, secret=SECRET[:15]),
        "config",
        "",
        "16 random bytes",
        "15 bytes",
    ),
    "holding writes for no cut": (calling("Hold", hold_ms=100), "config", "", "any number but 0", "0"),
    "a cut over a group of 1025 bytes": (
        calling("Checkpoint", group="x" * 1025, cut=5),
        "config",
        "",
        "at most 1024",
        "1025",
    ),
    "renewing what is not there": (
        calling("Hello", client=4711, renew=True, secret=SECRET),
        "lease",
        "",
        "",
        "",
    ),
}


def test_a_bad_call_is_refused(target: ForeignClient) -> None:
    for what, (build, kind, tensor, expected, got) in BAD_CALLS.items():
        with case(what):
            method, request = build(target)
            with unharmed(target), pytest.raises(Refused) as refused:
                target.call(0, method, request)
            refusal = refused.value.refusal
            assert (refusal.kind, refused.value.code) == (kind, STATUS[kind]), refusal
            assert refusal.message, refusal
            assert (refusal.HasField("shard"), refusal.shard, refusal.tensor) == (True, 0, tensor), refusal
            assert expected in refusal.expected, refusal
            assert got in refusal.got, refusal


UNREADABLE = {
    "above the limit": (b"\0" * ((4 << 20) + 1), "at most 4194304 bytes", "found 4194305 bytes"),
    "no message": (b"\xff" * 40, "protobuf", "failed to decode"),
}


@pytest.mark.parametrize("what", UNREADABLE)
def test_bytes_that_nobody_can_read_are_refused(target: ForeignClient, what: str) -> None:
    request, expected, got = UNREADABLE[what]
    with unharmed(target):
        for shard, channel in enumerate(target.channels):
            with pytest.raises(grpc.RpcError) as ended:
                channel.unary_unary("/fastps.v1.Control/Register")(request, timeout=TIMEOUT)
            assert ended.value.code() == grpc.StatusCode.INVALID_ARGUMENT
            refusal = trailing_refusal(target.stubs, ended.value)
            assert (refusal.kind, refusal.HasField("shard"), refusal.shard) == ("frame", True, shard)
            assert expected in refusal.expected
            assert got in refusal.got
