"""Hello, map, statistics, health and reflection."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from foreign_client import TIMEOUT, ForeignClient, Refused
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2
from samples import SMALL

import fastps


def test_hello_tells_what_the_server_is(foreign: ForeignClient, server: fastps.Server) -> None:
    hellos = [foreign.hello(shard, renew=True) for shard in (0, 1)]
    assert [h.shard for h in hellos] == [0, 1]
    assert all(list(h.cluster) == server.address_list for h in hellos)
    assert all(h.max_message_bytes == 4 << 20 and h.lease_ms > 0 for h in hellos)
    assert all(h.server and h.epoch == hellos[0].epoch for h in hellos)
    assert all(h.role == foreign.pb.ROLE_ADMIN for h in hellos)
    future = foreign.pb.HelloRequest(client=foreign.client, protocol_minor=999, secret=foreign.secret)
    assert foreign.call(0, "Hello", future).protocol_minor == hellos[0].protocol_minor


def test_only_shard_0_has_the_map(foreign: ForeignClient) -> None:
    with pytest.raises(Refused) as refused:
        foreign.call(1, "GetMap", foreign.pb.GetMapRequest())
    refusal = refused.value.refusal
    assert (refusal.kind, refusal.shard) == ("precondition", 1)
    assert "shard 0" in refusal.expected
    assert "shard 1" in refusal.got


def test_the_map_leaves_out_unknown_names(target: ForeignClient) -> None:
    request = target.pb.GetMapRequest(names=["nobody", "small"])
    assert [e.spec.name for e in target.call(0, "GetMap", request).entries] == ["small"]


def test_stats_count(target: ForeignClient) -> None:
    shard = target.entry("small").placement.shards[0]

    def counters() -> dict[str, int]:
        return dict(target.call(shard, "Stats", target.pb.StatsRequest()).counters)

    before = counters()
    target.push("small", np.zeros(SMALL, np.float32))
    bad = target.gradient_frames("small", np.full(SMALL, np.nan, np.float32))
    target.exchange("small", bad)
    after = counters()
    assert after["pushes"] == before["pushes"] + 1
    assert after["refused"] == before["refused"] + 1
    sessions = target.call(shard, "Stats", target.pb.StatsRequest()).sessions
    (mine,) = [s for s in sessions if s.number == target.hello(shard, renew=True).session]
    assert mine.name == "foreign"
    assert mine.applied > 0


def test_health_answers(foreign: ForeignClient) -> None:
    for channel in foreign.channels:
        stub = health_pb2_grpc.HealthStub(channel)
        for service in ("", "fastps.v1.Control", "fastps.v1.Data"):
            answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=TIMEOUT)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
def test_reflection_answers(foreign: ForeignClient, version: str) -> None:
    # The two versions differ in nothing but their name; grpcio-reflection has the older one.
    call = foreign.channels[0].stream_stream(
        f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )
    requests = [
        reflection_pb2.ServerReflectionRequest(list_services=""),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol="fastps.v1.Header"),
    ]
    services, files = call(iter(requests), timeout=TIMEOUT)
    names = {service.name for service in services.list_services_response.service}
    assert {"fastps.v1.Control", "fastps.v1.Data", "grpc.health.v1.Health"} <= names
    (file,) = map(FileDescriptorProto.FromString, files.file_descriptor_response.file_descriptor_proto)
    mine = FileDescriptorProto()
    foreign.pb.DESCRIPTOR.CopyToProto(mine)
    assert outline(file) == outline(mine)


def outline(file: FileDescriptorProto) -> Any:
    """All that matters on the wire."""
    fields = {m.name: [(f.name, f.number, f.type, f.label) for f in m.field] for m in file.message_type}
    values = {e.name: [(v.name, v.number) for v in e.value] for e in file.enum_type}
    methods = {s.name: [(m.name, m.input_type, m.output_type) for m in s.method] for s in file.service}
    return file.package, fields, values, methods
