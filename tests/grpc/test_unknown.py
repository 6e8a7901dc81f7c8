"""The server refuses unknown enum values wherever they occur, and ignores unknown fields."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from foreign_client import TIMEOUT, ForeignClient, Message, Refused
from samples import SMALL, normal

UNKNOWN = 99

Path = tuple[str, ...]


def enums(descriptor: Any) -> Iterator[Path]:
    """The paths of a message's enums, by its descriptor: so none that is added is left out."""
    for field in descriptor.fields:
        if field.enum_type is not None:
            yield (field.name,)
        elif field.message_type is not None:
            yield from ((field.name, *path) for path in enums(field.message_type))


def spoil(message: Message, path: Path) -> None:
    for name in path[:-1]:
        message = first(message, name)
    setattr(message, path[-1], UNKNOWN)


def first(message: Message, name: str) -> Message:
    """The message of a field; of a list the first, into which the fields for one move."""
    field = getattr(message, name)
    if not hasattr(field, "add"):
        return field
    one = field.add()
    for own in message.DESCRIPTOR.fields:
        if own.name == name.removesuffix("s") and own.message_type is one.DESCRIPTOR:
            one.CopyFrom(getattr(message, own.name))
        elif own.name in one.DESCRIPTOR.fields_by_name:
            one.MergeFrom(type(one)(**{own.name: getattr(message, own.name)}))
        else:
            continue
        message.ClearField(own.name)
    return one


def good(client: ForeignClient, method: Any) -> Message:
    """A request in which nothing is wrong that is read before its enums."""
    pb, me = client.pb, client.client
    spec = client.spec("unknown", (4,))
    requests = {
        "Hello": pb.HelloRequest(client=me, secret=client.secret),
        "Register": pb.RegisterRequest(client=me, spec=spec),
        "Reserve": pb.ReserveRequest(client=me, spec=spec, reservation=5, slices=[5], indices=[0], group=1),
        "Join": pb.JoinRequest(client=me, group=1, mode=pb.Mode(kind=pb.MODE_FREE)),
        "Portion": pb.PortionRequest(client=me, name="unknown", n=1, size=1, worker=1),
        "Coordinate": pb.CoordinateRequest(client=me, space=1, name="unknown"),
        "BatchPortion": pb.BatchPortionRequest(client=me, space="unknown", replica=1, name="unknown"),
    }
    return requests.get(method.name) or getattr(pb, method.input_type.name)()


def refused(refusal: Message, path: Path) -> None:
    assert refusal.kind == ("dtype" if path[-1] == "dtype" else "frame"), (path, refusal)
    assert path[-1] in refusal.message, (path, refusal)
    assert refusal.got == str(UNKNOWN), (path, refusal)


def test_unknown_values_of_enums_are_refused_in_every_call(target: ForeignClient) -> None:
    tried = []
    for method in target.pb.DESCRIPTOR.services_by_name["Control"].methods:
        for path in enums(method.input_type):
            request = good(target, method)
            spoil(request, path)
            with pytest.raises(Refused) as raised:
                target.call(0, method.name, request)
            refused(raised.value.refusal, path)
            tried.append((method.name, path[-1]))
    assert {("Hello", "ack"), ("Reserve", "apply"), ("Join", "kind"), ("Portion", "then")} <= set(tried)
    assert {("Coordinate", "action"), ("BatchPortion", "failure"), ("BatchPortion", "then")} <= set(tried)
    # Nothing of it counted: the client may still ask for what is refused to those that have a place.
    target.call(0, "Leave", target.pb.LeaveRequest(client=target.client, group=1))


def test_unknown_values_of_enums_are_refused_in_frames(target: ForeignClient) -> None:
    paths = list(enums(target.pb.Frame.DESCRIPTOR))
    assert ("header", "codec") in paths
    shard = target.entry("small").placement.shards[0]
    for path in paths:
        frame = target.gradient_frames("small", normal((SMALL,), 19))[0]
        spoil(frame, path)
        (answer,) = target.stream(shard).exchange([frame])
        assert answer.header.kind == target.pb.KIND_REFUSED, path
        refused(answer.header.refusal, path)


def test_fields_that_nobody_knows_are_dropped(foreign: ForeignClient) -> None:
    request = foreign.pb.HelloRequest(client=foreign.client, secret=foreign.secret)
    hello = foreign.channels[0].unary_unary(
        "/fastps.v1.Control/Hello", response_deserializer=foreign.pb.HelloResponse.FromString
    )
    field = b"\xc2\x3e\x04tail"  # number 1000
    answers = [hello(request.SerializeToString() + more, timeout=TIMEOUT) for more in (b"", field)]
    assert answers[0] == answers[1]


def test_a_cut_without_a_group_is_refused(foreign: ForeignClient) -> None:
    with pytest.raises(Refused) as raised:
        foreign.call(0, "Checkpoint", foreign.pb.CheckpointRequest(cut=5))
    assert (raised.value.refusal.kind, raised.value.refusal.got) == ("config", "5")


# Classes of io.grpc, Grpc.Core and google.rpc beside which generated ones are imported.
TAKEN = {
    *("Attributes", "BindableService", "CallCredentials", "CallOptions", "Channel", "ClientCall", "Codec"),
    *(
        "Compressor",
        "Context",
        "Deadline",
        "Decompressor",
        "Grpc",
        "ManagedChannel",
        "Marshaller",
        "Metadata",
    ),
    *("Method", "MethodDescriptor", "NameResolver", "Server", "ServerCall", "Status", "StatusException"),
    *("ErrorInfo", "RetryInfo", "WriteOptions"),
}


def test_no_generated_type_is_called_like_one_of_grpc(foreign: ForeignClient) -> None:
    file = foreign.pb.DESCRIPTOR
    names = {*file.message_types_by_name, *file.enum_types_by_name, *file.services_by_name}
    assert not names & TAKEN
    options = file.GetOptions()
    assert (options.go_package, options.java_package) == ("fastps/v1;fastpsv1", "fastps.v1")
    assert options.java_multiple_files
    assert options.csharp_namespace == "Fastps.V1"
