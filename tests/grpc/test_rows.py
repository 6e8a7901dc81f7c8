"""Sparse messages of a foreign client: many parts, each with its own outcome; native clients agree."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import encoders
import numpy as np
import pytest
from encoders import BFLOAT16, FLOAT32, INT8
from foreign_client import ForeignClient, Message, Stubs, slice_of
from samples import FreshName, normal

import fastps

# Rows that straddle both borders of the middle one of three slices.
WIDTH = 1000
ROWS = 3 * encoders.SLICE_LEN // WIDTH


def pieces(entry: Message, rows: Iterable[int]) -> dict[int, list[tuple[int, slice]]]:
    """For each slice the rows in it: their numbers there, and their elements in the tensor."""
    found: dict[int, list[tuple[int, slice]]] = {}
    for row in rows:
        for k in range(len(entry.placement.slices)):
            part = slice_of(entry, k)
            start, stop = max(row * WIDTH, part.start), min((row + 1) * WIDTH, part.stop)
            if start < stop:
                found.setdefault(k, []).append((row - part.start // WIDTH, slice(start, stop)))
    return found


class Sparse:
    """One tensor of a foreign client, and how its sparse messages are made."""

    def __init__(self, client: ForeignClient, name: str) -> None:
        self.client, self.pb, self.entry = client, client.pb, client.entry(name)

    def of_shards(self, rows: Iterable[int]) -> dict[int, dict[int, list[tuple[int, slice]]]]:
        shards: dict[int, dict[int, list[tuple[int, slice]]]] = {}
        for k, of_slice in pieces(self.entry, rows).items():
            shards.setdefault(self.entry.placement.shards[k], {})[k] = of_slice
        return shards

    def frame(self, kind: int, parts: list[Message], payload: bytes, **fields: Any) -> Message:
        frame = self.client.frame(kind, self.entry, 0, payload, **fields)
        frame.header.slice = 0
        frame.header.parts.extend(parts)
        return frame

    def gradient(
        self, mine: dict[int, list[tuple[int, slice]]], dense: Any, codec: int, **fields: Any
    ) -> Message:
        parts, payload = [], b""
        for k, of_slice in mine.items():
            values = np.concatenate([dense.reshape(-1)[elements] for _, elements in of_slice])
            slice_id = self.entry.placement.slices[k]
            parts.append(self.pb.Part(slice=slice_id, count=len(of_slice), elements=values.size))
            payload += np.array([row for row, _ in of_slice], "<u4").tobytes() + encoders.encode(
                codec, values
            )
        how = {"sequence": self.client.sequence, "dtype": self.pb.DTYPE_FLOAT32, "codec": codec}
        return self.frame(self.pb.KIND_GRADIENT, parts, payload, **how | fields)

    def pull(self, rows: list[int]) -> Any:
        values = np.zeros((ROWS, WIDTH), np.float32)
        for shard, mine in self.of_shards(rows).items():
            ids = self.entry.placement.slices
            parts = [self.pb.Part(slice=ids[k], count=len(of_slice)) for k, of_slice in mine.items()]
            numbers = [row for of_slice in mine.values() for row, _ in of_slice]
            frame = self.frame(self.pb.KIND_PULL, parts, np.array(numbers, "<u4").tobytes())
            (answer,) = self.client.stream(shard).exchange([frame])
            assert self.client.accepted(answer).kind == self.pb.KIND_VALUES
            assert len(answer.header.table.versions) == len(parts)
            assert len(answer.payload) == 4 * answer.header.count
            rest = np.frombuffer(answer.payload, "<f4")
            for elements in (e for of_slice in mine.values() for _, e in of_slice):
                values.reshape(-1)[elements], rest = np.split(rest, [elements.stop - elements.start])
        return values[rows]


@pytest.fixture
def table(
    foreign: ForeignClient, native: fastps.ParameterServer, fresh_name: FreshName
) -> tuple[Sparse, str]:
    name = fresh_name("table")
    native.register(name, normal((ROWS, WIDTH), 1), optimizer=fastps.Adagrad(lr=0.1))
    return Sparse(foreign, name), name


@pytest.mark.parametrize(
    ("codec", "native_codec"),
    [(FLOAT32, fastps.Float32()), (BFLOAT16, fastps.BFloat16()), (INT8, fastps.Int8())],
    ids=["float32", "bfloat16", "int8"],
)
def test_a_foreign_client_pushes_and_pulls_rows(table: Any, codec: int, native_codec: Any) -> None:
    sparse, name = table
    foreign, pb = sparse.client, sparse.pb
    border = encoders.SLICE_LEN // WIDTH
    rows = [0, 3, border, border + 1, 2 * encoders.SLICE_LEN // WIDTH, ROWS - 1]
    dense = normal((ROWS, WIDTH), 2)
    with fastps.Store() as store:
        store.register("w", normal((ROWS, WIDTH), 1), optimizer=fastps.Adagrad(lr=0.1))
        store.push("w", fastps.Sparse(rows, dense[rows]), codec=native_codec)
        expected = store.pull("w")
    foreign.sequence += 1
    for again in (False, True):
        for shard, mine in sparse.of_shards(rows).items():
            (answer,) = foreign.stream(shard).exchange([sparse.gradient(mine, dense, codec)])
            header = foreign.accepted(answer)
            assert (header.kind, header.scale) == (pb.KIND_RECEIPT, 1.0)
            assert list(header.table.versions) == [2] * len(mine)
            assert list(header.table.duplicates) == (list(range(len(mine))) if again else [])
            assert not header.table.refusals
    with fastps.connect(",".join(_addresses(foreign))) as native:
        assert native.pull(name).tobytes() == expected.tobytes()
        assert native.pull(name, indices=rows).tobytes() == expected[rows].tobytes()
    assert sparse.pull(rows).tobytes() == expected[rows].tobytes()


def test_a_foreign_client_assigns_rows(table: Any) -> None:
    sparse, name = table
    foreign, pb = sparse.client, sparse.pb
    border = encoders.SLICE_LEN // WIDTH
    rows = [0, 3, border, border + 1, 2 * encoders.SLICE_LEN // WIDTH, ROWS - 1]
    dense, expected = normal((ROWS, WIDTH), 4), normal((ROWS, WIDTH), 1)
    expected[rows] = dense[rows]
    foreign.sequence += 1
    for again in (False, True):
        for shard, mine in sparse.of_shards(rows).items():
            frame = sparse.gradient(mine, dense, FLOAT32)
            frame.header.kind = pb.KIND_ASSIGN
            (answer,) = foreign.stream(shard).exchange([frame])
            table_of_answer = foreign.accepted(answer).table
            assert list(table_of_answer.versions) == [2] * len(mine)
            assert list(table_of_answer.duplicates) == (list(range(len(mine))) if again else [])
            assert not table_of_answer.refusals
    with fastps.connect(",".join(_addresses(foreign))) as native:
        assert native.pull(name).tobytes() == expected.tobytes()
        state = native.state(name)
        assert not state["step"].any()
        assert not state["sum"].any()


@pytest.mark.parametrize(
    ("codec", "fields", "kind"),
    [
        (INT8, {}, "frame"),
        (FLOAT32, {"lr": 0.5}, "frame"),
        (FLOAT32, {"reservation": 1}, "frame"),
        (FLOAT32, {"slice": 1}, "frame"),
        (FLOAT32, {"kind": "KIND_ASSIGN_STATE", "step": 1}, "frame"),
        (FLOAT32, {"sequence": 0}, "frame"),
    ],
    ids=str,
)
def test_bad_assignments_of_rows_change_nothing(
    table: Any, codec: int, fields: dict[str, Any], kind: str
) -> None:
    sparse, name = table
    foreign, pb = sparse.client, sparse.pb
    foreign.sequence += 1
    shard, mine = next(iter(sparse.of_shards([1, 2, 3]).items()))
    frame = sparse.gradient(mine, normal((ROWS, WIDTH), 3), codec)
    frame.header.kind = pb.KIND_ASSIGN
    for field, value in fields.items():
        setattr(frame.header, field, getattr(pb, value) if isinstance(value, str) else value)
    (answer,) = foreign.stream(shard).exchange([frame])
    refused = answer.header.kind == pb.KIND_REFUSED
    refusal = answer.header.refusal if refused else answer.header.table.refusals[0].refusal
    assert refusal.kind == kind
    with fastps.connect(",".join(_addresses(foreign))) as native:
        assert native.versions(name)[name] == 1


def test_an_assignment_of_rows_has_the_golden_bytes(stubs: Stubs) -> None:
    pb = stubs.pb
    header = pb.Header(kind=pb.KIND_ASSIGN, tag=5, codec=FLOAT32, dtype=pb.DTYPE_FLOAT32, group=1, epoch=1)
    header.client, header.sequence = 9, 3
    header.parts.extend([pb.Part(slice=7, count=2, elements=4), pb.Part(slice=8, count=1, elements=2)])
    parts = [([1, 3], [1, -2, 0.5, 4]), ([0], [8, -0.0])]
    bodies = (np.array(r, "<u4").tobytes() + np.array(values, "<f4").tobytes() for r, values in parts)
    frame = pb.Frame(header=header, payload=b"".join(bodies))
    golden = Path(__file__).resolve().parents[1] / "vectors/row_assignment.hex"
    assert frame.SerializeToString(deterministic=True).hex() == golden.read_text().strip()


def _addresses(foreign: ForeignClient) -> list[str]:
    hello = foreign.hello(0, renew=True)
    return list(hello.cluster)


def test_parts_are_refused_one_by_one(table: Any) -> None:
    sparse, _ = table
    foreign, dense = sparse.client, normal((ROWS, WIDTH), 3)
    foreign.sequence += 1
    shard, mine = next(iter(sparse.of_shards([1, 300, 600]).items()))
    frame = sparse.gradient(mine, dense, FLOAT32)
    frame.header.parts[0].slice = 1 << 60
    (answer,) = foreign.stream(shard).exchange([frame])
    (refusal,) = foreign.accepted(answer).table.refusals
    assert (refusal.part, refusal.refusal.kind) == (0, "unknown_tensor")
    assert list(answer.header.table.versions) == [0] + [2] * (len(mine) - 1)


def test_bad_sparse_messages_change_nothing(table: Any) -> None:
    sparse, _ = table
    foreign, pb, dense = sparse.client, sparse.pb, normal((ROWS, WIDTH), 3)
    foreign.sequence += 1
    shard, mine = next(iter(sparse.of_shards([1, 2, 3]).items()))

    def spoiled(change: Any) -> Message:
        frame = sparse.gradient(mine, dense, FLOAT32)
        change(frame)
        (answer,) = foreign.stream(shard).exchange([frame])
        if answer.header.kind == pb.KIND_REFUSED:
            return answer.header.refusal.kind
        return answer.header.table.refusals[0].refusal.kind

    def numbers(*rows: int) -> Any:
        def change(frame: Message) -> None:
            frame.payload = np.array(rows, "<u4").tobytes() + frame.payload[12:]

        return change

    def set_header(**fields: Any) -> Any:
        return lambda frame: [setattr(frame.header, field, value) for field, value in fields.items()]

    def cut(frame: Message) -> None:
        frame.payload = frame.payload[:-1]

    def fewer(frame: Message) -> None:
        frame.header.parts[0].elements -= 1

    def huge(frame: Message) -> None:
        frame.header.parts[0].count = 2**64 - 1

    def twice(frame: Message) -> None:
        frame.header.parts.append(frame.header.parts[0])
        frame.payload += frame.payload

    def not_finite(frame: Message) -> None:
        frame.payload = frame.payload[:-4] + np.float32(np.nan).tobytes()

    def answers(frame: Message) -> None:
        frame.header.table.versions.append(1)

    for change, kind in [
        (numbers(1, 1, 2), "frame"),
        (numbers(2, 1, 3), "frame"),
        (numbers(1, 2, 2**32 - 1), "frame"),
        (set_header(count=3), "frame"),
        (set_header(slice=5), "frame"),
        (set_header(want_values=True), "frame"),
        (set_header(base_version=1), "frame"),
        (set_header(kind=pb.KIND_ASSIGN_STATE, step=1), "frame"),
        (set_header(lr=-1.0), "config"),
        (cut, "frame"),
        (fewer, "frame"),
        (huge, "frame"),
        (twice, "frame"),
        (not_finite, "non_finite"),
        (answers, "frame"),
    ]:
        assert spoiled(change) == kind, change
    assert spoiled(set_header(crc32c=1)) == "frame"
    assert sparse.pull([1, 2, 3]).tobytes() == normal((ROWS, WIDTH), 1)[[1, 2, 3]].tobytes()
