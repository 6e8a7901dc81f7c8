"""A space of vectors and its coordinator, by hand-made messages."""

from __future__ import annotations

from typing import Any

import numpy as np
from encoders import FLOAT32
from foreign_client import ForeignClient, Message
from samples import SMALL, normal


class Space:
    """A space with the vectors g and p over two tensors, and its coordinator."""

    def __init__(self, client: ForeignClient, name: str) -> None:
        self.client, self.pb, self.name = client, client.pb, name
        self.tensors = [f"{name}/a", f"{name}/b"]
        for seed, tensor in enumerate(self.tensors):
            client.register(client.spec(tensor, (SMALL,)), normal((SMALL,), seed))
        self.slices: list[tuple[int, Message, int]] = []
        for tensor in self.tensors:
            placement = client.entry(tensor).placement
            pairs = zip(placement.shards, placement.slices, strict=True)
            self.slices += [(shard, client.entry(tensor), number) for shard, number in pairs]
        self.space = 0
        for shard in range(2):
            self.space = self.open(shard).space
        seat = self.coordinate(self.pb.SEAT_TAKE, name="foreign")
        assert (seat.term, seat.state) == (1, b"")
        self.number = 0

    def open(self, shard: int, **fields: Any) -> Message:
        mine = [number for at, _, number in self.slices if at == shard]
        request = self.pb.OpenSpaceRequest(
            client=self.client.client,
            name=self.name,
            tensors=self.tensors,
            vectors=["g", "p"],
            keep_for_ms=60_000,
            slices=mine,
            space=self.space,
        )
        for field, value in fields.items():
            if isinstance(value, list):
                request.ClearField(field)
                getattr(request, field).extend(value)
            else:
                setattr(request, field, value)
        return self.client.call(shard, "OpenSpace", request)

    def close(self) -> None:
        for shard in range(2):
            request = self.pb.CloseSpaceRequest(client=self.client.client, space=self.space)
            self.client.call(shard, "CloseSpace", request)

    def coordinate(self, action: int, **fields: Any) -> Message:
        client, space = self.client.client, self.space
        request = self.pb.CoordinateRequest(client=client, space=space, action=action, **fields)
        return self.client.call(0, "Coordinate", request)

    def op(
        self, code: str, to: int = 0, sources: tuple[int, ...] = (), by: tuple[float, ...] = (), **more: Any
    ):
        op = self.pb.Op(code=self.pb.OpCode.Value(f"OP_{code}"), to=to, by=by, **more)
        getattr(op, "from").extend(sources)
        return op

    def frames(self, *ops: Message, number: int | None = None) -> dict[int, Message]:
        """A program's message for each shard."""
        if number is None:
            self.number += 1
            number = self.number
        payload = self.pb.Program(ops=ops).SerializeToString()
        found = {}
        for shard in {at for at, _, _ in self.slices}:
            entry = self.client.entry(self.tensors[0])
            frame = self.client.frame(self.pb.KIND_VECTOR, entry, 0, payload)
            frame.header.slice = 0
            for at, _, slice_number in self.slices:
                if at == shard:
                    frame.header.parts.add(slice=slice_number)
            frame.header.vector.space, frame.header.vector.term = self.space, 1
            frame.header.vector.number = number
            found[shard] = frame
        return found

    def run(self, *ops: Message, **fields: Any) -> list[float]:
        """The sums of the slices' results."""
        results = []
        for shard, frame in self.frames(*ops, **fields).items():
            (answer,) = self.client.stream(shard).exchange([frame])
            assert answer.header.kind == self.pb.KIND_SCALARS, answer.header.refusal
            assert not answer.header.table.refusals
            results.append(np.frombuffer(answer.payload, "<f8").reshape(len(frame.header.parts), -1))
        return np.concatenate(results).sum(axis=0).tolist()

    def portion(self, tensor: int, values: Any, batch: int, portion: int) -> tuple[int, Message]:
        entry = self.client.entry(self.tensors[tensor])
        body = values.astype("<f4").tobytes()
        frame = self.client.body_frame(self.pb.KIND_PORTION, entry, 0, FLOAT32, body, sequence=0)
        frame.header.portion.space, frame.header.portion.batch = self.space, batch
        frame.header.portion.portion = portion
        return entry.placement.shards[0], frame

    def send(self, shard: int, frame: Message) -> Message:
        (answer,) = self.client.stream(shard).exchange([frame])
        return answer.header

    def pull(self, tensor: int, index: int, batch: int = 0) -> Message:
        entry = self.client.entry(self.tensors[tensor])
        frame = self.client.frame(self.pb.KIND_PULL, entry, 0)
        frame.header.vector.space, frame.header.vector.index = self.space, index
        frame.header.vector.batch = batch
        (answer,) = self.client.stream(entry.placement.shards[0]).exchange([frame])
        return answer
