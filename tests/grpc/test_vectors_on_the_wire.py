"""Vectors through freshly generated stubs: programs, portions, batches; bad ones change nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from foreign_client import ForeignClient, Message, Refused
from samples import SMALL, FreshName, normal
from spaces import Space

import fastps


@pytest.fixture
def space(foreign: ForeignClient, fresh_name: FreshName) -> Iterator[Space]:
    space = Space(foreign, fresh_name("space"))
    yield space
    space.close()


def test_a_program_is_run_once_and_remembered(space: Space) -> None:
    w = np.concatenate([space.client.pull(tensor)[0] for tensor in space.tensors])
    program = [space.op("COMBINE", 1, (0,), (2.0,)), space.op("DOT", 0, (0, 1)), space.op("MAX_ABS", 0, (1,))]
    dot, largest = space.run(*program)
    assert dot == pytest.approx(2 * float(w.astype(float) @ w), rel=1e-12)
    assert largest >= 2 * np.abs(w).max()  # summed over two slices
    doubled = space.run(space.op("SCALE", 1, (), (2.0,)), space.op("DOT", 0, (0, 1)))
    again = space.run(space.op("SCALE", 1, (), (2.0,)), space.op("DOT", 0, (0, 1)), number=space.number)
    assert again == doubled == [2 * dot]
    values = np.frombuffer(space.pull(0, 1).payload, "<f4")
    assert values.tobytes() == (4 * space.client.pull(space.tensors[0])[0]).tobytes()


def test_portions_count_once_and_a_batch_is_reported(space: Space) -> None:
    pb, me = space.pb, space.client.client
    space.run(space.op("BEGIN_SUM", 0, (2, 0), (1.0,), batch=5))
    task = pb.BatchTask(batch=5, portions=2, asked=2, samples=20, vector=1, min_replicas=1, backups=True)

    def ask(**fields: Any) -> Message:
        request = pb.BatchPortionRequest(client=me, space=space.name, replica=9, name="r", **fields)
        return space.client.call(0, "BatchPortion", request)

    def batch() -> Message:
        request = pb.BatchRequest(client=me, space=space.space, term=1, task=task)
        return space.client.call(0, "Batch", request)

    assert not ask().HasField("given")
    assert not batch().over
    given = ask().given
    assert (list(given.tensors), given.portion, given.likely_next) == (space.tensors, 0, 1)
    gradients = [normal((SMALL,), seed) for seed in (3, 4)]
    for portion in (0, 1, 1):
        for tensor, values in enumerate(gradients):
            header = space.send(*space.portion(tensor, values, 5, portion))
            assert header.kind == pb.KIND_RECEIPT, header.refusal
    assert header.duplicate
    for portion in (0, 1):
        report = pb.PortionReport(batch=5, portion=portion, loss=2.5 + portion)
        ask(report=report, known=space.space, then=pb.PORTION_THEN_REST)
        ask(known=space.space)
    latest = batch()
    assert (latest.over, list(latest.losses), list(latest.by), list(latest.names)) == (
        True,
        [2.5, 3.5],
        [1, 1],
        ["r"],
    )
    space.run(space.op("END_SUM", 2))
    for tensor, values in enumerate(gradients):
        assert space.pull(tensor, 2).payload == (2 * values).astype("<f4").tobytes()
    shard, late = space.portion(0, gradients[0], 5, 0)
    assert space.send(shard, late).refusal.kind == "stale_push"
    assert space.pull(0, 1, batch=5).header.refusal.kind == "stale_push"


def test_the_tensor_takes_no_pushes_and_cannot_be_removed(space: Space) -> None:
    frame = space.client.gradient_frames(space.tensors[0], normal((SMALL,), 5))[0]
    (answer,) = space.client.exchange(space.tensors[0], [frame])
    assert answer.header.refusal.kind == "precondition"
    assert space.name in answer.header.refusal.message
    with pytest.raises(Refused, match="is open over the tensor"):
        space.client.call(0, "Unregister", space.pb.UnregisterRequest(name=space.tensors[0]))


def test_the_state_of_a_coordinator_is_kept_and_former_ones_are_fenced(space: Space) -> None:
    space.coordinate(space.pb.SEAT_STORE, term=1, state=b"\xff\0state")
    seat = space.coordinate(space.pb.SEAT_TAKE, term=1, name="again")
    assert (seat.term, seat.state) == (2, b"\xff\0state")
    with pytest.raises(Refused) as raised:
        space.coordinate(space.pb.SEAT_STORE, term=1, state=b"")
    assert raised.value.refusal.kind == "fenced"
    frames = space.frames(space.op("ZERO", 1))
    for shard, frame in frames.items():
        frame.header.vector.term = 2
        space.client.stream(shard).exchange([frame])
    for shard, frame in space.frames(space.op("ZERO", 1)).items():
        (answer,) = space.client.stream(shard).exchange([frame])
        assert {refusal.refusal.kind for refusal in answer.header.table.refusals} == {"fenced"}
    with pytest.raises(Refused, match="too long"):
        space.coordinate(space.pb.SEAT_STORE, term=2, state=bytes((1 << 16) + 1))


def test_spaces_are_listed(space: Space, native: fastps.ParameterServer) -> None:
    page = space.client.call(0, "ListSpaces", space.pb.ListSpacesRequest())
    [entry] = [entry for entry in page.spaces if entry.name == space.name]
    assert (entry.space, list(entry.tensors), list(entry.vectors)) == (space.space, space.tensors, ["g", "p"])
    assert (entry.coordinator, entry.keep_for_ms, page.next) == ("foreign", 60_000, "")
    assert fastps.optimize.drop(native, space.name)
    assert not fastps.optimize.drop(native, space.name)


def test_a_program_of_too_much_work_does_not_begin(space: Space) -> None:
    space.run(space.op("COMBINE", 1, (0,), (1.0,)))
    before = [space.pull(tensor, 1).payload for tensor in range(2)]
    large = [space.op("COMBINE", 1, (1,) * 65, (1.0,) * 65)] * 256
    for shard, frame in space.frames(*large).items():
        (answer,) = space.client.stream(shard).exchange([frame])
        refusals = [refusal.refusal for refusal in answer.header.table.refusals]
        assert len(refusals) == len(frame.header.parts)
        assert {refusal.kind for refusal in refusals} == {"config"}
        assert {refusal.tensor for refusal in refusals} <= set(space.tensors)
        assert {(refusal.expected, refusal.got) for refusal in refusals} == {("at most 4352", "16896")}
    assert [space.pull(tensor, 1).payload for tensor in range(2)] == before
    # Its number was not used.
    (largest,) = space.run(space.op("MAX_ABS", 0, (1,)), number=space.number)
    assert largest > 0


def vector(**fields: int) -> Callable[[Space, Message], None]:
    def spoil(space: Space, frame: Message) -> None:
        for field, value in fields.items():
            setattr(frame.header.vector, field, value)

    return spoil


def program(make: Callable[[Space], list[Message]]) -> Callable[[Space, Message], None]:
    def spoil(space: Space, frame: Message) -> None:
        frame.payload = space.pb.Program(ops=make(space)).SerializeToString()

    return spoil


BAD_PROGRAMS: dict[str, tuple[Callable[[Space, Message], Any], str]] = {
    "no program": (lambda s, f: setattr(f, "payload", b"\xff" * 30), "frame"),
    "cut short": (lambda s, f: setattr(f, "payload", f.payload[:-1]), "frame"),
    "a million empty operations": (lambda s, f: setattr(f, "payload", b"\x0a\0" * 10**6), "frame"),
    "an endless operation": (
        lambda s, f: setattr(f, "payload", b"\x0a\xff\xff\xff\x7f" + bytes(50)),
        "config",
    ),
    "257 operations": (program(lambda s: [s.op("ZERO", 1)] * 257), "config"),
    "4,097 results": (program(lambda s: [s.op("BLOCK", 64, (0,) * 128), s.op("DOT", 0, (0, 0))]), "config"),
    "an unknown operation": (program(lambda s: [s.pb.Op(code=99)]), "frame"),
    "fields of another operation": (program(lambda s: [s.op("ZERO", 1, (), (1.0,))]), "frame"),
    "a factor that is NaN": (program(lambda s: [s.op("SCALE", 1, (), (np.nan,))]), "config"),
    "a vector that is not there": (program(lambda s: [s.op("COPY", 3, (1,))]), "config"),
    "the tensor would be infinite": (program(lambda s: [s.op("SCALE", 0, (), (1e300,))]), "non_finite"),
    "a sum that is not open": (program(lambda s: [s.op("END_SUM", 1)]), "precondition"),
    "another space": (vector(space=2**63), "config"),
    "no number": (vector(number=0), "frame"),
    "an index": (vector(index=0), "frame"),
    "no parts": (lambda s, f: f.header.ClearField("parts"), "frame"),
    "5,000 parts": (lambda s, f: [f.header.parts.add() for _ in range(5000)], "frame"),
    "rows": (lambda s, f: setattr(f.header.parts[0], "count", 1), "frame"),
    "an unknown slice": (lambda s, f: setattr(f.header.parts[0], "slice", 5), "unknown_tensor"),
    "an identity": (lambda s, f: setattr(f.header, "sequence", 1), "frame"),
    "a codec": (lambda s, f: setattr(f.header, "codec", 1), "frame"),
    "another group": (lambda s, f: setattr(f.header, "group", 99), "frame"),
    "another epoch": (lambda s, f: setattr(f.header, "epoch", 99), "stale_epoch"),
    "another client": (lambda s, f: setattr(f.header, "client", 99), "lease"),
}


@pytest.mark.parametrize("case", BAD_PROGRAMS)
def test_a_bad_program_is_refused_and_changes_nothing(space: Space, case: str) -> None:
    spoil, kind = BAD_PROGRAMS[case]
    space.run(space.op("COPY", 1, (0,)))
    before = [space.pull(tensor, k).payload for tensor in range(2) for k in range(3)]
    for shard, frame in space.frames(space.op("AXPY", 0, (1,), (1.0,))).items():
        frame.header.parts.reverse()
        spoil(space, frame)
        (answer,) = space.client.stream(shard).exchange([frame])
        refusals = [part.refusal for part in answer.header.table.refusals] or [answer.header.refusal]
        assert kind in {refusal.kind for refusal in refusals}, (case, answer.header)
    if case not in ("an unknown slice", "another space"):  # other parts of the message are run
        after = [space.pull(tensor, k).payload for tensor in range(2) for k in range(3)]
        assert after == before
    assert space.run(space.op("DOT", 0, (2, 2))) == [0.0]


BAD_PORTIONS: dict[str, tuple[Callable[[Space, Message], Any], str]] = {
    "too short": (lambda s, f: setattr(f, "payload", f.payload[:-4]), "shape"),
    "another count": (lambda s, f: setattr(f.header, "count", 1), "shape"),
    "another codec": (lambda s, f: setattr(f.header, "codec", 2), "dtype"),
    "another dtype": (lambda s, f: setattr(f.header, "dtype", 2), "dtype"),
    "NaN": (lambda s, f: setattr(f, "payload", f.payload[:-4] + np.float32("nan").tobytes()), "non_finite"),
    "outside the grid": (
        lambda s, f: setattr(f, "payload", f.payload[:-4] + np.float32(1e30).tobytes()),
        "precondition",
    ),
    "another batch": (lambda s, f: setattr(f.header.portion, "batch", 4), "stale_push"),
    "another portion": (lambda s, f: setattr(f.header.portion, "portion", 2), "config"),
    "another space": (lambda s, f: setattr(f.header.portion, "space", 4), "config"),
    "no portion": (lambda s, f: f.header.ClearField("portion"), "frame"),
    "an identity": (lambda s, f: setattr(f.header, "sequence", 4), "frame"),
}


@pytest.mark.parametrize("case", BAD_PORTIONS)
def test_a_bad_portion_is_refused_and_may_be_sent_again(space: Space, case: str) -> None:
    spoil, kind = BAD_PORTIONS[case]
    space.run(space.op("BEGIN_SUM", 0, (1, 0), (1.0,), batch=5))
    values = normal((SMALL,), 3)
    shard, frame = space.portion(0, values, 5, 0)
    spoil(space, frame)
    refused = space.send(shard, frame)
    assert refused.refusal.kind == kind, refused
    for tensor in range(2):
        assert not space.send(*space.portion(tensor, values, 5, 0)).duplicate
    space.run(space.op("END_SUM", 1))
    assert space.pull(0, 1).payload == values.astype("<f4").tobytes()


BAD_SPACES = {
    "no tensors": ({"tensors": []}, "config"),
    "an unknown tensor": ({"tensors": ["nowhere"], "slices": []}, "unknown_tensor"),
    "no vectors": ({"name": "another", "vectors": []}, "config"),
    "65 vectors": ({"name": "another", "vectors": [str(k) for k in range(65)]}, "config"),
    "a vector named w": ({"name": "another", "vectors": ["w"]}, "config"),
    "no name": ({"name": ""}, "config"),
    "a name that is too long": ({"name": "n" * 1025}, "config"),
    "others than those that are open": ({"vectors": ["g"]}, "precondition"),
    "over tensors of another space": ({"name": "another"}, "precondition"),
    "a slice that is not there": ({"slices": [5]}, "unknown_tensor"),
    "a number that another shard gives": ({"space": 77}, "config"),
}


@pytest.mark.parametrize("case", BAD_SPACES)
def test_a_bad_space_is_refused_and_none_is_left(space: Space, case: str) -> None:
    fields, kind = BAD_SPACES[case]
    if case == "over tensors of another space" and not any(shard == 0 for shard, *_ in space.slices):
        pytest.skip("shard 0 has no slice of the tensors")
    with pytest.raises(Refused) as raised:
        space.open(0, **{"space": 0, **fields})
    assert raised.value.refusal.kind == kind, raised.value.refusal
    page = space.client.call(0, "ListSpaces", space.pb.ListSpacesRequest())
    assert "another" not in [entry.name for entry in page.spaces]
