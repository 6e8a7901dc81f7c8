"""Every call and every kind of frame by every role and scope, as `roles.json` beside this file has it.

The calls and kinds come from the descriptor: a new one that is not listed fails the test.
"""

from __future__ import annotations

import itertools
import json
import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from certificates import DAY, Authority
from foreign_client import ForeignClient, Refused, Stubs
from token_files import Tokens, new_token

import fastps
import grpc

EXPECTED = Path(__file__).with_name("roles.json")
#: Role and scope of each caller.
CALLERS = {
    "reader": ("reader", "*"),
    "worker": ("worker", "*"),
    "admin": ("admin", "*"),
    "server": ("server", "*"),
    "worker of the group": ("worker", "a"),
    "worker of another group": ("worker", "b"),
    "worker of a namespace": ("worker", "namespace:n"),
    "admin of another group": ("admin", "b"),
}
UNKNOWN = 0x7777
#: Calls and kinds that an open space forbids.
WITHOUT_SPACE = {"Unregister", "KIND_GRADIENT", "KIND_ASSIGN"}
ZEROS = np.zeros(8, np.float32)
Table = dict[str, dict[str, str]]


class Target:
    """The things of a group that callers reach for; or names and numbers of nothing."""

    numbers = itertools.count()

    def __init__(self, owner: ForeignClient, exists: bool, of: str = "") -> None:
        pb, owner.sequence = owner.pb, owner.sequence + 1
        name = f"w{secrets.token_hex(4)}"
        self.spec = owner.spec(name, (8,), group="a")
        self.new = owner.spec(f"new {name}", (8,), group="a")
        self.exists = exists
        if not exists:
            self.entry = pb.MapEntry(
                spec=self.spec, placement=pb.Placement(slices=[UNKNOWN], shards=[0], group=99)
            )
            self.reservation, self.space, self.space_name = UNKNOWN, UNKNOWN, f"space of {name}"
            self.first = pb.RegisterResponse(reservation=UNKNOWN, placement=self.entry.placement)
            return
        # A client has few registrations under way, and a connection begins few sessions a second.
        if next(self.numbers) % 32 == 0:
            owner.client = secrets.randbits(64) | 1
            owner.hello(0)
        owner.register(self.spec, ZEROS)
        self.entry = owner.entry(name)
        self.space_name, self.space = f"space of {name}", UNKNOWN
        if of not in WITHOUT_SPACE:
            self.space = owner.call(0, "OpenSpace", self.open(owner.client, pb)).space
        # A registration under way.
        request = pb.RegisterRequest(spec=owner.spec(f"open {name}", (8,), group="a"), client=owner.client)
        self.first = owner.call(0, "Register", request)
        owner.call(0, "Reserve", owner.reserve_request(request.spec, self.first, [0]))
        self.reservation = self.first.reservation

    def open(self, client: int, pb: Any) -> Any:
        """A request for the space."""
        slices = list(self.entry.placement.slices)
        return pb.OpenSpaceRequest(
            client=client,
            name=self.space_name,
            tensors=[self.spec.name],
            vectors=["v"],
            keep_for_ms=60_000,
            slices=slices,
        )


def requests(pb: Any, client: int, secret: bytes, target: Target) -> dict[str, Any]:
    """A request of each call."""
    entry, space = target.entry, target.space
    task = pb.BatchTask(batch=1, portions=1, asked=1, samples=1, vector=1, min_replicas=1)
    replica = {"client": client, "space": target.space_name, "replica": 1, "name": "r"}
    return {
        "Hello": pb.HelloRequest(client=client, secret=secret, protocol_minor=1),
        "GetMap": pb.GetMapRequest(names=[entry.spec.name]),
        "Register": pb.RegisterRequest(client=client, spec=target.new),
        "Reserve": pb.ReserveRequest(
            client=client,
            reservation=target.reservation,
            spec=target.new,
            slices=target.first.placement.slices,
            indices=[0],
            group=target.first.placement.group,
        ),
        "Seal": pb.SealRequest(reservation=target.reservation),
        "Commit": pb.CommitRequest(reservation=target.reservation, client=client),
        "Settle": pb.SettleRequest(reservations=[UNKNOWN]),
        "Unregister": pb.UnregisterRequest(name=entry.spec.name),
        "Drop": pb.DropRequest(slices=entry.placement.slices),
        "Stats": pb.StatsRequest(changed=[entry.spec.name]),
        "Join": pb.JoinRequest(
            client=client,
            group=entry.placement.group,
            mode=pb.Mode(kind=pb.MODE_BOUNDED, staleness=1),
            name="j",
        ),
        "Leave": pb.LeaveRequest(client=client, group=entry.placement.group),
        "Advance": pb.AdvanceRequest(client=client, group=entry.placement.group, clock=1),
        "Portion": pb.PortionRequest(client=client, name="a/train", n=4, size=1, worker=1),
        "OpenSpace": target.open(client, pb),
        "CloseSpace": pb.CloseSpaceRequest(client=client, space=space),
        "ListSpaces": pb.ListSpacesRequest(),
        "Coordinate": pb.CoordinateRequest(
            client=client, space=space, action=pb.SEAT_STORE, term=1, state=b"s"
        ),
        "Batch": pb.BatchRequest(client=client, space=space, term=1, task=task),
        "BatchPortion": pb.BatchPortionRequest(**replica, then=pb.PORTION_THEN_TAKE),
        "Checkpoint": pb.CheckpointRequest(),
        "Hold": pb.HoldRequest(cut=5, hold_ms=1),
        "Mark": pb.MarkRequest(name="m", cut=5),
    }


def frames(client: ForeignClient, target: Target) -> dict[str, Any]:
    """A frame of each kind that a client may send."""
    pb, entry, body = client.pb, target.entry, np.ones(8, "<f4").tobytes()
    program = pb.Program(ops=[pb.Op(code=pb.OP_DOT, **{"from": [0, 0]})]).SerializeToString()
    vector = pb.VectorHead(space=target.space, term=1, number=1)
    with_body = {"codec": pb.CODEC_FLOAT32, "dtype": pb.DTYPE_FLOAT32, "count": 8}

    def frame(kind: int, payload: bytes = b"", **fields: Any) -> Any:
        return client.frame(kind, entry, 0, payload, **fields)

    run = frame(pb.KIND_VECTOR, program)
    run.header.ClearField("slice")
    run.header.vector.CopyFrom(vector)
    run.header.parts.append(pb.Part(slice=entry.placement.slices[0]))
    portion = frame(pb.KIND_PORTION, body, **with_body)
    portion.header.portion.CopyFrom(pb.PortionHead(space=target.space, batch=1))
    return {
        "KIND_GRADIENT": frame(pb.KIND_GRADIENT, body, sequence=1, **with_body),
        "KIND_ASSIGN": frame(pb.KIND_ASSIGN, body, sequence=2, **with_body),
        "KIND_PULL": frame(pb.KIND_PULL),
        "KIND_PULL_STATE": frame(pb.KIND_PULL_STATE),
        "KIND_ASSIGN_STATE": frame(pb.KIND_ASSIGN_STATE, sequence=3, step=1, **(with_body | {"count": 0})),
        "KIND_RESOLVE": frame(pb.KIND_RESOLVE, sequence=4),
        "KIND_DELTA": frame(pb.KIND_DELTA, body, sequence=5, **with_body),
        "KIND_VECTOR": run,
        "KIND_PULL_VERSION": frame(pb.KIND_PULL_VERSION),
        "KIND_PORTION": portion,
    }


def sent_by_clients(pb: Any) -> list[str]:
    values = pb.Kind.DESCRIPTOR.values
    return [value.name for value in values if value.GetOptions().Extensions[pb.least_role_of_kind]]


def calls(pb: Any) -> list[str]:
    return [call.name for call in pb.DESCRIPTOR.services_by_name["Control"].methods]


def outcome(call: Callable[[], str]) -> str:
    """The answer, or the kind of the refusal."""
    try:
        return call()
    except Refused as refused:
        return refused.refusal.kind


def of_call(client: ForeignClient, method: str, request: Any, target: Target) -> str:
    """Outcome of a call: whether the answer has what the caller asked for."""
    answer = client.call(0, method, request)
    name = answer.DESCRIPTOR.name
    listed = {
        "GetMapResponse": lambda: any(entry.spec.name == target.spec.name for entry in answer.entries),
        "ListSpacesResponse": lambda: any(entry.name == target.space_name for entry in answer.spaces),
    }.get(name, lambda: True)()
    return "ok" if listed else "ok, without it"


def of_frame(client: ForeignClient, frame: Any) -> str:
    (answer,) = client.stream(0).exchange([frame])
    refusals = [refusal.refusal.kind for refusal in answer.header.table.refusals]
    return answer.header.refusal.kind or ", ".join(refusals) or "ok"


def outcomes(client: ForeignClient, new: Callable[[str], Target]) -> dict[str, str]:
    """Outcome of every call and kind of frame, each with its own target."""
    pb, found = client.pb, {}
    for method in calls(pb):
        target = new(method)
        # Each has its own session, so that no call depends on another.
        fresh = client.pb.HelloRequest(
            client=secrets.randbits(64) | 1, secret=client.secret, protocol_minor=1
        )
        if method != "Hello":
            client.call(0, "Hello", fresh)
        request = requests(pb, fresh.client, client.secret, target)[method]
        found[method] = outcome(partial(of_call, client, method, request, target))
    for kind in sent_by_clients(pb):
        found[kind] = of_frame(client, frames(client, new(kind))[kind])
    return found


def of_stranger(client: ForeignClient, target: Target) -> set[str]:
    """Outcomes for a caller that the server does not know."""
    asked = requests(client.pb, 1, b"x" * 16, target)
    found = {outcome(partial(client.call, 0, method, request)) for method, request in asked.items()}
    with pytest.raises(grpc.RpcError) as raised:
        client.stream(0).exchange([client.frame(client.pb.KIND_PULL, target.entry, 0)])
    return found | {raised.value.code().name.lower()}


def of_outcast(client: ForeignClient, target: Target) -> dict[str, str]:
    """Outcome of every call and kind of frame for a caller that the server no longer answers."""
    found, (control,) = {}, client.controls
    for method, request in requests(client.pb, client.client, client.secret or b"", target).items():
        call = getattr(control, method).future(request, timeout=60)
        found[method] = call.code().name.lower()
    for kind, frame in frames(client, target).items():
        with pytest.raises(grpc.RpcError) as raised:
            client.stream(0).exchange([frame])
        found[kind] = raised.value.code().name.lower()
        client.streams.clear()
    return found


@pytest.fixture
def owner(stubs: Stubs, tokens: Tokens, authority: Authority) -> Iterator[ForeignClient]:
    """A client of everything, and the server that asks for tokens or certificates with a role."""
    tokens.add("owner", "server")
    for caller, (role, scope) in CALLERS.items():
        tokens.add(caller.replace(" ", "-"), role, scope)
    tokens.add("expired", "server", "*", "expires=2020-01-01")
    tokens.add("revoked", "server")
    with (
        fastps.serve(
            tokens=tokens.file,
            **authority.server("127.0.0.1"),
            tls_ca=authority.file,
            tls_crl=authority.revoked(),
        ) as server,
        ForeignClient(
            stubs, server.address_list, token=tokens.text["owner"], credentials=authority.credentials()
        ) as client,
    ):
        tokens.revoke("revoked")
        client.server = server
        yield client


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.mark.timeout(300)
def test_every_call_by_every_caller(
    owner: ForeignClient, stubs: Stubs, tokens: Tokens, authority: Authority
) -> None:
    table: Table = {}

    def client(stack: ExitStack, **shown: Any) -> ForeignClient:
        addresses = owner.server.address_list
        return stack.enter_context(ForeignClient(stubs, addresses, **shown))

    with ExitStack() as stack:
        plain = authority.credentials()
        files, certificate = authority.client("revoked", role="server")
        revoked = client(stack, credentials=authority.credentials_of(files))
        assert revoked.call(0, "Stats", stubs.pb.StatsRequest()).counters
        authority.revoked(certificate)
        for caller, (role, scope) in CALLERS.items():
            by_token = client(stack, token=tokens.text[caller.replace(" ", "-")], credentials=plain)
            found = outcomes(by_token, lambda of: Target(owner, True, of))
            by_certificate = client(stack, credentials=authority.credentials(role, scope))
            assert outcomes(by_certificate, lambda of: Target(owner, True, of)) == found, caller
            for call, text in found.items():
                table.setdefault(call, {})[caller] = text
            if scope not in ("*", "a"):
                # A forbidden target is answered like one that does not exist.
                unknown = outcomes(by_token, lambda of: Target(owner, False, of))
                assert unknown == found, caller
        end = time.monotonic() + 60
        while owner.call(0, "Stats", stubs.pb.StatsRequest()).counters["token_reloads"] < 1:
            assert time.monotonic() < end, "the token file is not read again"
            time.sleep(0.05)
        for text in (None, new_token(), tokens.text["expired"], tokens.text["revoked"]):
            stranger = client(stack, token=text, credentials=plain, hello=False)
            assert of_stranger(stranger, Target(owner, False)) == {"unauthenticated"}
        files, _ = authority.client("expired", role="server", until=-DAY / 2)
        expired = client(stack, credentials=authority.credentials_of(files), hello=False)
        while owner.call(0, "Stats", stubs.pb.StatsRequest()).counters["tls_reloads"] < 1:
            assert time.monotonic() < end, "the list of revoked certificates is not read again"
            time.sleep(0.05)
        for caller, outcast in (("revoked certificate", revoked), ("expired certificate", expired)):
            for call, text in of_outcast(outcast, Target(owner, False)).items():
                table[call][caller] = text
    if os.environ.get("FASTPS_REGENERATE"):
        EXPECTED.write_text(json.dumps(table, indent=1) + "\n")
    assert table == json.loads(EXPECTED.read_text())


def test_the_table_follows_the_roles_of_the_descriptor(stubs: Stubs) -> None:
    """A caller is denied exactly what needs a higher role than its own."""
    pb, table = stubs.pb, json.loads(EXPECTED.read_text())
    control = pb.DESCRIPTOR.services_by_name["Control"].methods
    needed = {call.name: call.GetOptions().Extensions[pb.least_role] for call in control}
    kinds = pb.Kind.DESCRIPTOR.values
    needed |= {kind.name: kind.GetOptions().Extensions[pb.least_role_of_kind] for kind in kinds}
    assert table.keys() == {name for name, role in needed.items() if role}
    ranks = {"reader": 1, "worker": 2, "admin": 3, "server": 4}
    for call, found in table.items():
        for caller, rank in ranks.items():
            # Nobody may send a difference yet.
            assert (found[caller] == "denied") == (rank < needed[call]) or call == "KIND_DELTA", call
        assert found["worker of the group"] == found["worker"], call
