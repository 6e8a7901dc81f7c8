"""Messages of many whole slices: each part has the outcome that a frame of its own would have."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

import encoders
import numpy as np
import pytest
from between import between
from encoders import BFLOAT16, FLOAT32, FLOAT64, FOURBIT, INT8, ONEBIT
from foreign_client import ForeignClient, Message, Stubs
from samples import FreshName, normal

import fastps
from cases import case

UNKNOWN = 2**64 - 1
SIZES = [1, 0, 63, 64, 65, 257, 1024, 2048]
CODECS = [FLOAT32, BFLOAT16, INT8, ONEBIT, FOURBIT]


class Parts:
    """Small tensors of a foreign client, and messages about those of one shard."""

    def __init__(self, client: ForeignClient, names: Iterable[str]) -> None:
        self.client, self.pb = client, client.pb
        self.entries = {name: client.entry(name) for name in names}

    def of_shard(self, shard: int) -> list[str]:
        return [name for name, entry in self.entries.items() if entry.placement.shards[0] == shard]

    def shards(self) -> list[int]:
        return sorted({entry.placement.shards[0] for entry in self.entries.values()})

    def frame(self, kind: int, names: list[str], payload: bytes = b"", **fields: Any) -> Message:
        frame = self.client.frame(kind, self.entries[names[0]], 0, payload, **fields)
        frame.header.slice = 0
        frame.header.table.whole = True
        for name in names:
            part = self.pb.Part(slice=self.entries[name].placement.slices[0])
            if kind != self.pb.KIND_PULL:
                part.elements = int(np.prod(self.entries[name].spec.shape, dtype=int))
            frame.header.parts.append(part)
        return frame

    def push(self, names: list[str], values: dict[str, Any], codec: int = FLOAT32, **fields: Any) -> Message:
        payload = b"".join(encoders.encode(codec, values[name].reshape(-1)) for name in names)
        dtype = self.pb.DTYPE_FLOAT64 if codec == FLOAT64 else self.pb.DTYPE_FLOAT32
        fields = {"kind": self.pb.KIND_GRADIENT, "sequence": self.client.sequence} | fields
        return self.frame(fields.pop("kind"), names, payload, dtype=dtype, codec=codec, **fields)

    def send(self, shard: int, frame: Message) -> Message:
        (answer,) = self.client.stream(shard).exchange([frame])
        return answer

    def split(self, names: list[str], payload: bytes) -> dict[str, Any]:
        values, rest = {}, np.frombuffer(payload, "<f4")
        for name in names:
            count = int(np.prod(self.entries[name].spec.shape, dtype=int))
            values[name], rest = np.split(rest, [count])
        assert rest.size == 0
        return values


@pytest.fixture
def parts(foreign: ForeignClient, fresh_name: FreshName) -> Parts:
    names = [fresh_name(f"part of {size}") for size in SIZES]
    for name, size in zip(names, SIZES, strict=True):
        spec = foreign.spec(name, (size,), "adam", {"lr": 0.1})
        foreign.register(spec, normal((size,), size))
    return Parts(foreign, names)


def alone(parts: Parts, codec: int, rounds: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    """The values after pushes in frames of their own, of tensors like these."""
    values = {}
    for name, entry in parts.entries.items():
        like = parts.client.spec(f"{name}, codec {codec}, alone", entry.spec.shape, "adam", {"lr": 0.1})
        parts.client.register(
            like, normal(tuple(entry.spec.shape), int(np.prod(entry.spec.shape, dtype=int)))
        )
        for gradients in rounds:
            parts.client.push(like.name, gradients[name], codec, **fields)
        values[name] = parts.client.pull(like.name)[0]
    return values


@pytest.mark.parametrize("codec", CODECS)
def test_a_message_is_as_frames_of_their_own(parts: Parts, codec: int) -> None:
    client, pb = parts.client, parts.pb
    rounds = [
        {name: normal(tuple(entry.spec.shape), 90 + seed) for name, entry in parts.entries.items()}
        for seed in range(3)
    ]
    expected = alone(parts, codec, rounds, lr=0.25, scale=0.5)
    for k, gradients in enumerate(rounds):
        client.sequence += 1
        for again in (False, True):
            for shard in parts.shards():
                names = parts.of_shard(shard)
                frame = parts.push(names, gradients, codec, lr=0.25, scale=0.5)
                frame.header.crc32c = encoders.crc32c(frame.payload)
                header = client.accepted(parts.send(shard, frame))
                assert (header.kind, header.scale) == (pb.KIND_RECEIPT, 0.5)
                assert list(header.table.versions) == [k + 2] * len(names)
                assert list(header.table.owns) == [k + 2] * len(names)
                assert list(header.table.duplicates) == (list(range(len(names))) if again else [])
                assert list(header.table.momenta) == ([] if again else [0.9] * len(names))
                assert not header.table.refusals
                assert not header.table.scales
    for shard in parts.shards():
        names = parts.of_shard(shard)
        answer = parts.send(shard, parts.frame(pb.KIND_PULL, names))
        header = client.accepted(answer)
        assert (header.kind, header.codec) == (pb.KIND_VALUES, FLOAT32)
        assert list(header.table.versions) == [4] * len(names)
        for name, values in parts.split(names, answer.payload).items():
            assert values.tobytes() == expected[name].tobytes() == client.pull(name)[0].tobytes(), name
        for name in names:
            (settled,) = client.exchange(
                name, [client.frame(pb.KIND_RESOLVE, client.entry(name), 0, sequence=client.sequence)]
            )
            assert (client.accepted(settled).kind, settled.header.version) == (pb.KIND_RECEIPT, 4)


def test_values_come_with_the_receipts(parts: Parts) -> None:
    client, pb = parts.client, parts.pb
    gradients = {name: normal(tuple(entry.spec.shape), 7) for name, entry in parts.entries.items()}
    expected = alone(parts, FLOAT32, [gradients])
    client.sequence += 1
    for again in (False, True):
        for shard in parts.shards():
            names = parts.of_shard(shard)
            frame = parts.push(names, gradients, want_values=True)
            unknown = {"base_versions": [UNKNOWN] * len(names), "base_owns": [UNKNOWN] * len(names)}
            frame.header.table.MergeFrom(pb.PartTable(**unknown))
            frame.header.table.base_versions[0], frame.header.table.base_owns[0] = 1, 1
            answer = parts.send(shard, frame)
            header = client.accepted(answer)
            assert header.kind == pb.KIND_VALUES
            assert list(header.table.versions) == [2] * len(names)
            assert list(header.table.stalenesses)[1:] == [UNKNOWN] * (len(names) - 1)
            assert header.table.stalenesses[0] == 0
            assert list(header.table.duplicates) == (list(range(len(names))) if again else [])
            for name, values in parts.split(names, answer.payload).items():
                assert values.tobytes() == expected[name].tobytes(), name


def test_assignments_replace_whole_slices(parts: Parts) -> None:
    client, pb = parts.client, parts.pb
    values = {name: normal(tuple(entry.spec.shape), 8) for name, entry in parts.entries.items()}
    client.sequence += 1
    for shard in parts.shards():
        names = parts.of_shard(shard)
        header = client.accepted(parts.send(shard, parts.push(names, values, kind=pb.KIND_ASSIGN)))
        assert list(header.table.versions) == [2] * len(names)
        for name in names:
            assert client.pull(name)[0].tobytes() == values[name].tobytes()
            assert client.pull_state(name)[0][0] == 0


def test_a_part_is_refused_alone(parts: Parts, fresh_name: FreshName) -> None:
    client, pb = parts.client, parts.pb
    double = fresh_name("double")
    client.register(client.spec(double, (5,), dtype=pb.DTYPE_FLOAT64), np.zeros(5))
    shard = max(parts.shards(), key=lambda shard: len(parts.of_shard(shard)))
    good = [name for name in parts.of_shard(shard) if parts.entries[name].spec.shape[0] > 0]
    gradients = {name: np.ones(tuple(parts.entries[name].spec.shape), np.float32) for name in good}

    def nan(frame: Message) -> None:
        frame.payload = np.float32(np.nan).tobytes() + frame.payload[4:]

    def longer(frame: Message) -> None:
        frame.header.parts[0].elements += 1
        frame.payload = b"\0\0\0\0" + frame.payload

    def unknown(frame: Message) -> None:
        frame.header.parts[0].slice = 12345

    wide = fresh_name("wide")  # more than one shard gets, by its load
    client.register(
        client.spec(wide, (4 * encoders.SLICE_LEN,)), np.zeros(4 * encoders.SLICE_LEN, np.float32)
    )
    at = client.entry(wide).placement
    elsewhere = next(slice_id for slice_id, owner in zip(at.slices, at.shards, strict=True) if owner != shard)
    other = fresh_name("of another group")
    spec = client.spec(other, tuple(parts.entries[good[0]].spec.shape))
    spec.group = "another"
    client.register(spec, np.zeros(tuple(spec.shape), np.float32))

    def of_another_shard(frame: Message) -> None:
        frame.header.parts[0].slice = elsewhere

    def of_another_group(frame: Message) -> None:
        frame.header.parts[0].slice = client.entry(other).placement.slices[0]

    cases: list[tuple[str, Callable[[Message], None]]] = [
        ("non_finite", nan),
        ("shape", longer),
        ("unknown_tensor", unknown),
        ("unknown_tensor", of_another_shard),
        # Its own shard names the group that it has.
        ("frame" if client.entry(other).placement.shards[0] == shard else "unknown_tensor", of_another_group),
    ]
    version = 1
    for kind, spoil in cases:
        for want_values in (False, True):
            with case(kind, spoil.__name__, want_values):
                before = client.pull(good[0])
                client.sequence += 1
                frame = parts.push(good, gradients, want_values=want_values)
                spoil(frame)
                answer = parts.send(shard, frame)
                header = client.accepted(answer)
                version += 1
                (refused,) = header.table.refusals
                assert (refused.part, refused.refusal.kind) == (0, kind)
                assert list(header.table.versions) == [0] + [version] * (len(good) - 1)
                after = client.pull(good[0])
                assert (after[0].tobytes(), after[1]) == (before[0].tobytes(), before[1])
                if want_values:
                    parts.split(good[1:], answer.payload)
    whole = parts.push(good, gradients)
    whole.header.dtype = pb.DTYPE_FLOAT64
    header = client.accepted(parts.send(shard, whole))
    assert {refused.refusal.kind for refused in header.table.refusals} == {"dtype"}
    pulled = parts.frame(pb.KIND_PULL, good)
    pulled.header.parts.append(pb.Part(slice=12345))
    header = client.accepted(parts.send(shard, pulled))
    assert [(r.part, r.refusal.kind) for r in header.table.refusals] == [(len(good), "unknown_tensor")]


def test_a_message_is_refused_whole(parts: Parts) -> None:
    client, pb = parts.client, parts.pb
    shard = parts.shards()[0]
    names = parts.of_shard(shard)
    gradients = {name: np.ones(tuple(parts.entries[name].spec.shape), np.float32) for name in names}
    client.sequence += 1

    def refused(frame: Message) -> str:
        answer = parts.send(shard, frame)
        assert answer.header.kind == pb.KIND_REFUSED, answer.header
        return str(answer.header.refusal.kind)

    good = parts.push(names, gradients)
    spoilt = ("sum", "indices", "twice", "short", "beyond", "far beyond", "rows beyond", "overlapping")
    for spoil in (*spoilt, "many", "a mebibyte of empty ones", "answer", "reserved"):
        with case(spoil):
            frame = pb.Frame.FromString(good.SerializeToString())
            match spoil:
                case "sum":
                    frame.header.crc32c = 1
                case "indices":
                    frame.header.parts[0].count = 1
                case "twice":
                    frame.header.parts.append(frame.header.parts[0])
                case "short":
                    frame.payload = frame.payload[:-1]
                case "beyond":  # into what would be the next part's
                    frame.header.parts[0].elements += 1
                case "far beyond":
                    frame.header.parts[0].elements = 2**32 - 1
                case "rows beyond":
                    del frame.header.parts[1:]
                    frame.header.table.whole = False
                    frame.header.parts[0].count = UNKNOWN
                case "overlapping":  # two parts would have to share bytes
                    frame.header.parts[0].elements += 16
                    frame.header.parts[-1].elements += 16
                    frame.payload += bytes(64)
                case "a mebibyte of empty ones":
                    del frame.header.parts[:]
                    frame.header.parts.extend(pb.Part() for _ in range((1 << 20) // 3))
                    frame.payload = b""
                case "many":
                    frame.header.parts.extend(pb.Part(slice=k) for k in range(1 << 16))
                case "answer":
                    frame.header.table.versions.append(1)
                case "reserved":
                    frame.header.min_version = 1
            assert refused(frame) == "frame"
    large = parts.push(names, gradients, want_values=True)
    large.header.parts.append(pb.Part(slice=12345, elements=encoders.SLICE_LEN))
    large.payload += bytes(4 * encoders.SLICE_LEN)
    assert refused(large) == "frame"
    assert all(client.pull(name)[1] == [1] for name in names)


SMALL = 1000


def tensors(seed: int) -> dict[str, Any]:
    return {f"w{k}": normal((1 + k % 200,), seed * SMALL + k) for k in range(SMALL)}


def trained(ps: Any, codec: Any) -> dict[str, bytes]:
    """Pushes and pulls the small tensors in every way; the values at the end."""
    names = list(tensors(0))
    with fastps.Worker(ps, ps.pull(names), fastps.Async(), codec) as worker:
        begin = worker.stats().get("frames_sent", 0)
        for step in range(2):
            worker.step(tensors(1 + step))
        # A push and a pull, to each shard.
        assert worker.stats().get("frames_sent", 0) - begin <= 2 * 2 * 2
    receipts = ps.push(tensors(3), lr=0.5)
    assert all(receipt.version == 4 and receipt.scale == 1 for receipt in receipts.values())
    pulled = ps.push_pull(tensors(4), based_on=ps.versions(names))
    assert [receipt.staleness for receipt in pulled.receipts.values()] == [0] * SMALL
    values = ps.pull(names)
    assert {n: v.tobytes() for n, v in values.items()} == {n: v.tobytes() for n, v in pulled.values.items()}
    versions = ps.versions(names)
    assert all(versions[name] == pulled.versions[name] == 5 for name in names)
    return {name: value.tobytes() for name, value in values.items()}


def register(ps: Any) -> None:
    for name, values in tensors(0).items():
        ps.register(name, values, fastps.Adam(lr=0.01))


def frames_sent(ps: Any) -> int:
    return int(ps.stats()["client"]["frames_sent"])


@pytest.mark.parametrize(
    ("transport", "codec"),
    [
        ("tcp", None),
        ("tcp", fastps.OneBit()),
        ("unix", fastps.Int8()),
        ("unix", fastps.BFloat16()),
        ("shm", None),
        ("shm", fastps.FourBit()),
    ],
    ids=str,
)
def test_small_tensors_share_messages(transport: Any, codec: Any) -> None:
    with fastps.Store() as store:
        register(store)
        expected = trained(store, codec)
    with (
        fastps.serve(shards=2) as server,
        fastps.connect(server.addresses, transport=transport) as ps,
    ):
        register(ps)
        before = frames_sent(ps)
        assert trained(ps, codec) == expected
        # One message a shard for each of four calls, and for versions one a slice.
        assert frames_sent(ps) - before == 4 * 2 + 2 * SMALL


def test_a_large_slice_has_a_frame_of_its_own() -> None:
    large = np.zeros(encoders.SLICE_LEN + 5, np.float32)
    values = {"a": np.zeros(3, np.float32), "large": large, "b": np.zeros((2, 2), np.float32)}
    with fastps.serve() as server, fastps.connect(server.addresses) as ps:
        for name, initial in values.items():
            ps.register(name, initial, fastps.SGD(lr=1.0))
        before = frames_sent(ps)
        ps.push({name: np.ones_like(initial) for name, initial in values.items()})
        assert frames_sent(ps) - before == 2
        pulled, versions = ps.pull(list(values)), ps.versions(list(values))
        assert all((pulled[name] == -1).all() for name in values)
        assert [versions[name] for name in values] == [2, 2, 2]


def without_parts(
    stubs: Stubs, when: Callable[[], bool], what: str = "parts"
) -> Callable[[str, bytes], bytes]:
    """The answers of a server that is of an earlier version, from when on."""

    def change(method: str, answer: bytes) -> bytes:
        if not method.endswith("/Hello") or not when():
            return answer
        hello = stubs.pb.HelloResponse.FromString(answer)
        hello.capabilities.remove(what)
        return bytes(hello.SerializeToString())

    return change


FEW = 20


def few(value: float) -> dict[str, Any]:
    return {f"w{k}": np.full(1 + k, value, np.float32) for k in range(FEW)}


def test_an_earlier_server_gets_frames_of_their_own(stubs: Stubs) -> None:
    kinds: list[int] = []

    def seen(frame: bytes, passed_on: Callable[[bytes], bytes]) -> bytes:
        kinds.append(len(stubs.pb.Frame.FromString(frame).header.parts))
        return passed_on(frame)

    with (
        fastps.serve() as server,
        between(server.addresses, without_parts(stubs, lambda: True), seen) as address,
        fastps.connect(address) as ps,
    ):
        for name, values in few(0).items():
            ps.register(name, values, fastps.SGD(lr=1.0))
        kinds.clear()
        ps.push(few(1))
        ps.push_pull(few(1))
        assert all((values == -2).all() for values in ps.pull(list(few(0))).values())
        ps.assign(few(7))
        assert kinds == [0] * 4 * FEW
        assert all((values == 7).all() for values in ps.pull(list(few(0))).values())


def test_an_answer_is_lost_and_the_server_is_of_an_earlier_version_then(stubs: Stubs) -> None:
    """What was sent in one message is sent again in frames of their own, and applied once."""
    lost, earlier = threading.Event(), threading.Event()
    sizes: list[int] = []

    def lose(frame: bytes, passed_on: Callable[[bytes], bytes]) -> bytes | None:
        parts = len(stubs.pb.Frame.FromString(frame).header.parts)
        answer = passed_on(frame)
        if parts and lost.is_set():
            lost.clear()
            return None
        sizes.append(parts)
        return answer

    with (
        fastps.serve() as server,
        between(server.addresses, without_parts(stubs, earlier.is_set), lose) as address,
        fastps.connect(address) as ps,
    ):
        for name, values in few(0).items():
            ps.register(name, values, fastps.SGD(lr=1.0))
        for then in (False, True):
            sizes.clear()
            lost.set()
            if then:
                earlier.set()
            receipts = ps.push(few(1))
            assert all(receipt.duplicate for receipt in receipts.values())
            assert [size for size in sizes if size or then] == ([0] * FEW if then else [FEW])
        assert all((values == -2).all() for values in ps.pull(list(few(0))).values())
        assert ps.stats()["client"]["frames_resent"] >= 1 + FEW


def test_initial_values_of_small_tensors_share_messages(stubs: Stubs) -> None:
    """Also if the answer is lost, and if the server then takes only frames of their own."""
    lost, earlier = threading.Event(), threading.Event()
    sizes: list[int] = []

    def lose(frame: bytes, passed_on: Callable[[bytes], bytes]) -> bytes | None:
        header = stubs.pb.Frame.FromString(frame).header
        answer = passed_on(frame)
        if header.kind == stubs.pb.KIND_ASSIGN:
            assert len(header.table.reservations) == len(header.parts)
            assert bool(header.reservation) == (not header.parts)
            if header.parts and lost.is_set():
                lost.clear()
                return None
            sizes.append(len(header.parts))
        return answer

    changed = without_parts(stubs, earlier.is_set, "initial-parts")
    with (
        fastps.serve() as server,
        between(server.addresses, changed, lose) as address,
        fastps.connect(address) as ps,
    ):
        large = np.full(5000, 3.0, np.float32)
        for prefix, loses, then in [("a", False, False), ("b", True, False), ("c", True, True)]:
            with case(prefix):
                sizes.clear()
                if loses:
                    lost.set()
                if then:
                    earlier.set()
                given = {prefix + name: values for name, values in few(2).items()}
                ps.register(given | {prefix: large}, optimizer=fastps.SGD(lr=1.0))
                assert sorted(sizes) == ([0] * (FEW + 1) if then else [0, FEW])
                for name, values in given.items():
                    assert ps.pull(name).tobytes() == values.tobytes()
                versions = ps.versions([*given])
                assert [versions[name] for name in given] == [1] * FEW
        for name in few(0):
            ps.push("c" + name, few(1)[name])


def test_initial_values_in_parts_are_checked_alone(foreign: ForeignClient, fresh_name: FreshName) -> None:
    client, pb = foreign, foreign.pb
    first, entries = [], []
    for k in range(6):
        spec = client.spec(fresh_name(f"initial{k}"), (3,))
        first.append(client.call(0, "Register", pb.RegisterRequest(spec=spec, client=client.client)))
        entries.append(pb.MapEntry(spec=spec, placement=first[-1].placement))
    shard = max(range(2), key=lambda shard: sum(e.placement.shards[0] == shard for e in entries))
    here = [k for k, entry in enumerate(entries) if entry.placement.shards[0] == shard]
    for k in here:
        client.call(shard, "Reserve", client.reserve_request(entries[k].spec, first[k], [0]))

    def message(reservations: list[int]) -> Message:
        client.sequence += 1
        frame = client.assign_frame(entries[here[0]], 0, np.zeros(3, np.float32))
        frame.header.slice, frame.header.count = 0, 0
        frame.header.table.whole = True
        frame.header.table.reservations.extend(reservations)
        for k in here:
            frame.header.parts.append(pb.Part(slice=entries[k].placement.slices[0], elements=3))
        frame.payload = np.arange(3 * len(here), dtype=np.float32).tobytes()
        frame.header.ClearField("crc32c")
        return frame

    def refused(answer: Message) -> dict[int, str]:
        return {one.part: one.refusal.kind for one in client.accepted(answer).table.refusals}

    own = [first[k].reservation for k in here]
    (answer,) = client.stream(shard).exchange([message(own[:-1])])
    assert answer.header.refusal.kind == "frame"
    (answer,) = client.stream(shard).exchange([message([own[1], *own[1:]])])
    assert refused(answer) == {0: "lease"}
    with pytest.raises(Exception, match="initial values are missing"):
        client.call(shard, "Seal", pb.SealRequest(reservation=own[0]))
    (answer,) = client.stream(shard).exchange([message(own)])
    assert refused(answer) == {}
    for k in here:
        client.call(shard, "Seal", pb.SealRequest(reservation=first[k].reservation))
        commit = pb.CommitRequest(reservation=first[k].reservation, client=client.client)
        client.call(0, "Commit", commit)
    for j, k in enumerate(here):
        values, _ = client.pull(entries[k].spec.name)
        assert values.tolist() == [3.0 * j, 3.0 * j + 1, 3.0 * j + 2]
    # Too late: they are sealed.
    (answer,) = client.stream(shard).exchange([message(own)])
    assert set(refused(answer).values()) == {"precondition"}


def test_an_answer_to_assignments_is_lost(stubs: Stubs) -> None:
    """They are repeated in one message to the same server, and in frames of their own to an earlier one."""
    lost, earlier = threading.Event(), threading.Event()
    sizes: list[int] = []

    def lose(frame: bytes, passed_on: Callable[[bytes], bytes]) -> bytes | None:
        header = stubs.pb.Frame.FromString(frame).header
        answer = passed_on(frame)
        if header.kind == stubs.pb.KIND_ASSIGN:
            if header.parts and lost.is_set():
                lost.clear()
                return None
            sizes.append(len(header.parts))
        return answer

    with (
        fastps.serve() as server,
        between(server.addresses, without_parts(stubs, earlier.is_set), lose) as address,
        fastps.connect(address) as ps,
    ):
        for name, values in few(0).items():
            ps.register(name, values, fastps.SGD(lr=1.0))
        for value, then in ((3, False), (4, True)):
            sizes.clear()
            lost.set()
            if then:
                earlier.set()
            receipts = ps.assign(few(value))
            assert [(one.version, one.duplicate) for one in receipts.values()] == [(value - 1, True)] * FEW
            assert sizes == ([0] * FEW if then else [FEW])
        assert all((values == 4).all() for values in ps.pull(list(few(0))).values())


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_assignments_of_small_tensors_share_messages(transport: Any) -> None:
    large, rows = np.ones(encoders.SLICE_LEN + 5, np.float32), np.zeros((50, 3), np.float32)
    half = np.ones((3, 5), np.float32)

    def assigned(ps: Any) -> dict[str, bytes]:
        register(ps)
        ps.register("large", np.zeros_like(large), fastps.SGD())
        ps.register("rows", rows, fastps.SGD())
        ps.register("half", half, fastps.SGD(), dtype="bfloat16")
        ps.register("double", np.zeros(9), fastps.SGD())
        before = 0 if isinstance(ps, fastps.Store) else frames_sent(ps)
        some = fastps.Sparse([4, 30, 4], np.arange(9, dtype=np.float32).reshape(3, 3))
        others = {"large": large, "rows": some, "half": 1.001 * half, "double": np.arange(9.0)}
        receipts = ps.assign(tensors(1) | others)
        assert list(receipts) == [*tensors(1), *others]
        assert all((one.version, one.duplicate) == (2, False) for one in receipts.values())
        if isinstance(ps, fastps.Store):
            return {name: value.tobytes() for name, value in ps.pull(list(receipts)).items()}
        # To each shard one message of each type, one of rows, and one for each large slice.
        assert frames_sent(ps) - before <= 2 * 3 + 1 + 2
        return {name: value.tobytes() for name, value in ps.pull(list(receipts)).items()}

    with fastps.Store() as store:
        expected = assigned(store)
    with (
        fastps.serve(shards=2) as server,
        fastps.connect(server.addresses, transport=transport) as ps,
    ):
        assert assigned(ps) == expected


def test_nothing_is_assigned_if_one_value_does_not_fit(ps: fastps.ParameterServer) -> None:
    for name, values in few(0).items():
        ps.register(name, values, fastps.SGD(lr=1.0))
    ps.register("racing", np.zeros((4, 2), np.float32), fastps.SGD(), apply="hogwild")
    bad: list[tuple[str, Any, type[fastps.FastpsError]]] = [
        ("w9", np.zeros(3, np.float32), fastps.ShapeError),
        ("w9", np.zeros(10), fastps.DTypeError),
        ("w9", np.full(10, np.nan, np.float32), fastps.NonFiniteError),
        ("unknown", np.zeros(3, np.float32), fastps.UnknownTensorError),
        ("racing", fastps.Sparse([1], np.zeros((1, 2), np.float32)), fastps.ConfigError),
    ]
    for name, values, kind in bad:
        with case(name, kind.__name__), pytest.raises(kind) as caught:
            ps.assign(few(1) | {name: values})
        assert caught.value.tensor == name
    assert all((values == 0).all() for values in ps.pull(list(few(0))).values())
    with pytest.raises(fastps.ConfigError, match="given twice"):
        ps.assign(few(1), np.zeros(3, np.float32))  # type: ignore[call-overload]
    assert ps.assign({}) == {}


def test_an_assignment_of_a_tensor_that_is_gone_is_refused_alone() -> None:
    with fastps.serve() as server, fastps.connect(server.addresses) as ps, ps.another() as other:
        for name, values in few(0).items():
            ps.register(name, values, fastps.SGD(lr=1.0))
        other.unregister("w7")
        with pytest.raises(fastps.PartialPush) as caught:
            ps.assign(few(2))
        assert set(caught.value.receipts) == set(few(0)) - {"w7"}
        left = [name for name in few(0) if name != "w7"]
        assert all((values == 2).all() for values in ps.pull(left).values())


def test_workers_of_a_round_share_messages(stubs: Stubs) -> None:
    """The answer to a message waits until each of its parts has its version."""
    with fastps.serve() as server, fastps.connect(server.addresses) as ps, ps.another() as other:
        for name, values in few(0).items():
            ps.register(name, values, fastps.SGD(lr=1.0))
        mode = fastps.Sync(2)
        with fastps.Worker(ps, few(0), mode) as one, fastps.Worker(other, few(0), mode) as two:
            threads = [
                threading.Thread(target=lambda w=worker, g=value: [w.step(few(g)) for _ in range(5)])
                for worker, value in ((one, 1.0), (two, 3.0))
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
                assert not thread.is_alive()
        assert all((values == -10).all() for values in ps.pull(list(few(0))).values())
        versions = ps.versions(list(few(0)))
        assert {versions[name] for name in few(0)} == {6}
