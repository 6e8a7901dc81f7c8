"""Connections between parts that are processes, over gloo."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import datetime
import queue
import threading
import time
from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist

from fastps.errors import FrameError
from fastps.torch.parallel.links.links import Inbox, Lost
from fastps.torch.parallel.links.messages import HEADER, INLINE, Kind, Message, pack, unpack

__all__ = ["Gloo"]

#: Tags; the group may be the user's. A large tensor has a separate tag for each size of memory ahead.
_FIRST, _WITHOUT, _AHEAD = 0x6670, 0x6671, 0x6680
#: Limit of the memory that a part keeps ready for the next large tensor of another part, in bytes.
_MOST_AHEAD = 1 << 26
#: Buffers that a part keeps for another part's tensors.
_MOST_KEPT = 64
#: A receiving thread waits without a limit: a part may compute for hours.
_FOREVER = datetime.timedelta(days=3650)
#: Seconds in which an error reaches those that still listen.
_LINGER = 2.0


class Ahead:
    """Size of the memory kept ready for the next large tensor from a part to another; both ends compute it.

    It is the least power of two that had room for all before it. So gloo can begin to send a tensor of a
    familiar size before its header is read.
    """

    def __init__(self) -> None:
        self.size = 0
        self._grown = 0

    @property
    def tag(self) -> int:
        """The tag of tensors sent into this memory."""
        return _AHEAD + self._grown

    def grows(self, size: int) -> bool:
        """Returns whether the memory is replaced after a tensor of this size."""
        return self.size < size <= _MOST_AHEAD

    def grow(self, size: int) -> None:
        """Makes room for a tensor of this size."""
        self.size, self._grown = 1 << (size - 1).bit_length(), self._grown + 1


class Buffers:
    """Memory for large tensors that arrive, reused when no tensor refers to it any more."""

    def __init__(self) -> None:
        self._kept: list[torch.Tensor] = []
        #: Reference count of a storage that is kept only here.
        self._alone = _references(torch.empty(1, device="cpu"))

    def take(self, size: int) -> torch.Tensor:
        """At least `size` bytes."""
        for k, kept in enumerate(self._kept):
            if size <= kept.numel() <= 2 * size and _references(kept) == self._alone:
                return self._kept.pop(k)
        return torch.empty(size, dtype=torch.uint8, device="cpu")

    def keep(self, buffer: torch.Tensor) -> None:
        """Takes memory back, also while it is still in use; the oldest of too many is given up."""
        self._kept.append(buffer)
        del self._kept[:-_MOST_KEPT]


def _references(tensor: torch.Tensor) -> int:
    storage: Any = tensor.untyped_storage()
    count: int = torch._C._storage_Use_Count(storage._cdata)
    return count


class Gloo:
    """Connections of a part that is a process.

    Args:
        group: A gloo group whose ranks are the parts.
        timeout: Seconds in which a tensor whose header has come must arrive, and to wait in `close` for the
            other parts to close.
        together: The parts that end each step together with this one. Messages to other parts are freed on
            arrival, without `settle`, and those parts may leave earlier.
    """

    def __init__(self, group: dist.ProcessGroup, timeout: float, together: Collection[int]) -> None:
        self.inbox: Inbox = queue.SimpleQueue()
        self.waits_for = -1
        self._group, self._timeout = group, datetime.timedelta(seconds=timeout)
        self._together = together
        self._ahead = [Ahead() for _ in range(group.size())]
        self._closing = False
        #: Sends under way with the memory they read; small ones are waited for one call later.
        self._large: list[tuple[Any, torch.Tensor]] = []
        self._small: list[tuple[Any, torch.Tensor]] = []
        self._former: list[tuple[Any, torch.Tensor]] = []
        #: Sends to parts that do not end steps together with this one; None is the end.
        self._apart: queue.SimpleQueue[tuple[Any, torch.Tensor] | None] = queue.SimpleQueue()
        self._answers: collections.deque[tuple[Any, torch.Tensor]] = collections.deque(maxlen=64)
        self._threads = [
            threading.Thread(target=self._receive, args=[part], name=f"fastps part {part}", daemon=True)
            for part in range(group.size())
            if part != group.rank()
        ]
        if len(together) < group.size():
            name = "fastps sent"
            self._threads.append(threading.Thread(target=self._free, name=name, daemon=True))
        for thread in self._threads:
            thread.start()

    def send(self, part: int, message: Message) -> None:
        if message.tensor is not None:
            message = dataclasses.replace(message, tensor=message.tensor.cpu().contiguous())
        first, second = pack(message)
        try:
            self._start(part, first, _FIRST)
            if second is not None:
                ahead, size = self._ahead[part], second.numel()
                tag = ahead.tag if size <= ahead.size else _WITHOUT
                self._start(part, second, tag)
                if ahead.grows(size):
                    self._release(part)
                    ahead.grow(size)
            if message.kind is Kind.CLOSE:
                self._release(part)
        except RuntimeError as error:
            if not self._closing and part in self._together:  # of others, the receiving thread reports it
                self.inbox.put(Lost(part, str(error)))

    def _start(self, part: int, wire: torch.Tensor, tag: int) -> None:
        """Starts a send, and keeps the memory that it reads."""
        work = self._group.send([wire], part, tag)
        if part not in self._together:
            self._apart.put((work, wire))
        else:
            (self._small if tag == _FIRST else self._large).append((work, wire))

    def _release(self, part: int) -> None:
        """Ends the receive into memory that is ready and not needed any more: with one byte."""
        if self._ahead[part].size:
            self._start(part, torch.zeros(1, dtype=torch.uint8, device="cpu"), self._ahead[part].tag)

    def settle(self) -> None:
        done, self._former = self._large + self._former, self._small
        self._large, self._small = [], []
        self._wait_for(done, self._timeout.total_seconds())

    def close(self, broken: bool) -> None:
        self._closing = True
        self._apart.put(None)
        self._wait_for(self._former + self._small + self._large, _LINGER)
        # A thread ends with the other part's CLOSE. A message that came while the interpreter ends would
        # make it abort.
        end = time.monotonic() + (0.0 if broken else self._timeout.total_seconds())
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))

    def _wait_for(self, sends: list[tuple[Any, torch.Tensor]], seconds: float) -> None:
        end = time.monotonic() + seconds
        for work, _ in sends:
            try:
                work.wait(datetime.timedelta(seconds=max(0.001, end - time.monotonic())))
            except RuntimeError:
                continue  # the receiving thread reports a lost connection

    def _free(self) -> None:
        """Body of the thread that waits for sends to parts that may be late."""
        while (sent := self._apart.get()) is not None:
            with contextlib.suppress(RuntimeError):  # a receiving thread reports a lost connection
                sent[0].wait(_FOREVER)

    def _receive(self, part: int) -> None:
        """Body of a receiving thread."""
        buffers, ahead = Buffers(), Ahead()
        ready: tuple[Any, torch.Tensor] | None = None
        try:
            while True:
                wire = torch.empty(HEADER + INLINE, dtype=torch.uint8, device="cpu")
                self._group.recv([wire], part, _FIRST).wait(_FOREVER)
                message, shape, dtype, missing = unpack(wire)
                message.source = part
                if missing:
                    buffer = buffers.take(missing) if missing > ahead.size or ready is None else ready[1]
                    if missing > ahead.size:
                        self._group.recv([buffer[:missing]], part, _WITHOUT).wait(self._timeout)
                    if ready is not None and (missing <= ahead.size or ahead.grows(missing)):
                        ready[0].wait(self._timeout)
                        ready = None
                    if ahead.grows(missing):
                        ahead.grow(missing)
                    message.tensor = buffer[:missing].view(dtype).view(shape)
                    buffers.keep(buffer)
                if message.kind is Kind.CLOSE and ready is not None:
                    ready[0].wait(self._timeout)
                elif ready is None and ahead.size:
                    memory = buffers.take(ahead.size)
                    ready = self._group.recv([memory], part, ahead.tag), memory
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
