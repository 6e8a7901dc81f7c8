"""Connections between the parts of a replica.

Sends never block. What arrives is put into one queue per part, where the part's own thread waits, so that it
hears at once of a message, an error, a lost connection or a signal.
"""

from __future__ import annotations

import dataclasses
import queue
from typing import Protocol

from fastps.torch.parallel.links.messages import Message

__all__ = ["Inbox", "Links", "Lost"]


@dataclasses.dataclass
class Lost:
    """The connection to a part is gone."""

    part: int
    reason: str


Inbox = queue.SimpleQueue[Message | Lost]


class Links(Protocol):
    """Connections of a part.

    Attributes:
        inbox: Messages from all other parts.
        waits_for: The part that this one waits for, or -1: the answer when others ask.
    """

    inbox: Inbox
    waits_for: int

    def send(self, part: int, message: Message) -> None:
        """Starts to send; the tensor must not change until `settle`."""

    def settle(self) -> None:
        """Frees the memory of what was sent, all of which must have been received."""

    def close(self, broken: bool) -> None:
        """Ends the connections; what was sent last still arrives. If `broken`, the others do not close."""
