"""Statuses as foreign gRPC programs read them: `grpcio-status`, and `grpcurl`, which uses grpc-go.

The server of `replay` ends calls with the golden statuses, which include kinds that a healthy server never
sends.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import pytest
from foreign_client import TIMEOUT, ForeignClient, Stubs, trailing_refusal
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from programs import grpcurl

import fastps
import grpc

ROOT = Path(__file__).resolve().parents[2]
CASES: list[dict[str, Any]] = json.loads((ROOT / "tests/vectors/statuses.json").read_text())
KINDS = [case["refusal"]["kind"] for case in CASES]
DOMAIN = "fastps"


class Replay(grpc.GenericRpcHandler):
    """Any call ends with the golden status of the kind in its metadata."""

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        (case,) = [
            case for case in CASES if case["refusal"]["kind"] == dict(details.invocation_metadata)["kind"]
        ]

        def refuse(request: bytes, context: grpc.ServicerContext) -> None:
            context.set_trailing_metadata((("grpc-status-details-bin", bytes.fromhex(case["details"])),))
            context.abort(grpc.StatusCode[case["code"]], case["message"])

        return grpc.unary_unary_rpc_method_handler(refuse)


@pytest.fixture(scope="module")
def replay() -> Iterator[str]:
    server = grpc.server(futures.ThreadPoolExecutor(2), handlers=[Replay()])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait()


@pytest.mark.parametrize("case", CASES, ids=KINDS)
def test_grpcio_status_reads_every_kind(stubs: Stubs, replay: str, case: dict[str, Any]) -> None:
    with grpc.insecure_channel(replay) as channel, pytest.raises(grpc.RpcError) as ended:
        hello = stubs.rpc.ControlStub(channel).Hello
        hello(stubs.pb.HelloRequest(), timeout=TIMEOUT, metadata=(("kind", case["refusal"]["kind"]),))
    status = rpc_status.from_call(ended.value)
    assert (status.code, status.message) == (ended.value.code().value[0], case["message"])
    assert len(bytes.fromhex(case["details"])) < 4096
    refusal, info = stubs.pb.Refusal(), error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(refusal)
    assert refusal == stubs.pb.Refusal(**case["refusal"])
    assert status.details[1].Unpack(info)
    assert (info.reason, info.domain) == (refusal.kind.upper(), DOMAIN)
    retry = error_details_pb2.RetryInfo()
    assert [detail.Unpack(retry) for detail in status.details[2:]] == [True] * refusal.HasField(
        "retry_after_ms"
    )
    assert retry.retry_delay.ToMilliseconds() == refusal.retry_after_ms


def call(*arguments: str) -> dict[str, Any]:
    """The status that grpcurl reports for a failing call."""
    command = [grpcurl(), "-plaintext", "-format-error", "-max-time", str(TIMEOUT), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=2 * TIMEOUT)
    assert done.returncode > 64, done
    status: dict[str, Any] = json.loads(done.stderr)
    return status


def check(status: dict[str, Any], refusal: dict[str, Any], code: str) -> None:
    assert status["code"] == grpc.StatusCode[code].value[0], status
    by_type = {detail["@type"].rsplit("/")[-1]: detail for detail in status["details"]}
    (refused, info) = (by_type["fastps.v1.Refusal"], by_type["google.rpc.ErrorInfo"])
    assert (info["reason"], info["domain"]) == (refusal["kind"].upper(), DOMAIN)
    assert {field: refused[field] for field in refusal if field != "retry_after_ms"} == {
        field: value for field, value in refusal.items() if field != "retry_after_ms"
    }
    assert ("google.rpc.RetryInfo" in by_type) == ("retry_after_ms" in refusal)
    assert refused.get("retryAfterMs", "") == str(refusal.get("retry_after_ms", ""))


@pytest.mark.timeout(600)  # it may have to be built
def test_grpcurl_reads_every_kind(replay: str) -> None:
    # The package has the sources beside the generated code.
    common = Path(error_details_pb2.__file__).parents[2]
    protos = ["-import-path", str(ROOT / "protos"), "-proto", "fastps/v1/fastps.proto"]
    protos += ["-import-path", str(common), "-proto", "google/rpc/error_details.proto"]
    for case in CASES:
        kind = case["refusal"]["kind"]
        status = call(*protos, "-rpc-header", f"kind: {kind}", replay, "fastps.v1.Control/Hello")
        assert status["message"] == case["message"]
        check(status, case["refusal"], case["code"])


# method: (request, kind, code)
REFUSED = {
    "Hello": ("{}", "config", "INVALID_ARGUMENT"),
    "Unregister": ('{"name": "nobody"}', "unknown_tensor", "NOT_FOUND"),
    "Seal": ('{"reservation": 4711}', "lease", "FAILED_PRECONDITION"),
    "Checkpoint": ("{}", "precondition", "FAILED_PRECONDITION"),
}


@pytest.mark.timeout(600)
def test_grpcurl_reads_refusals_with_what_reflection_tells(server: fastps.Server) -> None:
    address = server.address_list[0]
    for method, (request, kind, code) in REFUSED.items():
        status = call("-d", request, address, f"fastps.v1.Control/{method}")
        check(status, {"kind": kind, "shard": 0}, code)


def test_a_compressed_message_is_refused(target: ForeignClient) -> None:
    for shard, control in enumerate(target.controls):
        with pytest.raises(grpc.RpcError) as ended:
            control.GetMap(target.pb.GetMapRequest(), timeout=TIMEOUT, compression=grpc.Compression.Gzip)
        assert ended.value.code() == grpc.StatusCode.UNIMPLEMENTED
        refusal = trailing_refusal(target.stubs, ended.value)
        assert (refusal.kind, refusal.shard) == ("frame", shard)
        assert "gzip" in refusal.got
