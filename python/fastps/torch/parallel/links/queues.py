"""Connections between parts that are threads of one process."""

from __future__ import annotations

import dataclasses
import queue

from fastps.torch.parallel.links.links import Inbox
from fastps.torch.parallel.links.messages import Kind, Message

__all__ = ["Queues"]


class Queues:
    """Connections of a part that is a thread.

    Args:
        part: Its number.
        all: The connections of all parts, which this one joins.
    """

    def __init__(self, part: int, all: list[Queues]) -> None:
        self.inbox: Inbox = queue.SimpleQueue()
        self.waits_for = -1
        self._part, self._all = part, all
        all.append(self)

    def send(self, part: int, message: Message) -> None:
        if message.kind is Kind.ASK:
            self.inbox.put(Message(Kind.ANSWER, rows=self._all[part].waits_for, source=part))
        else:
            self._all[part].inbox.put(dataclasses.replace(message, source=self._part))

    def settle(self) -> None: ...

    def close(self, broken: bool) -> None: ...
