"""Connections between parts that are processes, over gloo."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import queue
import threading
import time
from typing import Any

import torch
import torch.distributed as dist

from fastps.errors import FrameError
from fastps.torch.parallel.links.links import Inbox, Lost
from fastps.torch.parallel.links.messages import HEADER, INLINE, Kind, Message, pack, unpack

__all__ = ["Gloo"]

#: Tags of the two messages; the group may be a user's own.
_FIRST, _SECOND = 0x6670, 0x6671
#: A receiving thread waits without a limit: a part may compute for hours.
_FOREVER = datetime.timedelta(days=3650)
#: Seconds in which an error reaches those that still listen, and in which threads end.
_LINGER = 2.0


class Buffers:
    """Memory for tensors that arrive, by what they are; reused if no tensor refers to it any more."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, ...], torch.Tensor] = {}
        #: How many references a storage has that is only kept here.
        self._alone = _references(torch.empty(1))

    def take(self, key: tuple[int, ...], size: int, pinned: bool) -> torch.Tensor:
        """A tensor of `size` bytes."""
        kept = self._kept.get(key)
        if kept is None or kept.numel() != size or _references(kept) != self._alone:
            kept = self._kept[key] = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        return kept


def _references(tensor: torch.Tensor) -> int:
    storage: Any = tensor.untyped_storage()
    count: int = torch._C._storage_Use_Count(storage._cdata)
    return count


class Gloo:
    """Connections of a part that is a process.

    Args:
        group: A gloo group whose ranks are the parts.
        timeout: Seconds in which a tensor whose header has come must arrive.
    """

    def __init__(self, group: dist.ProcessGroup, timeout: float) -> None:
        self.inbox: Inbox = queue.SimpleQueue()
        self.waits_for = -1
        #: Where received tensors go next is a GPU, so they arrive in pinned memory.
        self.pinned = False
        self._group, self._timeout = group, datetime.timedelta(seconds=timeout)
        self._closing = False
        #: Sends under way with the memory they read; small ones are waited for one call later.
        self._large: list[tuple[Any, torch.Tensor]] = []
        self._small: list[tuple[Any, torch.Tensor]] = []
        self._former: list[tuple[Any, torch.Tensor]] = []
        self._answers: collections.deque[tuple[Any, torch.Tensor]] = collections.deque(maxlen=64)
        self._threads = [
            threading.Thread(target=self._receive, args=[part], name=f"fastps part {part}", daemon=True)
            for part in range(group.size())
            if part != group.rank()
        ]
        for thread in self._threads:
            thread.start()

    def send(self, part: int, message: Message) -> None:
        if message.tensor is not None:
            message = dataclasses.replace(message, tensor=_in_memory(message.tensor))
        first, second = pack(message)
        try:
            self._small.append((self._group.send([first], part, _FIRST), first))
            if second is not None:
                self._large.append((self._group.send([second], part, _SECOND), second))
        except RuntimeError as error:
            if not self._closing:
                self.inbox.put(Lost(part, str(error)))

    def settle(self) -> None:
        done, self._former = self._large + self._former, self._small
        self._large, self._small = [], []
        self._wait_for(done, self._timeout.total_seconds())

    def close(self, broken: bool) -> None:
        self._closing = True
        self._wait_for(self._former + self._small + self._large, _LINGER)
        end = time.monotonic() + (0.0 if broken else _LINGER)
        for thread in self._threads:  # each ends with the other part's CLOSE, or with the process
            thread.join(max(0.0, end - time.monotonic()))

    def _wait_for(self, sends: list[tuple[Any, torch.Tensor]], seconds: float) -> None:
        end = time.monotonic() + seconds
        for work, _ in sends:
            try:
                work.wait(datetime.timedelta(seconds=max(0.001, end - time.monotonic())))
            except RuntimeError:
                continue  # the receiving thread reports a lost connection

    def _receive(self, part: int) -> None:
        """What a receiving thread does."""
        buffers = Buffers()
        try:
            while True:
                wire = torch.empty(HEADER + INLINE, dtype=torch.uint8)
                self._wait(part, wire, _FIRST, _FOREVER)
                message, shape, dtype, missing = unpack(wire)
                message.source = part
                if missing:
                    key = (message.kind, message.number, message.micro_batch)
                    buffer = buffers.take(key, missing, self.pinned)
                    self._wait(part, buffer, _SECOND, self._timeout)
                    message.tensor = buffer.view(dtype).view(shape)
                if message.kind is Kind.ASK:
                    answer, _ = pack(Message(Kind.ANSWER, rows=self.waits_for))
                    self._answers.append((self._group.send([answer], part, _FIRST), answer))
                    continue
                self.inbox.put(message)
                if message.kind is Kind.CLOSE:
                    return
        except (RuntimeError, FrameError) as error:
            if not self._closing:
                self.inbox.put(Lost(part, str(error)))

    def _wait(self, part: int, buffer: torch.Tensor, tag: int, timeout: datetime.timedelta) -> None:
        self._group.recv([buffer], part, tag).wait(timeout)


def _in_memory(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's values in contiguous CPU memory, pinned if they come from a GPU."""
    if tensor.device.type == "cpu":
        return tensor.contiguous()
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda).copy_(tensor)
